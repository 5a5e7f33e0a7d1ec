//! One memory: categories, micro-batches, verdict.

use coxswain_nn::{kernels::precision, params::TrainableLayout};
use coxswain_proto::run_spec::{Recompute, RunSpec};
use coxswain_worker::memory::{
    Category,
    prediction::{
        Ask, Flops, Place, Prediction, Subject, Suggestion,
        fit::{self, Fit, FitVerdict, Split},
        recompute::RecomputeChoice,
        recorded::RecordedRuns,
    },
};
use serde::Serialize;
use serde_json::json;

use super::{capacity::Memory, duration::StepTime};
use crate::{exit::CliError, tasks::tasks};

/// Micro-batches beyond the maximum that a table still shows, as too large.
const SHOWN_BEYOND: usize = 1;

/// A run in one world.
pub struct Question {
    /// What is predicted about.
    pub subject: Box<dyn Subject>,
    /// Ranks.
    pub world: u64,
    /// Compute threads of a rank, where its memory is the host's.
    pub threads: u64,
}

/// What one memory means for a run.
#[derive(Clone, Debug, Serialize)]
pub struct Outlook {
    /// The memory.
    pub memory: Memory,
    /// `analytic`, or `calibrated` by records of this machine and model.
    pub basis: Basis,
    /// What is recomputed: the run file's own mode, or the one that fits here where that is `auto`.
    pub recompute: Recompute,
    /// The run file's own micro-batch.
    pub current: Split,
    /// What that means here.
    pub verdict: FitVerdict,
    /// Bytes by category at that micro-batch.
    pub categories: Vec<(Category, u64)>,
    /// On a GPU: bytes that are held in host memory beside it.
    pub beside_gpu: u64,
    /// On a GPU: what its allocator reserves at that micro-batch, in whole pages; none where the task does
    /// not predict it.
    pub reserved: Option<u64>,
    /// Bytes of the activations that the forward pass keeps for the backward pass.
    pub activations_kept: u64,
    /// How long a step takes; none where nothing is known of it.
    pub step: Option<StepTime>,
    /// What fits.
    pub fit: Fit,
    /// Powers of two around what fits.
    pub options: Vec<Choice>,
}

/// One possible micro-batch.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Choice {
    /// Micro-batch, accumulation and peak.
    #[serde(flatten)]
    pub split: Split,
    /// What it means here.
    pub verdict: FitVerdict,
}

/// What a prediction rests on.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Basis {
    /// Sizes alone.
    Analytic,
    /// Sizes, corrected by this many runs of this model on this machine.
    Calibrated {
        /// Records learned from.
        runs: usize,
    },
}

impl Basis {
    /// How far off such a prediction may be, in percent of the peak (`integration-tests/bench/MEMORY.md`).
    pub fn tolerance_percent(self) -> u64 {
        match self {
            Self::Analytic => 10,
            Self::Calibrated { .. } => 5,
        }
    }
}

impl Outlook {
    /// The recommended micro-batch, or the largest where none is; nothing if not even one sample fits.
    pub fn best(&self) -> Option<Split> {
        let best = self.fit.recommended.or(self.fit.maximum)?;
        self.options.iter().map(|option| option.split).find(|split| split.micro_batch == best)
    }
}

impl Question {
    /// The run that a file describes, on `world` ranks of which `local` share this machine.
    pub fn new(spec: &RunSpec, world: u64, local: u64) -> Result<Self, CliError> {
        precision::allow_bfloat16_matmul(spec.launch.bfloat16_matmul);
        Ok(Self { subject: sizes(spec)?, world, threads: threads(spec, local) })
    }

    /// What trains.
    pub fn layout(&self) -> &TrainableLayout {
        self.subject.layout()
    }

    /// Samples of a step that a rank has.
    pub fn samples(&self) -> u64 {
        fit::samples_of_a_rank(self.subject.spec().train.global_batch as u64, self.world)
    }

    /// The run file's micro-batch, as far as a rank has samples for it.
    pub fn micro_batch(&self) -> u64 {
        (self.subject.spec().train.micro_batch as u64).min(self.samples().max(1))
    }

    /// Steps of an epoch, where sizes tell its samples.
    pub fn steps_per_epoch(&self) -> Option<u64> {
        let batch = self.subject.spec().train.global_batch as u64;
        self.subject.epoch_len().map(|samples| samples.div_ceil(batch.max(1)))
    }

    /// Steps of the run, where they are known.
    pub fn steps(&self) -> Option<u64> {
        let train = &self.subject.spec().train;
        train.steps.or_else(|| train.epochs?.checked_mul(self.steps_per_epoch()?))
    }

    /// Multiplications and additions of a step, on all ranks together.
    pub fn flops(&self) -> Flops {
        self.subject
            .predict(self.ask_of_a_sample())
            .flops
            .times(self.subject.spec().train.global_batch as u64)
    }

    /// Operations are the same wherever it is.
    fn ask_of_a_sample(&self) -> Ask {
        Ask { micro_batch: 1, world: self.world, rank: 0, place: Place::Gpu }
    }

    fn flops_of_a_rank(&self) -> f64 {
        self.subject.predict(self.ask_of_a_sample()).flops.times(self.samples()).total() as f64
    }

    pub(super) fn place(&self, memory: &Memory) -> Place {
        if memory.is_gpu { Place::Gpu } else { Place::Host { threads: self.threads } }
    }

