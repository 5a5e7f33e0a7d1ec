//! Slow ranks: whose own part of the steps takes longer than that of the others.
//!
//! Ranks wait for each other in every step, so a step takes as long on all of them. What tells them apart is
//! what they do between the collectives:
//!
//! ```text
//! own time   = total - communication      one rank's, in one step
//!            = data + optimizer + compute
//! slowness   = own time / median of the other ranks' own times
//! slow       in 12 of the last 20 steps it was 1.14 or more, and its median 1.2; well again below 1.1
//! ```
//!
//! Ranks may have unequal work: slices that differ by a sample, longer prompts. So a rank is compared as it
//! is, for each of its samples, and for each of its tokens, and the least of the three counts. A step that
//! was tried again or left out, or for which some rank had features to compute, is none to compare.
//!
//! A window begins anew with each generation. Medians keep single steps from counting, and a rank that is
//! slow from moving what it is compared with. That most steps must be slow keeps two bursts of a few steps
//! each (a page cache that is written back, another job that starts) from making a median of their own.
//!
//! What this does not do: tell whose network is slow. All ranks of a ring wait for its slowest link alike.

use std::{
    collections::{BTreeMap, VecDeque},
    fmt,
};

use coxswain_proto::{
    ids::{Generation, Rank, Step},
    report::StepReport,
};

/// Steps of a window: as many as may pass until a rank is named.
const WINDOW: usize = 20;
/// How many steps of a window must be slow.
const ENOUGH: usize = 12;
/// Slowness of a step that counts: half-way from 1 to 1.3, in the logarithm.
const COUNTS: f64 = 1.14;
/// Steps of a generation that do not count: caches of a new process are cold.
const WARM_UP: u64 = 2;
/// A rank that takes so many times as long as the others is slow.
const SLOW: f64 = 1.2;
/// Below this it is well again.
const WELL: f64 = 1.1;
/// Seconds beyond the others' that are worth naming: a time slice of a scheduler is as long.
const LEAST_EXCESS: f64 = 5e-3;

/// What of a rank's step takes longer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, strum::Display)]
#[strum(serialize_all = "lowercase")]
pub enum Part {
    /// Waiting for samples.
    Data,
    /// Forward and backward passes.
    Compute,
    /// Clipping and AdamW.
    Optimizer,
}

impl Part {
    const ALL: [Self; 3] = [Self::Data, Self::Compute, Self::Optimizer];
}

/// How slow a rank is.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Slowness {
    /// What of its step takes the longest beyond the others'.
    pub part: Part,
    /// Own time over the median of the others'.
    pub factor: f64,
    /// Seconds a step beyond the median of the others.
    pub excess: f64,
}

/// `1.31 times the time of the other ranks in the last 20 steps (+ 120 ms a step, mostly in data)`.
impl fmt::Display for Slowness {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { part, factor, excess } = self;
        let ms = 1e3 * excess;
        write!(
            f,
            "{factor:.2} times the time of the other ranks in the last {WINDOW} steps (+ {ms:.0} ms a step, mostly in {part})"
        )
    }
}

/// A rank has become slow, or is well again.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SlownessChange {
    /// Which.
    pub rank: Rank,
    /// How slow; none if it is well again.
    pub slow: Option<Slowness>,
}

/// The ranks of one generation, compared step by step.
#[derive(Clone, Debug)]
pub struct Stragglers {
    generation: Generation,
    /// Steps before this one are not compared.
    from: Step,
    /// Steps that some ranks have reported: no more than are leased.
    open: BTreeMap<Step, Row>,
    /// The newest compared steps, each of all ranks.
    recent: VecDeque<Vec<StepComparison>>,
    ranks: Vec<RankWatch>,
}

/// What ranks have reported of one step.
#[derive(Clone, Debug)]
struct Row {
    works: Vec<Work>,
    reported: usize,
}

#[derive(Clone, Copy, Debug, Default)]
struct RankWatch {
    /// How many of the newest compared steps it was slow enough in to count.
    counted: u32,
    slow: Option<Slowness>,
    /// Steps since it was named.
    named_for: u64,
}

