//! The table that ranks of a new generation show each other: one row of numbers each, gathered once.

use coxswain_proto::{
    cache_plan::CacheGeneration,
    ids::{Generation, Rank, Step},
};

use super::choice::Holding;
use coxswain_feature_store::Digest;

use crate::{
    collective::{Buf, BufMut, Collective, CollectiveError},
    train::{
        features::{FeatureVersion, Mark},
        held_out::{HeldOutError, MAX_MEASURES},
    },
    zero::Versions,
};

/// What a generation hands to the next besides weights and moments: everything that decides what ranks do
/// together.
#[derive(Clone, Debug, PartialEq)]
pub(in crate::train) struct Carried {
    /// Requests for checkpoints obeyed so far.
    pub checkpoints: u32,
    /// Requests for memory reports obeyed so far.
    pub memory_reports: u32,
    /// Samples per forward pass now in force; before the search for it is done, the most that it may try.
    pub micro_batch: u32,
    /// Whether the search is done. A rank that was searching when another was lost has not found anything.
    pub searched: bool,
    /// The step of the newest checkpoint of this run.
    pub saved: Option<Step>,
    /// The held-out error before the first step, once it has been looked at.
    pub before: Option<Option<HeldOutError>>,
    /// Whether all had agreed to stop.
    pub stopped: bool,
    /// Steps in a row that were left out for their numbers, up to the newest.
    pub skipped_in_a_row: u32,
    /// The generation of kept features that serves, or served last.
    pub cache: Option<Mark>,
}

impl Carried {
    /// What ranks that bring these make of them: the same on each. Fresh ranks bring nothing; without anyone
    /// else, `own` counts.
    fn merge(rows: impl Iterator<Item = Self>, own: Self) -> Self {
        rows.reduce(|a, b| Self {
            checkpoints: a.checkpoints.max(b.checkpoints),
            memory_reports: a.memory_reports.max(b.memory_reports),
            micro_batch: match (a.searched, b.searched) {
                (true, false) => a.micro_batch,
                (false, true) => b.micro_batch,
                _ => a.micro_batch.min(b.micro_batch),
            },
            searched: a.searched || b.searched,
            saved: a.saved.max(b.saved),
            before: a.before.or(b.before),
            stopped: a.stopped || b.stopped,
            // A rank may have been cut off before it heard of the last one.
            skipped_in_a_row: a.skipped_in_a_row.max(b.skipped_in_a_row),
            // One may have begun a generation that the others have not come to; or have gathered drift that
            // the others lost, and then all measure it again.
            cache: [a.cache, b.cache]
                .into_iter()
                .flatten()
                .max_by_key(|mark| (mark.newest.generation.number, mark.before.is_some())),
        })
        .unwrap_or(own)
    }
}

/// Where the holding of a rank stands in a row.
const HELD: usize = 0;
/// Numbers of a holding.
const HOLDING: usize = 9;
/// Where what is carried over begins in a row.
const CARRIED: usize = HELD + HOLDING;
/// Where the newest generation of kept features stands in a row.
const NEWEST: usize = CARRIED + 10;
/// Where the generation before the newest one of kept features stands in a row.
const BEFORE: usize = NEWEST + PLACE;
/// Numbers that name a generation of kept features and its namespace.
const PLACE: usize = 10;
/// Where the second holding stands in a row.
const COMING: usize = BEFORE + PLACE;
/// Where the measures of held-out samples stand in a row.
const MEASURES: usize = COMING + HOLDING;
const FIELDS: usize = MEASURES + MAX_MEASURES;
/// Stands for "none" where a count is expected.
const NONE: f64 = -1.0;

type Row = [f64; FIELDS];

/// The state that a rank has, and the one that it was taking over when it was disturbed.
pub(in crate::train) type Holdings = [Option<Holding>; 2];

fn encode(held: Holdings, carried: &Carried) -> Row {
    let mut row = [NONE; FIELDS];
    for (held, begin) in held.iter().zip([HELD, COMING]) {
        held.iter().for_each(|held| encode_holding(held, &mut row[begin..begin + HOLDING]));
    }
    row[CARRIED] = f64::from(carried.checkpoints);
    row[CARRIED + 1] = f64::from(carried.memory_reports);
    row[CARRIED + 2] = f64::from(carried.micro_batch);
    row[CARRIED + 3] = carried.saved.map_or(NONE, |step| step.0 as f64);
    row[CARRIED + 4] = f64::from(u8::from(carried.stopped));
    row[CARRIED + 5] = f64::from(u8::from(carried.searched));
    row[CARRIED + 9] = f64::from(carried.skipped_in_a_row);
    row[CARRIED + 6] = match &carried.before {
        None => NONE,
        Some(None) => 0.0,
        Some(Some(_)) => 1.0,
    };
    if let Some(Mark { newest, before }) = carried.cache {
        encode_place(&newest, &mut row[NEWEST..NEWEST + PLACE]);
        before.iter().for_each(|before| encode_place(before, &mut row[BEFORE..]));
    }
    if let Some(Some(error)) = &carried.before {
        (row[CARRIED + 7], row[CARRIED + 8]) = (error.samples as f64, error.unreadable as f64);
        row[MEASURES..].iter_mut().zip(error.measures.iter()).for_each(|(field, (_, value))| *field = *value);
    }
    row
}

