//! The table that ranks of a new generation show each other: one row of numbers each, gathered once.

use coxswain_proto::{
    cache_plan::CacheGeneration,
    ids::{Generation, Rank, Step},
    limits::MAX_WORLD,
};

use super::choice::Holding;
use coxswain_feature_store::Digest;

use crate::{
    collective::{Buf, BufMut, Collective, CollectiveError},
    train::{
        features::{FeatureVersion, Mark},
        looking::{HeldOutError, MAX_MEASURES},
    },
    zero::{ScaleState, Versions},
};

/// What a generation hands to the next besides weights and moments: everything that decides what ranks do
/// together.
#[derive(Clone, Debug, PartialEq)]
pub(in crate::train) struct Handover {
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

impl Handover {
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
const HOLDING: usize = 14;
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
/// Where a rank says that the process before it was killed because memory ran out.
const ASKS_FOR_LESS: usize = MEASURES + MAX_MEASURES;
/// Where the first rank says which checkpoint it has found.
const FOUND: usize = ASKS_FOR_LESS + 1;
const FIELDS: usize = FOUND + 1;
/// Stands for "none" where a count is expected.
const NONE: f64 = -1.0;

type Row = [f64; FIELDS];

/// The state that a rank has, and the one that it was taking over when it was disturbed.
pub(in crate::train) type Holdings = [Option<Holding>; 2];

fn encode(held: Holdings, carried: &Handover) -> Row {
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

fn decode(row: &[f64], measures: &[&str]) -> Result<(Holdings, Handover), String> {
    let held = [decode_holding(&row[HELD..HELD + HOLDING])?, decode_holding(&row[COMING..COMING + HOLDING])?];
    let measures = measures.iter().zip(&row[MEASURES..]).map(|(name, value)| ((*name).to_owned(), *value));
    let measures = measures.collect();
    let before = match optional("before", row[CARRIED + 6])? {
        None => None,
        Some(0) => Some(None),
        Some(_) => {
            let samples = count("samples", row[CARRIED + 7])?;
            let unreadable = count("unreadable", row[CARRIED + 8])?;
            Some(Some(HeldOutError { samples, measures, unreadable, parts: Default::default() }))
        }
    };
    let newest = decode_place(&row[NEWEST..NEWEST + PLACE])?;
    let older = decode_place(&row[BEFORE..BEFORE + PLACE])?;
    let carried = Handover {
        cache: newest.map(|newest| Mark { newest, before: older }),
        checkpoints: small("checkpoints", row[CARRIED])?,
        memory_reports: small("memory_reports", row[CARRIED + 1])?,
        micro_batch: small("micro_batch", row[CARRIED + 2])?,
        searched: row[CARRIED + 5] > 0.0,
        saved: optional("saved", row[CARRIED + 3])?.map(Step),
        before,
        stopped: row[CARRIED + 4] > 0.0,
        skipped_in_a_row: small("skipped_in_a_row", row[CARRIED + 9])?,
    };
    match carried.micro_batch {
        0 => Err("micro_batch is 0".into()),
        _ => Ok((held, carried)),
    }
}

/// What a rank says comes from another process: a number that is none would end in a division by zero, or in
/// another choice than that of the other ranks.
fn count(what: &str, value: f64) -> Result<u64, String> {
    /// Whole numbers travel unchanged up to here.
    const EXACT: f64 = (1u64 << 53) as f64;
    match (0.0..=EXACT).contains(&value) && value.fract() == 0.0 {
        true => Ok(value as u64),
        false => Err(format!("{what} is {value}")),
    }
}

fn small(what: &str, value: f64) -> Result<u32, String> {
    u32::try_from(count(what, value)?).map_err(|_| format!("{what} is {value}"))
}

fn optional(what: &str, value: f64) -> Result<Option<u64>, String> {
    if value == NONE { Ok(None) } else { count(what, value).map(Some) }
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
    fields[13] = f64::from(held.distance);
    for (fields, state) in fields[9..13].chunks_exact_mut(2).zip(held.loss_scale.iter().flatten()) {
        (fields[0], fields[1]) = (f64::from(state.exponent), f64::from(state.good));
    }
}

fn decode_holding(fields: &[f64]) -> Result<Option<Holding>, String> {
    let Some(generation) = optional("generation", fields[0])? else { return Ok(None) };
    let (world, rank) = (small("world", fields[1])?, small("rank", fields[2])?);
    if !(1..=MAX_WORLD as u32).contains(&world) || rank >= world {
        return Err(format!("it was rank {rank} of a world of {world}"));
    }
    let distance = small("distance", fields[13])?;
    if !(1..world.max(2)).contains(&distance) {
        return Err(format!("its replica distance was {distance} in a world of {world}"));
    }
    let versions = |newest: u64, older: f64| Versions { newest, older: older > 0.0 };
    let (skipped, left_out) = (count("skipped", fields[7])?, fields[8] > 0.0);
    if left_out && skipped == 0 {
        return Err("its last step was left out, but its count of such steps is 0".into());
    }
    Ok(Some(Holding {
        generation: Generation(generation),
        world,
        rank: Rank(rank),
        own: versions(count("version", fields[3])?, fields[4]),
        replica: optional("replica", fields[5])?.map(|newest| versions(newest, fields[6])),
        distance,
        skipped,
        left_out,
        loss_scale: decode_scale(&fields[9..11])?.zip(decode_scale(&fields[11..13])?).map(Into::into),
    }))
}

fn decode_scale(fields: &[f64]) -> Result<Option<ScaleState>, String> {
    if fields[0] == NONE {
        return Ok(None);
    }
    let (exponent, good) = (small("loss scale", fields[0])?, small("steps at this loss scale", fields[1])?);
    let state = ScaleState::checked(exponent, good);
    state.map(Some).ok_or_else(|| format!("loss scale is 2^{exponent}"))
}

fn encode_place(place: &FeatureVersion, fields: &mut [f64]) {
    (fields[0], fields[1]) = (place.generation.number as f64, place.generation.since.0 as f64);
    for (field, bytes) in fields[2..].iter_mut().zip(place.namespace.0.as_chunks::<4>().0) {
        *field = f64::from(u32::from_le_bytes(*bytes));
    }
}

fn decode_place(fields: &[f64]) -> Result<Option<FeatureVersion>, String> {
    let Some(number) = optional("cache generation", fields[0])? else { return Ok(None) };
    let since = Step(count("cache since", fields[1])?);
    let mut namespace = [0; 32];
    for (bytes, field) in namespace.as_chunks_mut::<4>().0.iter_mut().zip(&fields[2..]) {
        *bytes = small("cache namespace", *field)?.to_le_bytes();
    }
    let generation = CacheGeneration { number, since };
    Ok(Some(FeatureVersion { generation, namespace: Digest(namespace) }))
}

/// What a rank tells the others.
pub(in crate::train) struct RankRecord<'a> {
    pub holdings: Holdings,
    pub carried: &'a Handover,
    /// Whether the process before it was killed because memory ran out.
    pub asks_for_less: bool,
    /// The newest checkpoint on disk. Only the first rank looks.
    pub found: Option<Step>,
}

/// What all ranks know after they have told each other.
pub(in crate::train) struct RecoveryAgreement {
    /// What each holds.
    pub holdings: Vec<(Rank, Holding)>,
    /// What all carry on with.
    pub carried: Handover,
    /// The first that asks for a smaller micro-batch.
    pub asks_for_less: Option<Rank>,
    /// The newest checkpoint on disk.
    pub found: Option<Step>,
}

/// Tells all ranks what each of them brings.
pub(in crate::train) fn exchange(
    own: RankRecord<'_>,
    measures: &[&str],
    comm: &mut dyn Collective,
) -> Result<RecoveryAgreement, CollectiveError> {
    let (mut table, mut row) = (vec![0.0; FIELDS * comm.world()], encode(own.holdings, own.carried));
    row[ASKS_FOR_LESS] = f64::from(u8::from(own.asks_for_less));
    row[FOUND] = own.found.map_or(NONE, |step| step.0 as f64);
    comm.all_gather(Buf::F64(&row), BufMut::F64(&mut table))?;
    let told = (0..).map(Rank).zip(table.chunks_exact(FIELDS));
    let asks_for_less = told.clone().find_map(|(rank, row)| (row[ASKS_FOR_LESS] > 0.0).then_some(rank));
    let implausible = |peer| move |detail| CollectiveError::Implausible { peer, detail };
    let found = optional("found", table[FOUND]).map_err(implausible(Rank(0)))?.map(Step);
    let rows = told.map(|(peer, row)| decode(row, measures).map_err(implausible(peer)));
    let rows: Vec<_> = rows.collect::<Result<_, _>>()?;
    let carriers = rows.iter().filter(|(held, _)| held[0].is_some()).map(|(_, carried)| carried.clone());
    let carried = Handover::merge(carriers, own.carried.clone());
    let of_rank = |(rank, (held, _)): (u32, (Holdings, Handover))| {
        held.into_iter().flatten().map(move |held| (Rank(rank), held))
    };
    let holdings = (0..).zip(rows).flat_map(of_rank).collect();
    Ok(RecoveryAgreement { holdings, carried, asks_for_less, found })
}

#[cfg(test)]
mod tests;
