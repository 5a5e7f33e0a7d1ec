//! The loop of one rank, from its first step to its last, through as many generations as that takes.
//!
//! ```text
//! join: ready ─▶ assignment ─▶ ring ─▶ agree on a state ─▶ steps ─▶ save, evaluate, export ─▶ end
//!   ▲                                                       │
//!   └────── a rank is lost, or the world changes ───────────┘
//! ```
//!
//! What outlives a generation (the process, the frozen weights, this rank's part of the state) stays where it is.

use std::{
    collections::VecDeque,
    path::PathBuf,
    sync::{Arc, atomic::Ordering::Relaxed},
    time::{Duration, Instant},
};

use coxswain_proto::{
    ids::{Rank, Step},
    plan::Plan,
    run_spec::RunSpec,
};

use super::{
    TrainError,
    checkpoint::Store,
    evaluate::HeldOutError,
    export::Summary,
    gradient_watch::GradientWatch,
    features::{Claim, Features},
    recovery::{Held, is_the_generations},
    step::STEPS_SIGHTED,
    warm_up::WarmUp,
};
use coxswain_nn::{
    kernels::Tape,
    params::{FlatGrads, Trainables},
};
use coxswain_task::{Objective, Samples, TaskOn};

use crate::{
    collective::{
        self, Brings, Collective, Computes, FabricSource, Membership, Progress, Ring, RingAbort, RingListener, Solo,
    },
    feeder::{DataError, Prefetcher},
    link::{Assignment, BadSample, Commands, Link, LinkError, Phase, Report},
    memory::{Meter, prediction::outcome::Sightings},
    zero::LearningRateSchedule,
};

/// How long ranks look for each other once all are assigned. The coordinator's abort ends it sooner if one of them is gone.
const RING_PATIENCE: Duration = Duration::from_secs(60);

/// Everything one rank trains with. Built by [`TaskTrainer`](super::TaskTrainer); lives on the trainer thread.
pub(super) struct Training<'a, B: Tape<Base = B>> {
    pub(super) spec: &'a RunSpec,
    pub(super) spec_digest: String,
    pub(super) output_dir: PathBuf,
    pub(super) assignment: Assignment,
    pub(super) plan: Plan,
    pub(super) link: Box<dyn Link + Send>,
    pub(super) comm: Box<dyn Collective>,
    /// What this rank computes on.
    pub(super) computes: Computes,
    /// Where this machine's memory records are; none: nothing is learned from them, and nothing added.
    pub(super) records: Option<PathBuf>,
    /// What may carry large buffers beside the ring.
    pub(super) fabric: Option<Box<dyn FabricSource>>,
    pub(super) task: &'static dyn TaskOn<B>,
    pub(super) samples: Arc<dyn Samples>,
    pub(super) prefetch: Prefetcher,
    pub(super) objective: Box<dyn Objective<B>>,
    pub(super) trainables: Trainables<B>,
    /// The optimizer of the newest generation that has begun; none before the first.
    pub(super) held: Option<Held<B::Flat>>,
    /// The state that was being taken over when a rank was lost in the last moment.
    pub(super) coming: Option<Held<B::Flat>>,
    pub(super) rates: LearningRateSchedule,
    pub(super) grads: FlatGrads<B::Flat>,
    pub(super) meter: Meter,
    /// What was in use at moments that tell categories apart.
    pub(super) sightings: Sightings,
    pub(super) store: Store,
    /// Samples per forward pass now in force; an out-of-memory lowers it. Before the search for it is done, the most that it may try.
    pub(super) micro_batch: usize,
    /// Whether `micro_batch` was searched for and found.
    pub(super) searched: bool,
    /// The next step to run.
    pub(super) next: Step,
    /// Requests obeyed so far, to tell a new one from an old one.
    pub(super) obeyed: Commands,
    /// Steps whose samples have been requested.
    pub(super) requested: Step,
    /// What this rank consumes in the steps from `next` to `requested`.
    pub(super) claimed: VecDeque<Claim>,
    /// Features that are kept; none if the cache is off.
    pub(super) features: Option<Features<B>>,
    /// The step of the newest checkpoint of this run.
    pub(super) saved: Option<Step>,
    /// The held-out error before the first step, once it has been looked at.
    pub(super) before: Option<Option<HeldOutError>>,
    /// The run in numbers, as far as this process has seen it.
    pub(super) summary: Summary,
    /// What the first step of this process took beyond the others.
    pub(super) warm_up: WarmUp,
    /// Whether all ranks have agreed to stop before the last step.
    pub(super) stopped: bool,
    /// Whether the run was described in the log.
    pub(super) announced: bool,
    /// Watches in the first steps that everything that should train does.
    pub(super) gradients: GradientWatch,
}

/// How a generation ended that did not fail.
enum Ended {
    /// Every step is done, or the run was stopped; results are written.
    Done,
    /// All ranks have left it together, to form another one.
    Regroup,
}