fn decode(row: &[f64], measures: &[&str]) -> (Holdings, Carried) {
    let some = |value: f64| (value >= 0.0).then_some(value);
    let held = [HELD, COMING].map(|begin| decode_holding(&row[begin..begin + HOLDING]));
    let (samples, unreadable) = (row[CARRIED + 7] as u64, row[CARRIED + 8] as u64);
    let measures = measures.iter().zip(&row[MEASURES..]).map(|(name, value)| ((*name).to_owned(), *value));
    let error = HeldOutError { samples, measures: measures.collect(), unreadable, parts: Default::default() };
    let newest = decode_place(&row[NEWEST..NEWEST + PLACE]);
    let cache = newest.map(|newest| Mark { newest, before: decode_place(&row[BEFORE..]) });
    let carried = Carried {
        cache,
        checkpoints: row[CARRIED] as u32,
        memory_reports: row[CARRIED + 1] as u32,
        micro_batch: row[CARRIED + 2] as u32,
        searched: row[CARRIED + 5] > 0.0,
        saved: some(row[CARRIED + 3]).map(|step| Step(step as u64)),
        before: some(row[CARRIED + 6]).map(|looked| (looked > 0.0).then_some(error)),
        stopped: row[CARRIED + 4] > 0.0,
        skipped_in_a_row: row[CARRIED + 9] as u32,
    };
    (held, carried)
}

fn encode_holding(held: &Holding, fields: &mut [f64]) {
    let versions = |versions: Option<Versions>| match versions {
        Some(Versions { newest, older }) => [newest as f64, f64::from(u8::from(older))],
        None => [NONE, 0.0],
    };
    (fields[0], fields[1]) = (held.generation.0 as f64, f64::from(held.world));
    fields[2] = f64::from(held.rank.0);
    fields[3..5].copy_from_slice(&versions(Some(held.own)));
    fields[5..7].copy_from_slice(&versions(held.replica));
    (fields[7], fields[8]) = (held.skipped as f64, f64::from(u8::from(held.left_out)));
}

fn decode_holding(fields: &[f64]) -> Option<Holding> {
    let some = |value: f64| (value >= 0.0).then_some(value);
    let versions = |newest: f64, older: f64| Versions { newest: newest as u64, older: older > 0.0 };
    some(fields[0]).map(|generation| Holding {
        generation: Generation(generation as u64),
        world: fields[1] as u32,
        rank: Rank(fields[2] as u32),
        own: versions(fields[3], fields[4]),
        replica: some(fields[5]).map(|newest| versions(newest, fields[6])),
        skipped: fields[7] as u64,
        left_out: fields[8] > 0.0,
    })
}

fn encode_place(place: &FeatureVersion, fields: &mut [f64]) {
    (fields[0], fields[1]) = (place.generation.number as f64, place.generation.since.0 as f64);
    for (field, bytes) in fields[2..].iter_mut().zip(place.namespace.0.as_chunks::<4>().0) {
        *field = f64::from(u32::from_le_bytes(*bytes));
    }
}

fn decode_place(fields: &[f64]) -> Option<FeatureVersion> {
    let mut namespace = [0; 32];
    for (bytes, field) in namespace.as_chunks_mut::<4>().0.iter_mut().zip(&fields[2..]) {
        *bytes = (*field as u32).to_le_bytes();
    }
    let generation = CacheGeneration { number: fields[0] as u64, since: Step(fields[1] as u64) };
    (fields[0] >= 0.0).then_some(FeatureVersion { generation, namespace: Digest(namespace) })
}