/// One rank's step beside the others'.
#[derive(Clone, Copy, Debug, Default)]
struct StepComparison {
    slowness: f64,
    /// Seconds beyond the median of the others, of each [`Part`] and of all.
    excess: [f64; 4],
}

/// What one rank did in one step.
#[derive(Clone, Copy, Debug, Default)]
struct Work {
    reported: bool,
    comparable: bool,
    /// Seconds of each [`Part`], and their sum.
    times: [f64; 4],
    samples: f64,
    tokens: f64,
}

impl Work {
    fn from_report(report: &StepReport) -> Self {
        let times = &report.times;
        let own = times.total.saturating_sub(times.communication);
        let compute = own.saturating_sub(times.data + times.optimizer);
        let samples: u64 = report.positions.iter().map(|range| range.end.saturating_sub(range.start)).sum();
        Self {
            reported: true,
            comparable: report.skipped.is_none() && report.retries == 0 && report.cache.misses == 0,
            times: [times.data, compute, times.optimizer, own].map(|time| time.as_secs_f64()),
            samples: samples as f64,
            tokens: report.tokens as f64,
        }
    }

    fn own(&self) -> f64 {
        self.times[3]
    }
}

impl Stragglers {
    /// A generation of `world` ranks that starts at `first`.
    pub fn new(generation: Generation, world: usize, first: Step) -> Self {
        Self {
            generation,
            from: Step(first.0 + WARM_UP),
            open: BTreeMap::new(),
            recent: VecDeque::new(),
            ranks: vec![RankWatch::default(); world],
        }
    }

    /// Takes what a rank reports of a step; what that changes. Repeated reports change nothing.
    pub fn observe(&mut self, rank: Rank, report: &StepReport) -> Vec<SlownessChange> {
        let world = self.ranks.len();
        if world < 2 || report.generation != self.generation || report.step < self.from {
            return Vec::new();
        }
        let fresh = || Row { works: vec![Work::default(); world], reported: 0 };
        let row = self.open.entry(report.step).or_insert_with(fresh);
        let work = &mut row.works[rank.0 as usize];
        if work.reported {
            return Vec::new();
        }
        row.reported += 1;
        *work = Work::from_report(report);
        if row.reported < world {
            return Vec::new();
        }
        let row = self.open.remove(&report.step).map(|row| row.works).unwrap_or_default();
        // Ranks report in order, so what an earlier step lacks does not come any more.
        self.from = Step(report.step.0 + 1);
        self.open = self.open.split_off(&self.from);
        if row.iter().all(|work| work.comparable) { self.compare(&row) } else { Vec::new() }
    }

    /// How slow a rank is, if it is.
    pub fn slow(&self, rank: Rank) -> Option<Slowness> {
        self.ranks.get(rank.0 as usize)?.slow
    }

    /// The rank that was named so many windows ago, and has been slow ever since; of several the slowest.
    pub fn overdue(&self, windows: u64) -> Option<SlownessChange> {
        let least = windows.saturating_mul(WINDOW as u64);
        let named = (0..).map(Rank).zip(&self.ranks);
        let overdue = named.filter_map(|(rank, watched)| Some((rank, watched.slow?, watched.named_for)));
        let (rank, slow, _) = overdue
            .filter(|(_, _, named_for)| *named_for >= least)
            .max_by(|(_, a, _), (_, b, _)| a.factor.total_cmp(&b.factor))?;
        Some(SlownessChange { rank, slow: Some(slow) })
    }

