//! Watching drift: when the probes' features under the present adapter are measured beside those of a
//! generation that served before, and what comes of it.
//!
//! ```text
//! probes     cache.probe_samples training samples, spread evenly over the data set; every rank takes a part
//! when       a portion in each of the steps after the phase change (`CacheSchedule::measured_in`), before
//!            the step's own samples
//! after it   all ranks gather their sums; rank 0 reports
//! ```
//!
//! In a cached phase the adapter rests, so what is measured some steps after the phase change is what had
//! moved at the phase change, bit for bit, and measuring can be begun again wherever a fault has cut it off.
//! Only the loss of a portion is under the trainables above the tap of its own step, for fresh and kept
//! features alike. Both are rounded as the store rounds, since that is what training would see.
//!
//! Where the schedule alone decides, the new generation serves already: what is fresh are records of its
//! namespace, found there or stored. Where drift decides, the old one goes on meanwhile, and what is fresh is
//! kept until the cache phase is known: if a generation begins there, these are its first records. What is
//! not measured by then (a phase too short for portions, a fault) is measured at once, while all ranks wait.

use std::ops::Range;

use coxswain_nn::kernels::Tape;
use coxswain_proto::{
    cache_plan::{CacheDrift, CacheReport},
    ids::Step,
    run_spec::Cache,
};

use super::{
    desk::Desk,
    drift::Sums,
    measuring::{Baseline, DriftMeasurement, DriftTotal},
    memo::Memo,
    serving::Serving,
    store_writer::ComputedFeatures,
};
use crate::link::{CacheNamespace, Phase, Report};
use crate::train::{Facts, TrainError};

/// What is known of the drift of features, and is still to be found out.
pub(super) struct DriftWatch<B: Tape<Base = B>> {
    /// The measurement that goes on.
    measuring: Option<DriftMeasurement<B>>,
    /// Before which step drift was measured last in this generation of workers.
    measured: Option<Step>,
    /// What was computed for that: the first records of a generation that begins there.
    probed: Option<(Step, ComputedFeatures)>,
}

impl<B: Tape<Base = B>> Default for DriftWatch<B> {
    fn default() -> Self {
        Self { measuring: None, measured: None, probed: None }
    }
}

/// Whether it depends on drift whether a generation begins.
fn drift_decides(cache: &Cache) -> bool {
    cache.rebuild_above.is_some()
}

impl<B: Tape<Base = B>> DriftWatch<B> {
    /// Begins to measure in the cached step that runs next, if there is something to measure after this phase
    /// change. `before` served until here.
    pub fn begin(
        &mut self,
        memo: &Memo<B>,
        desk: &Desk<'_, '_, B>,
        namespace: &CacheNamespace,
        before: Option<Serving<B>>,
    ) {
        let (step, cache) = (desk.next, &desk.run.spec.cache);
        let Some(schedule) = desk.run.cache_schedule() else { return };
        let begins = schedule.cached_since(step);
        let portions = schedule.measured_in(begins);
        let decided = schedule.decided_at(begins);
        match before {
            Some(before) if !drift_decides(cache) && step == begins => {
                self.start(memo, desk, begins, portions, Baseline::Before(Box::new(before)));
            }
            // What comes too late for portions is measured at once where it is decided.
            None if drift_decides(cache)
                && namespace.generation.since < begins
                && step < portions.end
                && step < decided =>
            {
                self.start(memo, desk, decided, portions, Baseline::Serving);
            }
            _ => {}
        }
    }

    /// Takes up a measurement that a fault, or the end of a process, has cut off; `before` is none if nothing
    /// of that generation is left.
    pub fn begin_again(
        &mut self,
        memo: &Memo<B>,
        desk: &Desk<'_, '_, B>,
        begins: Step,
        before: Option<Serving<B>>,
    ) {
        let Some(schedule) = desk.run.cache_schedule() else { return };
        let against = before.map_or(Baseline::Lost, |before| Baseline::Before(Box::new(before)));
        self.start(memo, desk, begins, schedule.measured_in(begins), against);
    }

    fn start(
        &mut self,
        memo: &Memo<B>,
        desk: &Desk<'_, '_, B>,
        at: Step,
        portions: Range<Step>,
        against: Baseline<B>,
    ) {
        let wanted = desk.run.spec.cache.probe_samples as u64;
        let (rank, world) = (desk.members.comm.rank().0 as usize, desk.members.comm.world());
        let all = desk.feed.samples.training_len();
        let count = wanted.min(all);
        if count == 0 {
            return;
        }
        let spread = (0..count).filter_map(|i| desk.feed.samples.training_sample(i * all / count));
        let stale = |serving: &Serving<B>| serving.stale;
        let lost = match &against {
            Baseline::Serving => memo.serving.as_ref().is_none_or(stale),
            Baseline::Before(serving) => serving.stale,
            Baseline::Lost => true,
        };
        let against = if lost { Baseline::Lost } else { against };
        let probes = if lost { Vec::new() } else { spread.skip(rank).step_by(world).collect() };
        self.measuring = Some(DriftMeasurement {
            at,
            portions,
            against,
            probes,
            done: 0,
            sums: Sums::default(),
            step: None,
            older: None,
            made: ComputedFeatures::default(),
        });
    }