/// What all ranks hold, and what all of them carry on with.
pub(in crate::train) fn exchange(
    held: Holdings,
    carried: &Carried,
    measures: &[&str],
    comm: &mut dyn Collective,
) -> Result<(Vec<(Rank, Holding)>, Carried), CollectiveError> {
    let mut table = vec![0.0; FIELDS * comm.world()];
    comm.all_gather(Buf::F64(&encode(held, carried)), BufMut::F64(&mut table))?;
    let rows: Vec<_> = table.chunks_exact(FIELDS).map(|row| decode(row, measures)).collect();
    let carriers = rows.iter().filter(|(held, _)| held[0].is_some()).map(|(_, carried)| carried.clone());
    let merged = Carried::merge(carriers, carried.clone());
    let of_rank = |(rank, (held, _)): (u32, (Holdings, Carried))| {
        held.into_iter().flatten().map(move |held| (Rank(rank), held))
    };
    Ok(((0..).zip(rows).flat_map(of_rank).collect(), merged))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What held-out samples are measured by.
    const NAMES: [&str; 2] = ["mse", "mae"];

    fn mark(number: u64) -> Mark {
        let place = |number| {
            let generation = CacheGeneration { number, since: Step(10 * number) };
            FeatureVersion {
                generation,
                namespace: Digest(std::array::from_fn(|i| 255 - number as u8 * i as u8)),
            }
        };
        Mark { newest: place(number), before: Some(place(number - 1)).filter(|_| number == 3) }
    }

    #[test]
    fn a_row_says_everything() {
        let held = Holding {
            generation: Generation(7),
            world: 5,
            rank: Rank(4),
            own: Versions { newest: 1 << 40, older: true },
            replica: None,
            skipped: 3,
            left_out: true,
        };
        let before = Some(Some(HeldOutError {
            samples: 64,
            measures: NAMES.map(str::to_owned).into_iter().zip([0.25, 1.5]).collect(),
            unreadable: 3,
            parts: Default::default(),
        }));
        let carried = Carried {
            checkpoints: 2,
            memory_reports: 0,
            micro_batch: 3,
            searched: true,
            saved: Some(Step(9)),
            before,
            stopped: true,
            skipped_in_a_row: 2,
            cache: Some(mark(3)),
        };
        assert_eq!(
            decode(&encode([Some(held), None], &carried), &NAMES),
            ([Some(held), None], carried.clone())
        );
        let both = [Some(held), Some(Holding { generation: Generation(8), replica: Some(held.own), ..held })];
        assert_eq!(decode(&encode(both, &carried), &NAMES), (both, carried.clone()));
        let fresh = Carried { saved: None, before: None, cache: None, ..carried };
        assert_eq!(decode(&encode([None; 2], &fresh), &NAMES), ([None; 2], fresh));
    }

    #[test]
    fn a_measurement_that_one_rank_could_finish_is_made_again_by_all() {
        let carried = |cache| Carried {
            checkpoints: 0,
            memory_reports: 0,
            micro_batch: 1,
            searched: true,
            saved: None,
            before: None,
            stopped: false,
            skipped_in_a_row: 0,
            cache: Some(cache),
        };
        let goes_on = carried(mark(3));
        let done = carried(Mark { before: None, ..mark(3) });
        for rows in [[goes_on.clone(), done.clone()], [done.clone(), goes_on.clone()]] {
            assert_eq!(Carried::merge(rows.into_iter(), done.clone()), goes_on);
        }
    }

    #[test]
    fn a_fresh_rank_takes_over_what_the_others_have_done() {
        let old = Carried {
            checkpoints: 2,
            memory_reports: 1,
            micro_batch: 2,
            searched: true,
            saved: Some(Step(9)),
            before: Some(None),
            stopped: true,
            skipped_in_a_row: 2,
            cache: Some(mark(2)),
        };
        let behind = Carried {
            checkpoints: 1,
            micro_batch: 4,
            saved: None,
            stopped: false,
            skipped_in_a_row: 0,
            cache: Some(mark(1)),
            ..old.clone()
        };
        let fresh = Carried {
            checkpoints: 0,
            memory_reports: 0,
            micro_batch: 8,
            searched: false,
            saved: None,
            before: None,
            stopped: false,
            skipped_in_a_row: 0,
            cache: None,
        };
        assert_eq!(Carried::merge([behind, old.clone()].into_iter(), fresh.clone()), old);
        assert_eq!(Carried::merge(std::iter::empty(), fresh.clone()), fresh);
    }

    #[test]
    fn a_micro_batch_that_was_found_outweighs_what_a_search_may_still_try() {
        let [found, lowered, searching] =
            [(6, true), (3, true), (1, false)].map(|(micro_batch, searched)| Carried {
                checkpoints: 0,
                memory_reports: 0,
                micro_batch,
                searched,
                saved: None,
                before: None,
                stopped: false,
                skipped_in_a_row: 0,
                cache: None,
            });
        let merged = |rows: &[Carried]| {
            let merged = Carried::merge(rows.iter().cloned(), searching.clone());
            (merged.micro_batch, merged.searched)
        };
        assert_eq!(merged(&[searching.clone(), found.clone()]), (6, true));
        assert_eq!(merged(&[found, searching.clone(), lowered]), (3, true));
        assert_eq!(merged(&[searching.clone(), searching.clone()]), (1, false));
    }
}
