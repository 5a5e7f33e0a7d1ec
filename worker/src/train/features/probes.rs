//! Measuring drift: the probes' features under the present adapter beside those of a generation that served
//! before.
//!
//! ```text
//! probes     cache.probe_samples training samples, spread evenly over the data set; every rank takes a part
//! fresh      what the present adapter makes of them          kept   what the store has, or the generation's
//!                                                                   own adapter makes
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

use coxswain_proto::{
    cache_plan::{CacheDrift, CacheReport},
    ids::Step,
    run_spec::Cache,
};

use super::{
    desk::Desk,
    drift::Sums,
    measuring::{Against, Gathered, Measuring},
    memo::Features,
    serving::Serving,
    store_writer::{Made, MadeRow},
};
use coxswain_feature_store::round_trip;
use coxswain_nn::kernels::Tape;
use coxswain_task::{Batch, CachedFeatures, Fault, Readable};

use crate::{
    link::{CacheNamespace, Phase, Report},
    memory,
    train::{TrainError, facts::Facts},
};

/// Probes that are compared at once.
struct Probes<'a> {
    indices: &'a [u64],
    /// Values of each.
    rows: &'a [usize],
    batch: &'a dyn Batch,
}

/// Whether it depends on drift whether a generation begins.
fn drift_decides(cache: &Cache) -> bool {
    cache.rebuild_above.is_some()
}

