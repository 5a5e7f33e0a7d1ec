//! What runs over the same slices say of the ranks that made them.

use std::collections::BTreeSet;

use coxswain_proto::ids::Rank;

/// What a run over a slice came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SliceOutcome {
    /// A loss or a gradient that is infinite or not a number.
    NotFinite,
    /// The digest of its gradients, its loss and its count of valid elements.
    Digest(u64),
}

/// What one rank says in one round.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ReplayRow {
    /// Outcomes of the slices that it ran, in the order of the round's shifts; none where it could not.
    pub outcomes: [Option<SliceOutcome>; 2],
    /// What it computes with. Runs on other kinds of processors may differ in the last bit.
    pub kind: u64,
    /// Whether it gets a computation right whose result is known.
    pub sound: bool,
}

/// Numbers of a row: digests in halves, for whole numbers travel unchanged up to 2^53.
pub(super) const FIELDS: usize = 9;

impl ReplayRow {
    pub fn encode(&self) -> [f64; FIELDS] {
        let mut row = [0.0; FIELDS];
        for (fields, outcome) in row.chunks_exact_mut(3).zip(self.outcomes) {
            (fields[0], fields[1], fields[2]) = match outcome {
                None => (0.0, 0.0, 0.0),
                Some(SliceOutcome::NotFinite) => (1.0, 0.0, 0.0),
                Some(SliceOutcome::Digest(digest)) => (2.0, low(digest), high(digest)),
            };
        }
        (row[6], row[7], row[8]) = (low(self.kind), high(self.kind), f64::from(u8::from(self.sound)));
        row
    }

    fn decode(row: &[f64]) -> Self {
        let outcome = |fields: &[f64]| match fields[0] as u8 {
            1 => Some(SliceOutcome::NotFinite),
            2 => Some(SliceOutcome::Digest(joined(fields[1], fields[2]))),
            _ => None,
        };
        Self {
            outcomes: [outcome(&row[0..3]), outcome(&row[3..6])],
            kind: joined(row[6], row[7]),
            sound: row[8] != 0.0,
        }
    }

    /// What all ranks say, in rank order.
    pub fn decode_all(table: &[f64]) -> Vec<Self> {
        table.chunks_exact(FIELDS).map(Self::decode).collect()
    }
}

fn low(value: u64) -> f64 {
    f64::from(value as u32)
}

fn high(value: u64) -> f64 {
    f64::from((value >> 32) as u32)
}

fn joined(low: f64, high: f64) -> u64 {
    u64::from(low as u32) | u64::from(high as u32) << 32
}

/// Which slices ranks run in the first round, as distances from their own: their own, and the next rank's.
pub(super) const FIRST: [usize; 2] = [0, 1];

/// Which slices they run in the second round, if there is doubt about them: a third rank decides; where there
/// are two, both run again what they ran before.
pub(super) fn second(world: usize) -> &'static [usize] {
    match world {
        1 => &[0],
        2 => &[0, 1],
        _ => &[2],
    }
}

/// What all ranks have learned.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum ReplayFinding {
    /// These ranks have computed something wrong; what the others have is right.
    Wrong(BTreeSet<Rank>),
    /// These ranks differ, and nothing says which is right.
    Unclear(BTreeSet<Rank>),
}

/// All runs of a step so far, by slice: which rank came to what.
#[derive(Clone, Debug)]
pub(super) struct Runs(Vec<Vec<(usize, SliceOutcome)>>);

impl Runs {
    pub fn new(world: usize) -> Self {
        Self(vec![Vec::new(); world])
    }

    /// Adds a round in which rank `r` ran the slices of ranks `r + shift`.
    pub fn add(&mut self, shifts: &[usize], rows: &[ReplayRow]) {
        let world = self.0.len();
        for (rank, row) in rows.iter().enumerate() {
            for (shift, outcome) in shifts.iter().zip(row.outcomes) {
                self.0[(rank + shift) % world].extend(outcome.map(|outcome| (rank, outcome)));
            }
        }
    }

    /// Slices over which runs differ.
    pub fn disputed(&self) -> BTreeSet<usize> {
        let differ = |runs: &[(usize, SliceOutcome)]| runs.iter().any(|(_, outcome)| *outcome != runs[0].1);
        (0..self.0.len()).filter(|slice| differ(&self.0[*slice])).collect()
    }

    /// Which ranks are to blame that slices are disputed; `sound` is what ranks say of their arithmetic.
    pub fn judge(&self, sound: &[bool]) -> ReplayFinding {
        let (mut wrong, mut unclear) = (BTreeSet::new(), Vec::new());
        for slice in self.disputed() {
            let runs = &self.0[slice];
            let ranks: BTreeSet<usize> = runs.iter().map(|(rank, _)| *rank).collect();
            match right(runs).or_else(|| of_sound(runs, sound)) {
                Some(right) => {
                    wrong.extend(runs.iter().filter(|(_, found)| *found != right).map(|(rank, _)| *rank))
                }
                None => unclear.push(ranks),
            }
        }
        // A rank that is wrong about one slice explains that another one is disputed.
        let unexplained = unclear.into_iter().filter(|ranks| ranks.is_disjoint(&wrong));
        let unexplained: BTreeSet<usize> = unexplained.flatten().collect();
        let named = |ranks: BTreeSet<usize>| ranks.into_iter().map(|rank| Rank(rank as u32)).collect();
        if wrong.is_empty() {
            ReplayFinding::Unclear(named(unexplained))
        } else {
            ReplayFinding::Wrong(named(wrong))
        }
    }
}

/// What most runs over a slice came to, if that is more than one and more than any other. Of as many, a
/// finite result is right: a number that is none does not become one by an error, and the other way round it
/// does.
fn right(runs: &[(usize, SliceOutcome)]) -> Option<SliceOutcome> {
    let count = |of: SliceOutcome| runs.iter().filter(|(_, outcome)| *outcome == of).count();
    let most = runs.iter().map(|(_, outcome)| count(*outcome)).max().filter(|most| *most > 1)?;
    let mut candidates: Vec<SliceOutcome> = Vec::new();
    for (_, outcome) in runs.iter().filter(|(_, outcome)| count(*outcome) == most) {
        if !candidates.contains(outcome) {
            candidates.push(*outcome);
        }
    }
    if candidates.len() > 1 {
        candidates.retain(|candidate| *candidate != SliceOutcome::NotFinite);
    }
    (candidates.len() == 1).then(|| candidates[0])
}

/// What ranks came to whose arithmetic is sound, if all of them agree and others are not sound.
fn of_sound(runs: &[(usize, SliceOutcome)], sound: &[bool]) -> Option<SliceOutcome> {
    let is_sound = |rank: usize| sound.get(rank).copied().unwrap_or(true);
    let mut theirs = runs.iter().filter(|(rank, _)| is_sound(*rank)).map(|(_, outcome)| *outcome);
    let first = theirs.next()?;
    theirs.all(|outcome| outcome == first).then_some(first)
}

#[cfg(test)]
mod tests;