impl<B: Tape<Base = B>> Training<'_, B> {
    /// Trains through generation after generation to the end of the run. `listener` is where this rank's neighbour calls.
    pub(super) fn train(&mut self, listener: Option<&RingListener>) -> Result<(), TrainError> {
        let mut why = None;
        loop {
            match self.join(listener, why.take()).and_then(|()| self.run()) {
                Ok(Ended::Done) | Err(TrainError::Link(LinkError::Dismissed(_))) => return Ok(()),
                Ok(Ended::Regroup) => {}
                Err(error) if !self.link.has_generations() => return Err(error),
                Err(error) if is_the_generations(&error) => {
                    tracing::warn!(step = self.next.0, %error, "the generation is over; waiting for the next one");
                    why = Some(error.to_string());
                }
                Err(TrainError::Data(DataError::AtPosition { epoch, position, row, source })) => {
                    // Whether another worker tries it, or nobody any more, is the coordinator's to decide.
                    let (step, message) = (self.next, source.to_string());
                    why = Some(message.clone());
                    self.link.report(Report::BadSample(BadSample { step, epoch, position, row, message }))?;
                }
                Err(error) => return Err(error),
            }
        }
    }

    /// Takes this worker's place in the next generation, and the state that its ranks agree on.
    fn join(&mut self, listener: Option<&RingListener>, why: Option<String>) -> Result<(), TrainError> {
        // Closing the old ring tells neighbours that still wait in it.
        self.comm = Box::new(Solo::default());
        self.prefetch.clear();
        self.link.at(Phase::Joining, self.next);
        self.assignment = self.link.assignment(why.as_deref())?;
        // What moving state takes is no step's.
        self.enter(Phase::Connecting, self.next)?;
        self.comm = self.connect(listener)?;
        let start = self.settle()?;
        if self.spec.train.auto_micro_batch && !self.searched {
            self.find_micro_batch()?;
        }
        self.summary.begin(self.next, self.world());
        self.requested = self.next;
        self.claimed.clear();
        self.link.report(Report::Started(start))?;
        if !std::mem::replace(&mut self.announced, true) {
            if self.rank().0 == 0 {
                self.write_spec()?;
            }
            self.announce(&start)?;
        }
        Ok(())
    }

    fn connect(&mut self, listener: Option<&RingListener>) -> Result<Box<dyn Collective>, TrainError> {
        let Assignment { generation, rank, world, next, .. } = &self.assignment;
        let Some(listener) = listener.filter(|_| *world > 1) else {
            let solo = Solo::default();
            self.link.connected(solo.abort_handle(), solo.progress());
            return Ok(Box::new(solo));
        };
        let abort = RingAbort::new();
        // Waiting for one's neighbours is waiting as in a collective: who has not come this far keeps the others.
        let waiting = Progress::default();
        waiting.entered.store(1, Relaxed);
        self.link.connected(abort.clone(), waiting.into());
        // Two launches of one file have equal digests, generations and places.
        let run = format!("{} {}", self.link.run_id(), self.spec_digest);
        let membership =
            Membership { run: &run, generation: *generation, rank: *rank, world: *world as usize, next };
        let deadline = Instant::now() + RING_PATIENCE;
        let ring = Ring::connect(listener, &membership, deadline, &abort)?;
        self.link.connected(ring.abort_handle(), ring.progress());
        let source = self.fabric.as_mut().map(|source| source.as_mut());
        let brings = Brings { computes: self.computes, source, deadline };
        Ok(collective::join(ring, self.spec.launch.collectives, brings)?)
    }

    /// Runs steps to the end of the run or of the generation; at the end of the run saves, evaluates and exports.
    fn run(&mut self) -> Result<Ended, TrainError> {
        if self.before.is_none() {
            self.before = Some(self.evaluate()?);
        }
        let total = Step(self.plan.total_steps());
        while self.next < total && !self.stopped {
            self.request_ahead(total)?;
            let step = self.next;
            let (done, verdict) = self.transaction(step)?;
            self.next = Step(step.0 + 1);
            self.gradients.verdict(self.trainables.layout())?;
            self.summary.book(&done);
            // A CPU compiles nothing, and a step that was tried again is none to compare with.
            let compares = self.computes == Computes::OnCard && done.retries == 0;
            let warm_up = compares.then(|| self.warm_up.add(done.times.total)).flatten();
            self.link.report(Report::Step(done))?;
            if let Some(line) = warm_up.filter(|_| self.rank().0 == 0) {
                self.link.report(Report::Note(line))?;
            }
            if self.summary.losses.len() == STEPS_SIGHTED {
                self.report_memory()?;
            }
            self.tell_features(step)?;
            self.obey(verdict.commands)?;
            if verdict.commands.regroup && !self.stopped {
                self.publish_all()?;
                return Ok(Ended::Regroup);
            }
        }
        self.publish_all()?;
        if self.saved != Some(self.next) {
            self.save()?;
        }
        let after = self.evaluate()?;
        // Before this run is among those that the prediction learns from.
        self.report_memory()?;
        self.export(after)?;
        self.link.at(Phase::Done, self.next);
        Ok(Ended::Done)
    }

    /// This worker's position in its generation.
    pub(super) fn rank(&self) -> Rank {
        self.assignment.rank
    }

    /// Ranks in its generation.
    pub(super) fn world(&self) -> u32 {
        self.assignment.world
    }

    /// Begins a phase: for heartbeats, and for memory peaks.
    pub(super) fn enter(&mut self, phase: Phase, step: Step) -> Result<(), TrainError> {
        self.link.at(phase, step);
        self.meter.enter(phase).map_err(|source| TrainError::DoesNotFit { step, source })
    }

    /// Does what all ranks have agreed was asked for, at this boundary.
    fn obey(&mut self, agreed: Commands) -> Result<(), TrainError> {
        if agreed.memory_reports > self.obeyed.memory_reports {
            self.report_memory()?;
        }
        let every = self.spec.train.checkpoint_every;
        let due = every > 0 && self.next.0.is_multiple_of(every);
        if due || agreed.hand_over || agreed.checkpoints > self.obeyed.checkpoints {
            self.save()?;
        }
        self.obeyed = agreed;
        self.stopped |= agreed.stop;
        if agreed.pause && !agreed.stop && !agreed.regroup {
            self.link.at(Phase::Paused, self.next);
            self.link.wait_while_paused()?;
        }
        Ok(())
    }
}