    fn ask(&self, memory: &Memory, micro_batch: u64) -> Ask {
        Ask { micro_batch, world: self.world, rank: 0, place: self.place(memory) }
    }

    /// Earlier runs of this model on this machine, for this memory. GPUs that are not here have none.
    fn recorded(&self, memory: &Memory) -> Option<RecordedRuns> {
        let dir = RecordedRuns::home().filter(|_| memory.is_here)?;
        Some(RecordedRuns::load(&dir, &*self.subject, self.place(memory)))
    }

    /// This run in the mode that `train.recompute: auto` takes in a memory; none where the run says its mode.
    fn in_its_mode(&self, memory: &Memory) -> Option<Self> {
        let spec = self.subject.spec();
        let task = tasks().of(spec).ok().filter(|_| spec.train.recompute == Recompute::Auto)?;
        let ask = self.ask(memory, self.micro_batch());
        let chosen = RecomputeChoice::find(task, &*self.subject, ask, memory.capacity())?;
        let subject = self.subject.changed(&|spec| spec.train.recompute = chosen.mode).ok()?;
        Some(Self { subject, ..*self })
    }

    /// Predicts the run in one memory.
    pub fn outlook(&self, memory: &Memory) -> Outlook {
        if let Some(chosen) = self.in_its_mode(memory) {
            return chosen.outlook(memory);
        }
        let recorded = self.recorded(memory);
        let now = self.subject.predict(self.ask(memory, self.micro_batch()));
        let calibration = recorded.as_ref().and_then(|recorded| recorded.calibration(&now));
        let peak_of = |prediction: &Prediction| match &calibration {
            Some(calibration) => calibration.peak(prediction),
            None => prediction.peak(),
        };
        let samples = self.samples();
        let peak = |micro_batch| peak_of(&self.subject.predict(self.ask(memory, micro_batch)));
        let beside = self.subject.beside_gpu(self.ask(memory, self.micro_batch()));
        let fit = Fit::find(memory.capacity(), samples, peak);
        let option = |micro_batch| {
            let split = fit::split(samples, micro_batch, peak(micro_batch));
            Choice { split, verdict: FitVerdict::judge(split.peak, memory.capacity()) }
        };
        let powers = std::iter::successors(Some(1u64), |power| Some(2 * power));
        let shown = fit.maximum.map_or(0, |maximum| maximum.ilog2() as usize + 1) + SHOWN_BEYOND;
        let within = powers.take(shown).take_while(|&power| power < 2 * samples.max(1));
        Outlook {
            memory: memory.clone(),
            basis: calibration.map_or(Basis::Analytic, |found| Basis::Calibrated { runs: found.records }),
            recompute: self.subject.spec().train.recompute,
            current: fit::split(samples, self.micro_batch(), peak_of(&now)),
            verdict: FitVerdict::judge(peak_of(&now), memory.capacity()),
            categories: Category::ALL.map(|category| (category, now.of(category))).into(),
            beside_gpu: if memory.is_gpu { beside } else { 0 },
            reserved: self
                .subject
                .reserved(self.ask(memory, self.micro_batch()), memory.total)
                .filter(|_| memory.is_gpu),
            activations_kept: now.kept,
            step: StepTime::find(self.flops_of_a_rank(), self.world, memory, recorded.as_ref()),
            fit,
            options: within.map(option).collect(),
        }
    }

    /// What each setting would save in one memory.
    pub fn suggestions(&self, memory: &Memory) -> Vec<Suggestion> {
        if let Some(chosen) = self.in_its_mode(memory) {
            return chosen.suggestions(memory);
        }
        let found = self.subject.suggestions(self.ask(memory, self.micro_batch()));
        if memory.multiplies_bfloat16() {
            return found;
        }
        let spec = json!(self.subject.spec());
        let rounded = ["model", "extractor"].into_iter().find(|of| spec[of]["weights_dtype"] == "bfloat16");
        let instead = rounded.map(|of| Suggestion {
            what: "matmuls on tensor cores".into(),
            setting: format!("{of}.weights_dtype=float16"),
            saves: 0,
            remark: "this GPU has no bfloat16 matmuls; float16 needs the same memory, and loss scaling"
                .into(),
        });
        instead.into_iter().chain(found.into_iter().map(in_float16)).collect()
    }
}

/// A suggestion of narrower weights, for a GPU that multiplies no bfloat16: as many bytes.
fn in_float16(suggestion: Suggestion) -> Suggestion {
    match suggestion.setting.strip_suffix("weights_dtype=bfloat16") {
        Some(section) => Suggestion {
            what: "frozen weights in fp16".into(),
            setting: format!("{section}weights_dtype=float16"),
            remark: "rounds the frozen weights, and scales the loss".into(),
            ..suggestion
        },
        None => suggestion,
    }
}

/// Sizes of what a run names.
fn sizes(spec: &RunSpec) -> Result<Box<dyn Subject>, CliError> {
    let task = tasks().of(spec).map_err(CliError::bad_input)?;
    task.sizes(spec).map_err(CliError::bad_input)
}

/// Compute threads of one rank of `local` on this machine.
fn threads(spec: &RunSpec, local: u64) -> u64 {
    let cores = std::thread::available_parallelism().map_or(1, usize::from) as u64;
    spec.launch.threads_per_worker.map_or((cores / local.max(1)).max(1), |threads| threads as u64)
}
