//! Trains a task: what a session runs on its trainer thread.

use std::{
    path::{Path, PathBuf},
    sync::Arc,
};

use coxswain_proto::{
    document,
    ids::{Bytes, Step},
    plan::Plan,
    run_spec::RunSpec,
};

use coxswain_nn::{
    kernels::{Tape, flat::FlatOn, pool},
    params::{FlatGrads, Trainables},
};
use coxswain_task::{Assembly, Samples, TaskOn};

use super::checkpoint::Store;
use super::{
    Facts, Features, Feed, GradientWatch, InjectedFaults, Learner, Members, Results, RunStats, Skips,
    TrainError, Training, ValidationState, Witness, Workbench, advice, check_base, init_from, recompute,
};
use crate::{
    collective::{Computes, RingListener, TransportSource},
    device::computing::begin_computing,
    feeder::{Prefetcher, note},
    health,
    link::{Commands, Link, LinkError, Phase, spans},
    memory::{self, Gauge, Meter, OutOfMemory, prediction::outcome::MemorySnapshots},
    trainer::{DataSetFacts, Trainer, TrainerFailure, TrainerOutcome},
    zero::Rates,
};

/// Threads that read samples, unless `data.threads` says otherwise: as many as this rank computes with, since
/// on a GPU those have little to do, up to where parquet windows that are decoded twice cost more than
/// another thread brings.
const MAX_DATA_THREADS: usize = 8;

/// What a trainer is given besides the run spec.
pub struct TrainerOptions<B: Tape<Base = B>> {
    /// Where tensors live.
    pub device: B::Device,
    /// Accepts this rank's ring neighbour; none for a world of one.
    pub listener: Option<RingListener>,
}

/// Trains a task on backend `B`.
pub struct TaskTrainer<B: Tape<Base = B>> {
    task: &'static dyn TaskOn<B>,
    options: TrainerOptions<B>,
    computes: Computes,
    transport: Option<Box<dyn TransportSource>>,
    gauge: Option<Box<dyn Gauge>>,
    records: Option<PathBuf>,
    samples: Option<Arc<dyn Samples>>,
}

impl<B: Tape<Base = B>> TaskTrainer<B> {
    /// A trainer that has read nothing yet.
    pub fn new(task: &'static dyn TaskOn<B>, options: TrainerOptions<B>) -> Self {
        Self {
            task,
            options,
            computes: Computes::default(),
            transport: None,
            gauge: None,
            records: None,
            samples: None,
        }
    }

    /// Computes on a GPU: large buffers may take another way than the ring, and it is the GPU's memory that
    /// runs out.
    pub fn on_gpu(self, transport: Box<dyn TransportSource>, gauge: Box<dyn Gauge>) -> Self {
        Self { transport: Some(transport), gauge: Some(gauge), computes: Computes::OnGpu, ..self }
    }

    /// Computes on the CPU only because there is no GPU.
    pub fn for_want_of_gpu(self) -> Self {
        Self { computes: Computes::OnCpuForWantOfGpu, ..self }
    }

    /// Lays the run's memory beside what earlier runs on record below `dir` teach, and adds it to them.
    pub fn remembering(self, dir: Option<PathBuf>) -> Self {
        Self { records: dir, ..self }
    }

    fn samples(&mut self, spec: &RunSpec) -> Result<Arc<dyn Samples>, TrainError> {
        if let Some(samples) = &self.samples {
            return Ok(samples.clone());
        }
        self.task.schema().check(spec)?;
        let samples = self.task.open(spec)?;
        self.samples = Some(samples.clone());
        Ok(samples)
    }