    /// One more step of all ranks. This is one event for the whole world, during which no call is answered:
    /// linear in the world, and windows are looked at only of ranks that may be slow.
    fn compare(&mut self, row: &[Work]) -> Vec<SlownessChange> {
        const TIMES: [fn(&Work) -> f64; 4] =
            [|work| work.times[0], |work| work.times[1], |work| work.times[2], |work| work.times[3]];
        let own = OfOthers::from_row(row, Work::own);
        let by_sample = OfOthers::from_row(row, |work| work.own() / work.samples.max(1.0));
        let by_token = OfOthers::from_row(row, |work| work.own() / work.tokens.max(1.0));
        let parts = TIMES.map(|time| OfOthers::from_row(row, time));
        // The oldest step makes room for the newest.
        let full = self.recent.len() == WINDOW;
        let mut newest = if full { self.recent.pop_front() } else { None }.unwrap_or_default();
        newest.resize(row.len(), StepComparison::default());
        for ((work, step), watched) in row.iter().zip(&mut newest).zip(&mut self.ranks) {
            watched.counted -= u32::from(full && step.slowness >= COUNTS);
            let slowness = [&own, &by_sample, &by_token].map(|of| of.ratio(work));
            let slowness = slowness.into_iter().fold(f64::INFINITY, f64::min);
            *step = StepComparison { slowness, excess: parts.each_ref().map(|of| of.beyond(work)) };
            watched.counted += u32::from(slowness >= COUNTS);
        }
        self.recent.push_back(newest);
        let mut changes = Vec::new();
        for (at, watched) in self.ranks.iter_mut().enumerate() {
            // One that is not slow becomes so with enough steps that count, and not before.
            if watched.slow.is_none() && (watched.counted as usize) < ENOUGH {
                continue;
            }
            let window: Vec<_> = self.recent.iter().map(|step| step[at]).collect();
            if watched.look(&window) {
                changes.push(SlownessChange { rank: Rank(at as u32), slow: watched.slow });
            }
        }
        changes
    }
}

impl RankWatch {
    /// Looks at its newest steps; whether it has become slow or well by the last of them.
    fn look(&mut self, window: &[StepComparison]) -> bool {
        let of = |value: &dyn Fn(&StepComparison) -> f64| median(window.iter().map(value).collect());
        let (factor, excess) = (of(&|step| step.slowness), of(&|step| step.excess[3]));
        let was = self.slow.is_some();
        let is = match was {
            true => factor >= WELL,
            false => factor >= SLOW,
        };
        let is = is && excess >= LEAST_EXCESS;
        self.named_for = if was && is { self.named_for + 1 } else { 0 };
        self.slow = is.then(|| Slowness { part: part(window, factor), factor, excess });
        was != is
    }
}

/// What takes the longest beyond the others' in the steps that are slow; `factor` is the window's median.
fn part(window: &[StepComparison], factor: f64) -> Part {
    let least = factor.min(COUNTS);
    let steps: Vec<_> = window.iter().filter(|step| step.slowness >= least).collect();
    let most = |part: Part| median(steps.iter().map(|step| step.excess[part as usize]).collect());
    let part = Part::ALL.into_iter().max_by(|a, b| most(*a).total_cmp(&most(*b)));
    part.unwrap_or(Part::Compute)
}

/// A value of all ranks, and for each the lower median of all but its own. That is one of two values: for
/// those up to the middle the next one above it.
struct OfOthers {
    value: fn(&Work) -> f64,
    middle: f64,
    above: f64,
}

impl OfOthers {
    /// Medians of a row of two ranks at least.
    fn from_row(row: &[Work], value: fn(&Work) -> f64) -> Self {
        let mut values: Vec<f64> = row.iter().map(value).collect();
        let place = values.len().saturating_sub(2) / 2;
        let (_, middle, rest) = values.select_nth_unstable_by(place, f64::total_cmp);
        let middle = *middle;
        let above = rest.iter().copied().min_by(f64::total_cmp).unwrap_or(middle);
        Self { value, middle, above }
    }

    fn ratio(&self, work: &Work) -> f64 {
        let own = (self.value)(work);
        own / self.others(own).max(1e-9)
    }

    fn beyond(&self, work: &Work) -> f64 {
        let own = (self.value)(work);
        own - self.others(own)
    }

    fn others(&self, own: f64) -> f64 {
        if own.total_cmp(&self.middle).is_le() { self.above } else { self.middle }
    }
}

fn median(mut values: Vec<f64>) -> f64 {
    let middle = values.len() / 2;
    *values.select_nth_unstable_by(middle, f64::total_cmp).1
}

#[cfg(test)]
mod tests;
