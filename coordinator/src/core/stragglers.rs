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
/// Of these, how many must be slow.
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
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
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

impl fmt::Display for Part {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Data => "data",
            Self::Compute => "compute",
            Self::Optimizer => "optimizer",
        })
    }
}

/// How slow a rank is.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Slowness {
    /// What of its step takes the longest beyond the others'.
    pub part: Part,
    /// Its own time over the median of the others'.
    pub factor: f64,
    /// Seconds a step beyond the median of the others.
    pub excess: f64,
}

/// `1.31 times the time of the other ranks in the last 20 steps, most of it in data (+ 120 ms a step)`.
impl fmt::Display for Slowness {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { part, factor, excess } = self;
        let ms = 1e3 * excess;
        write!(
            f,
            "{factor:.2} times the time of the other ranks in the last {WINDOW} steps (+ {ms:.0} ms a step), most of it \
             in {part}"
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
    open: BTreeMap<Step, Vec<Option<Work>>>,
    ranks: Vec<Watched>,
}

#[derive(Clone, Debug, Default)]
struct Watched {
    recent: VecDeque<Compared>,
    slow: Option<Slowness>,
    /// Steps since it was named.
    named_for: u64,
}

/// One rank's step beside the others'.
#[derive(Clone, Copy, Debug)]
struct Compared {
    slowness: f64,
    /// Seconds beyond the median of the others, of each [`Part`] and of all.
    excess: [f64; 4],
}

/// What one rank did in one step; none of it if the step cannot be compared.
#[derive(Clone, Copy, Debug)]
struct Work {
    comparable: bool,
    /// Seconds of each [`Part`], and their sum.
    times: [f64; 4],
    samples: f64,
    tokens: f64,
}

impl Work {
    fn of(report: &StepReport) -> Self {
        let times = &report.times;
        let own = times.total.saturating_sub(times.communication);
        let compute = own.saturating_sub(times.data + times.optimizer);
        let samples: u64 = report.positions.iter().map(|range| range.end.saturating_sub(range.start)).sum();
        Self {
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
        let ranks = vec![Watched::default(); world];
        Self { generation, from: Step(first.0 + WARM_UP), open: BTreeMap::new(), ranks }
    }

    /// Takes what a rank reports of a step; what that changes. Repeated reports change nothing.
    pub fn report(&mut self, rank: Rank, report: &StepReport) -> Vec<SlownessChange> {
        let world = self.ranks.len();
        if world < 2 || report.generation != self.generation || report.step < self.from {
            return Vec::new();
        }
        let row = self.open.entry(report.step).or_insert_with(|| vec![None; world]);
        row[rank.0 as usize] = Some(Work::of(report));
        let Some(row) = row.iter().copied().collect::<Option<Vec<Work>>>() else { return Vec::new() };
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

    fn compare(&mut self, row: &[Work]) -> Vec<SlownessChange> {
        let of_others = |value: &dyn Fn(&Work) -> f64| {
            let values: Vec<f64> = row.iter().map(value).collect();
            (medians_of_others(&values), values)
        };
        let slowness = [
            of_others(&Work::own),
            of_others(&|work| work.own() / work.samples.max(1.0)),
            of_others(&|work| work.own() / work.tokens.max(1.0)),
        ];
        let excess = [0, 1, 2, 3].map(|part| of_others(&|work| work.times[part]));
        let watched = (0..).map(Rank).zip(&mut self.ranks).enumerate();
        let changes = watched.filter_map(|(at, (rank, watched))| {
            let ratios = slowness.iter().map(|(medians, values)| values[at] / medians[at].max(1e-9));
            let slowness = ratios.fold(f64::INFINITY, f64::min);
            let excess = excess.each_ref().map(|(medians, values)| values[at] - medians[at]);
            watched.take(Compared { slowness, excess }).then_some(SlownessChange { rank, slow: watched.slow })
        });
        changes.collect()
    }
}

impl Watched {
    /// One more step; whether it has become slow or well by it.
    fn take(&mut self, step: Compared) -> bool {
        if self.recent.len() == WINDOW {
            self.recent.pop_front();
        }
        self.recent.push_back(step);
        let of = |value: &dyn Fn(&Compared) -> f64| median(self.recent.iter().map(value).collect());
        let (factor, excess) = (of(&|step| step.slowness), of(&|step| step.excess[3]));
        let was = self.slow.is_some();
        let is = match was {
            true => factor >= WELL,
            false => factor >= SLOW && self.above(COUNTS).count() >= ENOUGH,
        };
        let is = is && excess >= LEAST_EXCESS;
        self.named_for = if was && is { self.named_for + 1 } else { 0 };
        self.slow = is.then(|| Slowness { part: self.part(factor), factor, excess });
        was != is
    }

    fn above(&self, slowness: f64) -> impl Iterator<Item = &Compared> {
        self.recent.iter().filter(move |step| step.slowness >= slowness)
    }

    /// What takes the longest beyond the others' in the steps that are slow; `factor` is the window's median.
    fn part(&self, factor: f64) -> Part {
        let steps: Vec<_> = self.above(factor.min(COUNTS)).collect();
        let most = |part: Part| median(steps.iter().map(|step| step.excess[part as usize]).collect());
        let part = Part::ALL.into_iter().max_by(|a, b| most(*a).total_cmp(&most(*b)));
        part.unwrap_or(Part::Compute)
    }
}

/// The lower median of all values but its own, for each.
fn medians_of_others(values: &[f64]) -> Vec<f64> {
    let mut order: Vec<usize> = (0..values.len()).collect();
    order.sort_by(|a, b| values[*a].total_cmp(&values[*b]));
    let middle = values.len().saturating_sub(2) / 2;
    let mut medians = vec![0.0; values.len()];
    for (place, &at) in order.iter().enumerate() {
        medians[at] = values[order[middle + usize::from(place <= middle)]];
    }
    medians
}

fn median(mut values: Vec<f64>) -> f64 {
    let middle = values.len() / 2;
    *values.select_nth_unstable_by(middle, f64::total_cmp).1
}

#[cfg(test)]
mod tests;
