//! The ledger against what ranks have written themselves: does what the coordinator says of each committed
//! step agree with what was done?
//!
//! ```text
//! counts     of a step's lines: those of the generation that the ledger names; where the row was proved by a
//!            checkpoint alone (its world is 0), of the newest one before. If any of them bears the run's
//!            id, only those that do: a journal begun anew numbers its generations anew. Else a launch before
//!            this one had another id
//! taken      every rank of that generation has one, of the same epoch, totals and cause to leave it out
//! samples    what ranks have trained on and what is quarantined is the batch of the plan: each position once
//! beyond     in a run that is over no step was taken later than the ledger says, and in one that has
//!            finished none that it does not have
//! ```
//!
//! A rank may lack the last step of its generation: it was killed before it wrote it, and the others prove
//! it. So may steps behind the end of a file that was full. Both are told as not proved, and differ in
//! nothing.

use std::{
    collections::{BTreeMap, BTreeSet},
    ops::Range,
    path::PathBuf,
};

use coxswain_proto::{
    ids::Rank,
    limits::MAX_WORLD,
    plan::{self, Batch},
    report::{Skip, SkipCause},
};

use super::{
    coverage::Coverage,
    records::{CommittedStep, RunRecords},
    testimony::{Testimony, WitnessLine},
};

/// Ranks that are looked for, whatever a damaged row says of its world.
const MOST_RANKS: u32 = MAX_WORLD as u32;

/// What comparing has come to.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Judgement {
    /// Files that ranks have left.
    pub files: usize,
    /// Lines in them that cannot be read.
    pub unreadable: u64,
    /// Committed steps that were compared.
    pub steps: u64,
    /// Steps and ranks that were committed without a line of their own, for a reason.
    pub unproved: Vec<(u64, u32)>,
    /// Where the ledger and the ranks differ, in order of steps.
    pub differences: Vec<Difference>,
}

/// One thing on which ledger and ranks differ.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Difference {
    /// In which step.
    pub step: u64,
    /// Whose line says otherwise, if one does.
    pub rank: Option<u32>,
    /// Where that line is.
    pub file: Option<PathBuf>,
    /// What differs, for people.
    pub text: String,
}

/// Compares all committed steps.
pub fn compare(records: &RunRecords, testimony: &Testimony) -> Judgement {
    let full_from =
        testimony.lines().filter(|line| line.witnessed.full).map(|line| line.witnessed.step).min();
    let counting: Vec<_> = records.steps.iter().map(|row| counting(row, testimony)).collect();
    let mut judgement = Judgement {
        files: testimony.files(),
        unreadable: testimony.unreadable,
        steps: records.steps.len() as u64,
        ..Judgement::default()
    };
    for (at, row) in records.steps.iter().enumerate() {
        let is_last = counting.get(at + 1).is_none_or(|next| *next != counting[at]);
        let mut comparison = RowComparison {
            row,
            testimony,
            lines: counted(row, counting[at], testimony, &records.run_id),
            is_full: full_from.is_some_and(|step| step < row.step),
            may_lack: is_last,
            judgement: &mut judgement,
        };
        comparison.compare(records);
        if records.over {
            comparison.later(&records.run_id, counting[at]);
        }
    }
    if records.finished {
        let committed: BTreeSet<u64> = records.steps.iter().map(|row| row.step).collect();
        let own = testimony.lines().filter(|line| line.witnessed.run == records.run_id);
        for line in own.filter(|line| !committed.contains(&line.witnessed.step)) {
            let text =
                format!("ran in generation {}, but the ledger has no such step", line.witnessed.generation);
            judgement.differences.push(difference(testimony, line, text));
        }
    }
    judgement.differences.sort_by_key(|difference| difference.step);
    judgement
}

/// The generation whose lines count for a row.
fn counting(row: &CommittedStep, testimony: &Testimony) -> Option<u64> {
    let generations = testimony.of_step(row.step).iter().map(|line| line.witnessed.generation);
    match row.world {
        // It bears the number of the one that found the checkpoint.
        0 => generations.filter(|generation| *generation < row.generation).max(),
        _ => Some(row.generation),
    }
}

/// The lines that count for a row.
fn counted<'a>(
    row: &CommittedStep,
    counting: Option<u64>,
    testimony: &'a Testimony,
    run_id: &str,
) -> Vec<&'a WitnessLine> {
    let of_generation = |line: &&WitnessLine| Some(line.witnessed.generation) == counting;
    let mut lines: Vec<_> = testimony.of_step(row.step).iter().filter(of_generation).collect();
    if lines.iter().any(|line| line.witnessed.run == run_id) {
        lines.retain(|line| line.witnessed.run == run_id);
    }
    lines
}

fn difference(testimony: &Testimony, line: &WitnessLine, text: String) -> Difference {
    let file = Some(testimony.file(line).to_path_buf());
    Difference { step: line.witnessed.step, rank: Some(line.witnessed.rank), file, text }
}