    /// Compares this step's portion of the probes. Nothing has left this rank yet, so the vote of the step
    /// hears of what fails here.
    pub fn measure_portion(
        &mut self,
        memo: &mut Memo<B>,
        desk: &mut Desk<'_, '_, B>,
        step: Step,
    ) -> Result<(), TrainError> {
        let due = |measuring: &mut DriftMeasurement<B>| {
            measuring.portions.start <= step && measuring.step.is_none_or(|last| last < step)
        };
        let Some(mut measuring) = self.measuring.take_if(due) else { return Ok(()) };
        let steps_left = measuring.portions.end.0.saturating_sub(step.0).max(1);
        let left = measuring.probes.len() - measuring.done;
        desk.enter(Phase::CacheBuild, step)?;
        let compared = measuring.compare_some(memo, desk, step, left.div_ceil(steps_left as usize));
        if compared.is_ok() {
            measuring.step = Some(step);
            if measuring.done == measuring.probes.len() {
                // What is fresh and stored is seen by all ranks after this step's vote.
                memo.publish();
            }
        }
        self.measuring = Some(measuring);
        compared
    }

    /// After a step: once all probes are compared, the ranks gather what came out, and rank 0 reports it.
    pub fn conclude(
        &mut self,
        memo: &mut Memo<B>,
        desk: &mut Desk<'_, '_, B>,
        step: Step,
    ) -> Result<(), TrainError> {
        let over = |measuring: &mut DriftMeasurement<B>| {
            measuring.step == Some(step) && measuring.portions.end.0 <= step.0 + 1
        };
        let Some(measuring) = self.measuring.take_if(over) else { return Ok(()) };
        match measuring.gather(desk, step, Ok(())) {
            Ok(found) => self.tell(memo, desk, measuring, &found),
            Err(error) => {
                // Ranks that go on without the one that was lost measure again.
                self.measuring = Some(measuring);
                Err(error)
            }
        }
    }

    /// Whether drift decides about `step`, and is not measured yet: then all ranks measure it together before
    /// they lease the step.
    pub fn decides(&self, memo: &Memo<B>, run: &Facts<'_, B>, step: Step) -> bool {
        let Some(schedule) = run.cache_schedule() else { return false };
        let serving = memo.serving.as_ref().filter(|_| drift_decides(&run.spec.cache));
        let wanted = run.spec.cache.probe_samples > 0 && self.measured != Some(step);
        let served = |serving: &Serving<B>| serving.generation.since < schedule.cached_since(step);
        wanted && schedule.decides_at(step) && serving.is_some_and(served)
    }

    /// Measures all that is left of what decides about the step that runs next, if it does.
    pub fn measure_before(
        &mut self,
        memo: &mut Memo<B>,
        desk: &mut Desk<'_, '_, B>,
    ) -> Result<(), TrainError> {
        let step = desk.next;
        if !self.decides(memo, desk.run, step) {
            return Ok(());
        }
        desk.enter(Phase::CacheBuild, step)?;
        memo.publish();
        if self.measuring.is_none() {
            self.start(memo, desk, step, step..step, Baseline::Serving);
        }
        let Some(mut measuring) = self.measuring.take() else { return Ok(()) };
        let left = measuring.probes.len() - measuring.done;
        let compared = measuring.compare_some(memo, desk, step, left);
        let found = measuring.gather(desk, step, compared)?;
        self.tell(memo, desk, measuring, &found)
    }

    /// Keeps what came out, and reports it on rank 0.
    fn tell(
        &mut self,
        memo: &mut Memo<B>,
        desk: &mut Desk<'_, '_, B>,
        measuring: DriftMeasurement<B>,
        found: &DriftTotal,
    ) -> Result<(), TrainError> {
        let DriftMeasurement { at, against, made, .. } = measuring;
        let DriftTotal { total, lost } = *found;
        self.measured = Some(at);
        let drift = total.drift().filter(|_| !lost);
        let drift = drift.map(|drift| CacheDrift { at, drift, probes: total.probes as u32 });
        // Where drift decides, the coordinator must hear that there is none.
        let (compared, told) = match &against {
            Baseline::Before(before) => (Some(&**before), drift.is_some()),
            Baseline::Serving | Baseline::Lost => {
                (memo.serving.as_ref(), drift_decides(&desk.run.spec.cache))
            }
        };
        let Some(report) = compared.map(|serving| memo.report_of(serving)).filter(|_| told) else {
            return Ok(());
        };
        memo.account.measured(report.generation, drift);
        self.probed = Some((at, made)).filter(|(_, made)| !made.rows.is_empty());
        if desk.members.rank().0 > 0 {
            return Ok(());
        }
        if let Some(CacheDrift { drift, probes, .. }) = &drift {
            desk.members.link.report(Report::Note(format!(
                "step {at}: features have moved by {:.2} % (relative L2, cosine {:.4}) since version {} was begun; loss {:.5} with fresh ones, {:.5} with cached ones, on {probes} probes",
                100.0 * drift.relative_l2, drift.cosine, report.generation, drift.loss_fresh, drift.loss_cached
            )))?;
        }
        let lost = report.lost || (lost && matches!(against, Baseline::Serving | Baseline::Lost));
        Ok(desk.members.link.report(Report::Cache(CacheReport { drift, lost, ..report }))?)
    }

    /// The generation compared with, while that goes on, if it serves no more.
    pub fn before(&self) -> Option<&Serving<B>> {
        self.measuring.as_ref().and_then(DriftMeasurement::before)
    }

    /// What was computed for the measurement before `since`: the first records of a generation that begins
    /// there. They are of no use to any other.
    pub fn first_records(&mut self, since: Step) -> Option<ComputedFeatures> {
        self.probed.take().filter(|(step, _)| *step == since).map(|(_, made)| made)
    }

    /// Gives up the measurement that goes on.
    pub fn give_up(&mut self) {
        self.measuring = None;
    }

    /// Gives up the measurement that goes on, if it is of a generation that serves: once another begins, a
    /// drift since that decides nothing.
    pub fn give_up_deciding(&mut self) {
        self.measuring.take_if(|measuring| measuring.before().is_none());
    }
}