    /// Keeps records of whatever memory the model will be in. Called on the trainer thread, before anything
    /// is on a device.
    fn meter(&mut self, spec: &RunSpec) -> Meter {
        let meter = Meter::new(Phase::Loading, spec.memory.capacity.map(Bytes));
        let Some(gauge) = self.gauge.take() else { return meter };
        memory::listen();
        let device = self.options.device.clone();
        memory::after_refusal(move || {
            if let Err(error) = B::sync(&device) {
                tracing::debug!(?error, "cannot synchronise the device after a refused allocation");
            }
            B::memory_cleanup(&device);
        });
        meter.on_gpu(gauge)
    }

    /// Loads the model, as far as memory goes.
    fn load(&self, spec: &RunSpec, samples: &dyn Samples, meter: &Meter) -> Result<Assembly<B>, TrainError> {
        let (device, before) = (&self.options.device, meter.in_use());
        let loaded = memory::guarded(|| {
            let loaded = self.task.build(spec, samples, device);
            // A device may not have begun with what it was told; that it cannot shows now.
            (loaded, B::sync(device))
        });
        match loaded {
            Ok((loaded, settled)) => {
                settled.map_err(|error| TrainError::Device { step: Step(0), detail: error.to_string() })?;
                Ok(loaded?)
            }
            Err(overrun) => {
                let found = meter.out_of_memory(Phase::Loading, overrun.in_use, before.0);
                Err(self.too_large(spec, OutOfMemory { device: overrun.device, ..found }))
            }
        }
    }

    /// What loads and does not fit has nothing to make smaller.
    fn too_large(&self, spec: &RunSpec, source: OutOfMemory) -> TrainError {
        let advice = advice(self.task, spec);
        TrainError::Exhausted { step: Step(0), source: source.into(), advice }
    }

    /// Loads the model while the world gathers.
    pub(super) fn prepare<'a>(
        &mut self,
        spec: &'a RunSpec,
        mut link: Box<dyn Link + Send>,
    ) -> Result<Training<'a, B>, TrainError> {
        link.at(Phase::Loading, Step(0));
        // Not later: the meter counts what is allocated.
        let computed = recompute::resolve_auto(self.task, spec, self.gauge.as_deref())?;
        let mut meter = self.meter(spec);
        if !B::ON_HOST {
            // Not earlier: what a device takes before its memory is counted would be nobody's.
            health::known::compute::<B>(&self.options.device)?;
        }
        let samples = self.samples(spec)?;
        samples.pin(Path::new(&spec.run.output_dir))?;
        let plan = Plan::new(&spec.train, samples.epoch_len())?;
        let mut snapshots = MemorySnapshots { opened: memory::in_use(), ..MemorySnapshots::default() };
        let Assembly { objective, layout, mut initial } = self.load(&computed, &*samples, &meter)?;
        if !B::ON_HOST && layout.len() > u32::MAX as usize {
            return Err(TrainError::TooManyTrainables(layout.len()));
        }
        init_from::bring(self.task, spec, &layout, &mut initial)?;
        snapshots.loaded = memory::in_use();
        let features = Features::open(spec, &*samples, &*objective, &self.options.device, meter.gpu())?;
        meter.enter(Phase::Connecting).map_err(|source| self.too_large(spec, source))?;
        let output_dir = PathBuf::from(&spec.run.output_dir);
        note::open();
        let threads = spec.data.threads.unwrap_or_else(|| pool::join().min(MAX_DATA_THREADS));
        let mut prefetch =
            Prefetcher::start(samples.clone(), samples.order(spec.run.seed), spec.data.prefetch, threads)?;
        prefetch.keep_ahead(features.as_ref().map_or(0, Features::encoder_batch));
        let witness = Witness::from_environment(&output_dir);
        let peak = Rates::from(spec.learning_rates());
        let run = Facts {
            store: Store::new(&output_dir),
            spec,
            spec_digest: document::digest(spec),
            plan,
            task: self.task,
            recompute: computed.train.recompute,
            output_dir,
            starts: Vec::new(),
            records: self.records.clone(),
        };
        let learner = Learner {
            rates: run.rates(&*objective, peak.clone(), plan.total_steps()),
            grads: FlatGrads::at(&B::Flat::place(&self.options.device), layout.len()),
            gradients: GradientWatch::new(&layout, &peak),
            trainables: Trainables::new(layout, initial, &self.options.device),
            objective,
            held: None,
            coming: None,
            loss_scale: match self.task.float16(spec) {
                Some(float16) if float16.backward => spec.optimizer.loss_scale.filled(),
                _ => spec.optimizer.loss_scale,
            },
        };
        let micro_batch = match spec.train.auto_micro_batch {
            true => spec.train.global_batch,
            false => spec.train.micro_batch,
        };
        let (requested, claimed) = (Step(0), Default::default());
        let bench = Workbench {
            run,
            members: Members::alone(link, self.computes, self.transport.take()),
            learner,
            feed: Feed {
                samples,
                prefetch,
                micro_batch,
                searched: false,
                asks_for_less: memory::killed::predecessor_was(),
                requested,
                claimed,
            },
            features,
            stats: RunStats {
                meter,
                snapshots,
                summary: Default::default(),
                warm_up: Default::default(),
                planned_before: None,
                witness,
                injected: InjectedFaults::from_environment(),
            },
            skips: Skips::default(),
            next: Step(0),
        };
        let (results, looking) = (Results::default(), ValidationState::default());
        Ok(Training { bench, results, looking, obeyed: Commands::default() })
    }
}