/// One row of the ledger, and the lines that count for it.
struct RowComparison<'a> {
    row: &'a CommittedStep,
    testimony: &'a Testimony,
    lines: Vec<&'a WitnessLine>,
    /// A file was full before this step.
    is_full: bool,
    /// It is the last one of its generation.
    may_lack: bool,
    judgement: &'a mut Judgement,
}

impl RowComparison<'_> {
    fn compare(&mut self, records: &RunRecords) {
        let row = self.row;
        self.planned(records);
        let Some(first) = self.lines.first().copied() else {
            if self.is_full {
                return self
                    .judgement
                    .unproved
                    .extend((0..row.world.min(MOST_RANKS)).map(|rank| (row.step, rank)));
            }
            let text = format!(
                "committed by generation {}, but none of its ranks has a record of it",
                row.generation
            );
            return self.differs(None, text);
        };
        let absent = self.ranks(if row.world == 0 { first.witnessed.world } else { row.world });
        let cause = row.skipped.as_ref().map(|skipped| skipped.cause);
        for line in self.lines.clone() {
            let witnessed = &line.witnessed;
            if witnessed.epoch != row.epoch {
                self.differs(
                    Some(line),
                    format!("consumed in epoch {}, but committed in epoch {}", witnessed.epoch, row.epoch),
                );
            }
            if witnessed.skipped != cause {
                let [own, ledger] = [witnessed.skipped, cause].map(handled);
                let told = format!("{own} according to the rank, {ledger} according to the ledger");
                self.differs(Some(line), told);
            }
            if witnessed.totals != first.witnessed.totals {
                let other = first.witnessed.rank;
                let told = format!("its loss sum, valid count or gradient norm differs from rank {other}'s");
                self.differs(Some(line), told);
            }
            if !witnessed.strangers.is_empty() {
                let told = format!("trained on samples {:?} that are not in the epoch", witnessed.strangers);
                self.differs(Some(line), told);
            }
            // The row of a step that a checkpoint proved says nothing of it.
            if row.world > 0 && joined(&witnessed.left_out) != joined(&row.quarantined) {
                let [own, ledger] = [&witnessed.left_out, &row.quarantined].map(|ranges| listed(ranges));
                let told = format!("quarantined samples: {own} in the rank's record, {ledger} in the ledger");
                self.differs(Some(line), told);
            }
        }
        let loss = first.witnessed.loss();
        // 0 where the coordinator had no report of it.
        if cause.is_none() && row.loss != 0.0 && (row.loss - loss).abs() > 1e-9 * loss.abs() {
            self.differs(Some(first), format!("its loss is {loss}, but the ledger has {}", row.loss));
        }
        if cause.is_none() {
            self.samples(&absent);
        }
    }

    /// The row's samples are those of the plan.
    fn planned(&mut self, records: &RunRecords) {
        let (row, RunRecords { samples, global_batch, .. }) = (self.row, records);
        // Ranks are told of a row without a world one by one, of whom there are none.
        if *samples == 0 || *global_batch == 0 || (row.world == 0 && row.positions.is_empty()) {
            return;
        }
        let per_epoch = samples.div_ceil(*global_batch);
        let begin = row.step % per_epoch * global_batch;
        let due = (row.step / per_epoch, begin..begin.saturating_add(*global_batch).min(*samples));
        if (row.epoch, hull(row)) != due {
            let (epoch, positions) = due;
            let told = format!(
                "the ledger records {} of epoch {}, but the plan has {} of epoch {epoch}",
                listed(&[hull(row)]),
                row.epoch,
                listed(&[positions])
            );
            self.differs(None, told);
        }
    }

    /// Every rank of the world has one line. Returns the ranks that have none.
    fn ranks(&mut self, world: u32) -> Vec<u32> {
        let (step, mut found) = (self.row.step, BTreeMap::new());
        for line in self.lines.clone() {
            if line.witnessed.world != world || line.witnessed.rank >= world {
                self.differs(
                    Some(line),
                    format!(
                        "consumed by rank {} of {}, but the world has {world} ranks",
                        line.witnessed.rank, line.witnessed.world
                    ),
                );
            }
            if found.insert(line.witnessed.rank, line).is_some() {
                self.differs(
                    Some(line),
                    format!("recorded twice by this rank in generation {}", line.witnessed.generation),
                );
            }
        }
        let absent: Vec<u32> = (0..world.min(MOST_RANKS)).filter(|rank| !found.contains_key(rank)).collect();
        for rank in absent.clone() {
            match self.may_lack || self.is_full {
                true => self.judgement.unproved.push((step, rank)),
                false => {
                    let text = format!("committed, but rank {rank} has no record of it");
                    self.judgement.differences.push(Difference { step, rank: Some(rank), file: None, text });
                }
            }
        }
        absent
    }

    /// What was trained on, what ranks that have no line had to train on, and what is quarantined is the
    /// batch, each position once.
    fn samples(&mut self, absent: &[u32]) {
        let (row, first) = (self.row, self.lines[0]);
        if row.positions.is_empty() && row.quarantined.is_empty() {
            return;
        }
        let whole = hull(row);
        let quarantined = if row.world == 0 { &first.witnessed.left_out } else { &row.quarantined };
        let batch = Batch { epoch: row.epoch, positions: whole.clone() };
        let world = first.witnessed.world.max(1);
        let slices = absent.iter().filter(|rank| **rank < world);
        let excused = slices.flat_map(|rank| plan::without(batch.of_rank(Rank(*rank), world), quarantined));
        let mut ranges: Vec<Range<u64>> = excused.chain(quarantined.iter().cloned()).collect();
        for line in self.lines.clone() {
            let outside: Vec<_> = line
                .witnessed
                .positions
                .iter()
                .filter(|own| own.start < whole.start || own.end > whole.end)
                .cloned()
                .collect();
            if !outside.is_empty() {
                self.differs(
                    Some(line),
                    format!(
                        "trained on {}, but the ledger records {}",
                        listed(&outside),
                        listed(std::slice::from_ref(&whole))
                    ),
                );
            }
            ranges.extend(
                line.witnessed.positions.iter().map(|own| own.start.max(whole.start)..own.end.min(whole.end)),
            );
        }
        let shift = |range: &Range<u64>| {
            range.start.saturating_sub(whole.start)..range.end.saturating_sub(whole.start)
        };
        let back = |range: &Range<u64>| range.start + whole.start..range.end + whole.start;
        let coverage = Coverage::compute(whole.end - whole.start, ranges.iter().map(shift).collect());
        if !coverage.missing.is_empty() {
            let missing: Vec<_> = coverage.missing.iter().map(back).collect();
            self.differs(None, format!("no rank trained on {} of epoch {}", listed(&missing), row.epoch));
        }
        for again in coverage.repeated.iter().map(back) {
            let is_there = |line: &&&WitnessLine| {
                line.witnessed.positions.iter().any(|own| own.start < again.end && again.start < own.end)
            };
            let ranks: Vec<_> =
                self.lines.iter().filter(is_there).map(|line| line.witnessed.rank.to_string()).collect();
            let told = format!(
                "{} of epoch {} are counted more than once: ranks {} trained on them; quarantined samples \
                 and the slices of ranks without a record count too",
                listed(std::slice::from_ref(&again)),
                row.epoch,
                ranks.join(", ")
            );
            self.differs(None, told);
        }
    }

    /// In a run that is over, nothing was taken later than the ledger says.
    fn later(&mut self, run_id: &str, counting: Option<u64>) {
        let own = self.testimony.of_step(self.row.step).iter().filter(|line| line.witnessed.run == run_id);
        for line in own.filter(|line| Some(line.witnessed.generation) > counting) {
            let told = format!(
                "ran in generation {}, but the ledger has no such step of that generation",
                line.witnessed.generation
            );
            self.differs(Some(line), told);
        }
    }

    fn differs(&mut self, line: Option<&WitnessLine>, text: String) {
        self.judgement.differences.push(match line {
            Some(line) => difference(self.testimony, line, text),
            None => Difference { step: self.row.step, rank: None, file: None, text },
        });
    }
}

