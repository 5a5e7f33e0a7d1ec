//! Steps of a run that end with their profile: nothing is saved, evaluated or exported.

use std::sync::{Arc, Mutex, PoisonError};

use coxswain_nn::profile::{self, SpanKind, SpanSum};
use coxswain_proto::{ids::Step, plan::Plan, run_spec::RunSpec};
use coxswain_worker::{
    link::{Follower, LinkError, Phase, Report, SoloLink},
    trainer::{Trainer, TrainerFailure, TrainerOutcome},
};
use serde_json::{Value, json};

use crate::exit::{CliError, Exit};

/// Steps before the first one that is recorded: the optimizer makes its buffers in the first.
pub const WARM_UP: u64 = 1;

/// What is recorded.
#[derive(Clone, Copy, Debug)]
pub struct ProfiledSteps {
    /// How many.
    pub count: u64,
    /// Samples of each.
    pub samples: u64,
    /// Threads that compute.
    pub threads: usize,
}

/// What steps came to.
#[derive(Clone, Debug)]
pub struct Profile {
    /// Which ones.
    pub steps: ProfiledSteps,
    /// All of their spans.
    pub all: SpanSum,
}

impl Profile {
    /// Milliseconds of a step, of a time over all of them.
    pub fn ms(&self, time: std::time::Duration) -> f64 {
        1e3 * time.as_secs_f64() / self.steps.count as f64
    }

    /// Percent of the steps' time.
    pub fn share(&self, time: std::time::Duration) -> f64 {
        100.0 * time.as_secs_f64() / self.all.time.as_secs_f64().max(f64::MIN_POSITIVE)
    }

    /// For programs: the tree of spans, times in milliseconds a step, memory in bytes.
    pub fn json(&self) -> Value {
        let ProfiledSteps { count, samples, threads } = self.steps;
        json!({"steps": count, "warm_up": WARM_UP, "samples_per_step": samples, "threads": threads,
            "all": self.json_of(&self.all)})
    }

    fn json_of(&self, span: &SpanSum) -> Value {
        let (kind, number) = match span.kind {
            SpanKind::All => ("all", None),
            SpanKind::Phase => ("phase", None),
            SpanKind::Stage => ("stage", None),
            SpanKind::Layer(number) => ("layer", Some(number)),
            SpanKind::Part => ("part", None),
            SpanKind::Operation => ("operation", None),
        };
        let inner: Vec<_> = span.inner.iter().map(|inner| self.json_of(inner)).collect();
        json!({"kind": kind, "name": span.name, "number": number, "ms": self.ms(span.time),
            "own_ms": self.ms(span.own_time()), "count": span.count as f64 / self.steps.count as f64,
            "peak_bytes": span.peak, "inner": inner})
    }
}

/// Trains a run's first steps and says where their time went. The spec's output directory is written to.
pub fn take(spec: &RunSpec, mut trainer: impl Trainer, count: u64) -> Result<Profile, CliError> {
    let failed = |failure: TrainerFailure| CliError::new(Exit::of_failure(failure.kind), failure.message);
    let facts = trainer.open(spec).map_err(failed)?;
    let plan = Plan::new(&spec.train, facts.training_samples).map_err(CliError::usage)?;
    let total = plan.total_steps();
    if total < WARM_UP + count {
        let most = total.saturating_sub(WARM_UP);
        return Err(CliError::usage(format!(
            "--steps {count}: must be at most {most}: the run has {total} in all, and the first is a warm-up"
        )));
    }
    let taken = Arc::new(Mutex::new(None));
    let recording = Recording { done: 0, last: WARM_UP + count, taken: Arc::clone(&taken) };
    let link = SoloLink::new(Step(0)).with_cache(&spec.cache, &plan, None).followed_by(recording);
    match trainer.train(spec, Box::new(link)) {
        TrainerOutcome::Done => {}
        TrainerOutcome::Aborted(reason) => return Err(CliError::new(Exit::Internal, reason)),
        TrainerOutcome::Failed(failure) => return Err(failed(failure)),
    }
    let all = taken.lock().unwrap_or_else(PoisonError::into_inner).take();
    let all =
        all.ok_or_else(|| CliError::new(Exit::Internal, "training ended before the profile was complete"))?;
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let threads =
        std::env::var("RAYON_NUM_THREADS").ok().and_then(|text| text.parse().ok()).unwrap_or(threads);
    Ok(Profile { steps: ProfiledSteps { count, samples: spec.train.global_batch as u64, threads }, all })
}

/// Records steps of a world of one after the first, and ends with the last of them. Lives on the trainer's
/// thread, as the spans do.
struct Recording {
    /// Steps that are done.
    done: u64,
    last: u64,
    taken: Arc<Mutex<Option<SpanSum>>>,
}

impl Follower for Recording {
    fn at(&mut self, phase: Phase) {
        profile::phase(phase.name());
    }

    fn report(&mut self, report: &Report) -> Result<(), LinkError> {
        if !matches!(report, Report::Step(_)) {
            return Ok(());
        }
        self.done += 1;
        if self.done == WARM_UP {
            profile::start();
        }
        if self.done < self.last {
            return Ok(());
        }
        *self.taken.lock().unwrap_or_else(PoisonError::into_inner) = profile::stop();
        Err(LinkError::Dismissed("the profile is complete".to_owned()))
    }
}