impl<B: Tape<Base = B>> Trainer for TaskTrainer<B>
where
    B::Device: Send,
{
    fn open(&mut self, spec: &RunSpec) -> Result<DataSetFacts, TrainerFailure> {
        if B::ON_HOST {
            // What it computes with is what training computes with, so that no other threads keep scratch.
            begin_computing(spec);
            let sound = health::known::compute::<B>(&self.options.device).map_err(TrainError::from);
            sound.map_err(|error| failure(&error, Phase::Joining, Step(0)))?;
        }
        let dataset = self.samples(spec).and_then(|samples| check_base(self.task, spec).map(|()| samples));
        let dataset = dataset.map_err(|error| failure(&error, Phase::Loading, Step(0)))?;
        Ok(DataSetFacts {
            training_samples: dataset.epoch_len(),
            fingerprint: dataset.fingerprint().to_string(),
            order_key: dataset.fingerprint().word(),
            sets: dataset.shares().to_vec(),
        })
    }

    fn train(&mut self, spec: &RunSpec, link: Box<dyn Link + Send>) -> TrainerOutcome {
        begin_computing(spec);
        let _spans = spans::run(link.run_id());
        let mut training = match self.prepare(spec, link) {
            Ok(training) => training,
            Err(error) => return ended(&error, failure(&error, Phase::Loading, Step(0))),
        };
        match training.train(self.options.listener.as_ref()) {
            Ok(()) => TrainerOutcome::Done,
            Err(error) => {
                let bench = training.bench;
                let phase = match &error {
                    // It is known only after the vote.
                    TrainError::Exhausted { source, .. } => source.phase,
                    _ => bench.stats.meter.phase(),
                };
                let mut failure = failure(&error, phase, bench.next);
                failure.memory_in_use = bench.stats.meter.in_use();
                failure.positions =
                    bench.feed.claimed.front().map_or(Vec::new(), |claim| claim.positions.clone());
                ended(&error, failure)
            }
        }
    }
}

/// The run is over for this rank, or it has failed itself.
fn ended(error: &TrainError, failure: TrainerFailure) -> TrainerOutcome {
    match error {
        TrainError::Link(LinkError::Over(reason)) => TrainerOutcome::Aborted(reason.clone()),
        _ => TrainerOutcome::Failed(failure),
    }
}

fn failure(error: &TrainError, phase: Phase, step: Step) -> TrainerFailure {
    TrainerFailure::new(error.kind(), phase, step, error.to_string())
}
