//! Training whose passes begin when everything that may be read ahead is there, so that what is held in a
//! pass is the same on every machine, however busy: for tests of peaks.

use std::{
    fs,
    time::{Duration, Instant},
};

use coxswain_proto::{cache_plan::CacheDecision, ids::Step, run_spec::RunSpec};
use coxswain_worker::{
    link::{Assignment, Commands, Link, LinkError, Phase, Report, SoloLink, StepShare},
    train::Summary,
    trainer::{Trainer, TrainerOutcome},
};

use crate::solo;

/// Trains to the end as [`solo::train`] does; meanwhile no other training in this process may read data.
pub fn train(trainer: &mut dyn Trainer, spec: &RunSpec, first_step: u64) -> Summary {
    let outcome = solo::outcome(trainer, spec, first_step, |link, _| Box::new(AtRest(link)));
    assert_eq!(outcome, TrainerOutcome::Done);
    solo::summary(spec)
}

/// A link that lets no pass begin before the data threads have nothing left to do. What they take until then
/// is booked to the phase before.
struct AtRest(SoloLink);

impl Link for AtRest {
    fn assignment(&mut self, why: Option<&str>) -> Result<Assignment, LinkError> {
        self.0.assignment(why)
    }
    fn has_generations(&self) -> bool {
        self.0.has_generations()
    }
    fn lease(&mut self, step: Step, samples: u64) -> Result<StepShare, LinkError> {
        self.0.lease(step, samples)
    }
    fn lease_ahead(&mut self, step: Step, samples: u64) -> Result<Option<StepShare>, LinkError> {
        self.0.lease_ahead(step, samples)
    }
    fn decided(&self, step: Step) -> Option<CacheDecision> {
        self.0.decided(step)
    }
    fn commands(&mut self) -> Commands {
        self.0.commands()
    }
    fn wait_while_paused(&mut self) -> Result<(), LinkError> {
        self.0.wait_while_paused()
    }
    fn at(&mut self, phase: Phase, step: Step) {
        if matches!(phase, Phase::Forward | Phase::CacheBuild) {
            let deadline = Instant::now() + Duration::from_secs(120);
            while data_threads_work() {
                assert!(Instant::now() < deadline, "the data threads never have nothing to do");
                std::thread::yield_now();
            }
        }
        self.0.at(phase, step);
    }
    fn report(&mut self, report: Report) -> Result<(), LinkError> {
        self.0.report(report)
    }
}

/// Whether one of the threads that read samples runs, or waits for a disk: those that wait for each other or
/// for a job sleep, and one that has been woken does not.
fn data_threads_work() -> bool {
    let threads = fs::read_dir("/proc/self/task").expect("Linux").flatten();
    // One that has ended since is not there to be read.
    threads.filter_map(|thread| fs::read_to_string(thread.path().join("stat")).ok()).any(|stat| {
        let (name, rest) = stat.rsplit_once(") ").expect("a number, a name in brackets, a state");
        (name.contains("(data-") || name.contains("(batch-")) && !rest.starts_with('S')
    })
}