/// From the first position of a row to its last, quarantined ones among them.
fn hull(row: &CommittedStep) -> Range<u64> {
    let all = || row.positions.iter().chain(&row.quarantined).filter(|range| !range.is_empty());
    let (start, end) = (all().map(|range| range.start).min(), all().map(|range| range.end).max());
    start.unwrap_or(0)..end.unwrap_or(0)
}

fn joined(ranges: &[Range<u64>]) -> Vec<Range<u64>> {
    plan::joined(ranges.iter().cloned())
}

/// Whether a step was left out, and why.
fn handled(cause: Option<SkipCause>) -> String {
    let why = |cause| Skip { cause, samples: Vec::new() };
    cause.map_or_else(|| "trained on".to_owned(), |cause| format!("left out ({})", why(cause)))
}

/// `positions 4..8, 9..10`.
fn listed(ranges: &[Range<u64>]) -> String {
    const SHOWN: usize = 4;
    let shown: Vec<_> =
        ranges.iter().take(SHOWN).map(|range| format!("{}..{}", range.start, range.end)).collect();
    match (shown.is_empty(), ranges.len().saturating_sub(SHOWN)) {
        (true, _) => "none".to_owned(),
        (_, 0) => format!("positions {}", shown.join(", ")),
        (_, more) => format!("positions {} and {more} more", shown.join(", ")),
    }
}

#[cfg(test)]
mod tests;