impl<B: Tape<Base = B>> Features<B> {
    /// Begins to measure in the cached step that runs next, if there is something to measure after this phase
    /// change. `before` served until here.
    pub(super) fn begin_measuring(
        &mut self,
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
                self.measure(desk, begins, portions, Against::Before(Box::new(before)));
            }
            // What comes too late for portions is measured at once where it is decided.
            None if drift_decides(cache)
                && namespace.generation.since < begins
                && step < portions.end
                && step < decided =>
            {
                self.measure(desk, decided, portions, Against::Serving);
            }
            _ => {}
        }
    }

    /// Takes up a measurement that a fault, or the end of a process, has cut off; `before` is none if nothing
    /// of that generation is left.
    pub(super) fn measure_again(&mut self, desk: &Desk<'_, '_, B>, begins: Step, before: Option<Serving<B>>) {
        let Some(schedule) = desk.run.cache_schedule() else { return };
        let against = before.map_or(Against::Lost, |before| Against::Before(Box::new(before)));
        self.measure(desk, begins, schedule.measured_in(begins), against);
    }

    fn measure(&mut self, desk: &Desk<'_, '_, B>, at: Step, portions: Range<Step>, against: Against<B>) {
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
            Against::Serving => self.serving.as_ref().is_none_or(stale),
            Against::Before(serving) => serving.stale,
            Against::Lost => true,
        };
        let against = if lost { Against::Lost } else { against };
        let probes = if lost { Vec::new() } else { spread.skip(rank).step_by(world).collect() };
        self.measuring = Some(Measuring {
            at,
            portions,
            against,
            probes,
            done: 0,
            sums: Sums::default(),
            step: None,
            older: None,
            made: Made::default(),
        });
    }

    /// Compares this step's portion of the probes. Nothing has left this rank yet, so the vote of the step
    /// hears of what fails here.
    pub(in crate::train) fn measure_portion(
        &mut self,
        desk: &mut Desk<'_, '_, B>,
        step: Step,
    ) -> Result<(), TrainError> {
        let due = |measuring: &mut Measuring<B>| {
            measuring.portions.start <= step && measuring.step.is_none_or(|last| last < step)
        };
        let Some(mut measuring) = self.measuring.take_if(due) else { return Ok(()) };
        let steps_left = measuring.portions.end.0.saturating_sub(step.0).max(1);
        let left = measuring.probes.len() - measuring.done;
        desk.enter(Phase::CacheBuild, step)?;
        let compared = self.compare_some(desk, step, &mut measuring, left.div_ceil(steps_left as usize));
        if compared.is_ok() {
            measuring.step = Some(step);
            if measuring.done == measuring.probes.len() {
                // What is fresh and stored is seen by all ranks after this step's vote.
                self.publish();
            }
        }
        self.measuring = Some(measuring);
        compared
    }

    /// After a step: once all probes are compared, the ranks gather what came out, and rank 0 reports it.
    pub(super) fn conclude_drift(
        &mut self,
        desk: &mut Desk<'_, '_, B>,
        step: Step,
    ) -> Result<(), TrainError> {
        let over = |measuring: &mut Measuring<B>| {
            measuring.step == Some(step) && measuring.portions.end.0 <= step.0 + 1
        };
        let Some(measuring) = self.measuring.take_if(over) else { return Ok(()) };
        match measuring.gather(desk, step, Ok(())) {
            Ok(found) => self.tell_drift(desk, measuring, &found),
            Err(error) => {
                // Ranks that go on without the one that was lost measure again.
                self.measuring = Some(measuring);
                Err(error)
            }
        }
    }

    /// Whether drift decides about `step`, and is not measured yet: then all ranks measure it together before
    /// they lease the step.
    pub(in crate::train) fn measures_before(&self, run: &Facts<'_, B>, step: Step) -> bool {
        let Some(schedule) = run.cache_schedule() else { return false };
        let serving = self.serving.as_ref().filter(|_| drift_decides(&run.spec.cache));
        let wanted = run.spec.cache.probe_samples > 0 && self.measured != Some(step);
        let served = |serving: &Serving<B>| serving.generation.since < schedule.cached_since(step);
        wanted && schedule.decides_at(step) && serving.is_some_and(served)
    }

    /// Measures all that is left of what decides about the step that runs next, if it does.
    pub(in crate::train) fn measure_before(&mut self, desk: &mut Desk<'_, '_, B>) -> Result<(), TrainError> {
        let step = desk.next;
        if !self.measures_before(desk.run, step) {
            return Ok(());
        }
        desk.enter(Phase::CacheBuild, step)?;
        self.publish();
        if self.measuring.is_none() {
            self.measure(desk, step, step..step, Against::Serving);
        }
        let Some(mut measuring) = self.measuring.take() else { return Ok(()) };
        let left = measuring.probes.len() - measuring.done;
        let compared = self.compare_some(desk, step, &mut measuring, left);
        let found = measuring.gather(desk, step, compared)?;
        self.tell_drift(desk, measuring, &found)
    }

    /// Keeps what came out, and reports it on rank 0.
    fn tell_drift(
        &mut self,
        desk: &mut Desk<'_, '_, B>,
        measuring: Measuring<B>,
        found: &Gathered,
    ) -> Result<(), TrainError> {
        let Measuring { at, against, made, .. } = measuring;
        let Gathered { total, lost } = *found;
        self.measured = Some(at);
        let drift = total.drift().filter(|_| !lost);
        let drift = drift.map(|drift| CacheDrift { at, drift, probes: total.probes as u32 });
        // Where drift decides, the coordinator must hear that there is none.
        let (compared, told) = match &against {
            Against::Before(before) => (Some(&**before), drift.is_some()),
            Against::Serving | Against::Lost => (self.serving.as_ref(), drift_decides(&desk.run.spec.cache)),
        };
        let Some(report) = compared.map(|serving| self.report_of(serving)).filter(|_| told) else {
            return Ok(());
        };
        self.account.measured(report.generation, drift);
        self.probed = Some((at, made)).filter(|(_, made)| !made.rows.is_empty());
        if desk.members.rank().0 > 0 {
            return Ok(());
        }
        if let Some(CacheDrift { drift, probes, .. }) = &drift {
            desk.members.link.report(Report::Note(format!(
                "step {at}: features have moved by {:.2} % (relative L2, cosine {:.4}) since version {} was begun; loss {:.5} with fresh ones, {:.5} with kept ones, on {probes} probes",
                100.0 * drift.relative_l2, drift.cosine, report.generation, drift.loss_fresh, drift.loss_cached
            )))?;
        }
        let lost = report.lost || (lost && matches!(against, Against::Serving | Against::Lost));
        Ok(desk.members.link.report(Report::Cache(CacheReport { drift, lost, ..report }))?)
    }

    /// Compares the next `count` of this rank's probes, as many at once as memory allows.
    fn compare_some(
        &self,
        desk: &Desk<'_, '_, B>,
        step: Step,
        measuring: &mut Measuring<B>,
        count: usize,
    ) -> Result<(), TrainError> {
        let (end, mut size) = (measuring.done + count, self.fill_batch);
        while measuring.done < end {
            let indices = measuring.probes[measuring.done..end.min(measuring.done + size)].to_vec();
            let before = memory::in_use();
            match memory::guarded(|| self.compare(desk, &indices, measuring)) {
                Ok(compared) => {
                    let (sums, made) = compared?;
                    measuring.sums = sums;
                    measuring.done += indices.len();
                    match measuring.before() {
                        None => measuring.made.append(made),
                        Some(_) if made.rows.is_empty() => {}
                        Some(_) => self.store_writer.keep(made),
                    }
                }
                Err(_) if indices.len() > 1 => size = indices.len().div_ceil(2),
                Err(overrun) => return Err(desk.does_not_fit(step, overrun, before)),
            }
        }
        Ok(())
    }

    /// Compares some samples: the sums with them, and their fresh features, if they were computed.
    fn compare(
        &self,
        desk: &Desk<'_, '_, B>,
        indices: &[u64],
        measuring: &mut Measuring<B>,
    ) -> Result<(Sums, Made), TrainError> {
        let Readable { samples, faults } = desk.feed.samples.readable(indices);
        faults.iter().for_each(|error| tracing::warn!(%error, "a probe is left out"));
        if samples.is_empty() {
            return Ok((measuring.sums, Made::default()));
        }
        let indices: Vec<u64> = samples.iter().map(|sample| sample.index()).collect();
        let batch = desk.feed.samples.batch(measuring.at, &samples);
        let width = self.setup.shape.width;
        let rows = desk.extractor().row_values(&*batch);
        let probes = Probes { indices: &indices, rows: &rows, batch: &*batch };
        let (fresh, unrounded) = self.fresh(desk, &probes, measuring.before().is_some())?;
        let kept = self.kept(desk, &probes, measuring)?;
        let mut sums = measuring.sums;
        let mut made = Made { rows: Vec::new(), values: unrounded.unwrap_or_default() };
        let mut at = 0;
        for (row, sample) in rows.iter().zip(samples) {
            let place = at..at + row;
            at = place.end;
            sums.compare(&fresh[place.clone()], &kept[place.clone()]);
            if let Some(key) = self.setup.keys.get(sample.index()).filter(|_| !made.values.is_empty()) {
                made.rows.push(MadeRow { key, inputs: sample.inputs(), place });
            }
        }
        let loss = |values| {
            let batch = batch.with_features(CachedFeatures { width, values });
            desk.learner.objective.loss(&desk.learner.trainables, &*batch)
        };
        let (with_fresh, with_kept) = match (loss(fresh), loss(kept)) {
            (Ok(fresh), Ok(kept)) => (fresh, kept),
            // Probes are samples of the data set: one that is no number says nothing of the features.
            (Err(error), _) | (_, Err(error)) if error.fault == Fault::Numeric => {
                tracing::warn!(%error, "drift is measured without these samples");
                return Ok((measuring.sums, Made::default()));
            }
            (Err(error), _) | (_, Err(error)) => return Err(error.into()),
        };
        sums.loss_fresh += with_fresh.loss_sum;
        sums.loss_kept += with_kept.loss_sum;
        sums.valid += with_fresh.valid;
        Ok((sums, made))
    }

    /// What the present adapter makes of probes, rounded; and unrounded, if it had to be computed. `serves`:
    /// the generation made with it does.
    fn fresh(
        &self,
        desk: &Desk<'_, '_, B>,
        probes: &Probes<'_>,
        serves: bool,
    ) -> Result<(Vec<f32>, Option<Vec<f32>>), TrainError> {
        let serving = self.serving.as_ref().filter(|_| serves);
        if let Some(found) =
            serving.and_then(|serving| self.setup.stored(serving, probes.indices, probes.rows))
        {
            return Ok((found, None));
        }
        let CachedFeatures { width, values } =
            desk.extractor().compute(&desk.learner.trainables, probes.batch)?;
        let mut rounded = values.clone();
        round_trip(self.setup.dtype, width, &mut rounded);
        Ok((rounded, Some(values)))
    }

    /// What the generation compared with has of probes, rounded.
    fn kept(
        &self,
        desk: &Desk<'_, '_, B>,
        probes: &Probes<'_>,
        measuring: &mut Measuring<B>,
    ) -> Result<Vec<f32>, TrainError> {
        let Measuring { against, older, .. } = measuring;
        let serving = match against {
            Against::Before(before) => Some(&**before),
            Against::Serving | Against::Lost => self.serving.as_ref(),
        };
        if let Some(found) =
            serving.and_then(|serving| self.setup.stored(serving, probes.indices, probes.rows))
        {
            return Ok(found);
        }
        let ready = serving.and_then(|serving| serving.older.as_ref());
        let below = match (ready, serving.and_then(|serving| serving.adapter.as_ref())) {
            (Some(ready), _) => ready,
            (None, Some(adapter)) => older.get_or_insert_with(|| adapter.trainables(&self.setup.device)),
            (None, None) => &desk.learner.trainables,
        };
        let CachedFeatures { width, mut values } = desk.extractor().compute(below, probes.batch)?;
        round_trip(self.setup.dtype, width, &mut values);
        Ok(values)
    }
}
