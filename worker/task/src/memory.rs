//! What a rank of a run will hold and compute, as far as its task has to say it: before launch, from sizes
//! alone.

use coxswain_nn::{
    kernels::{flat::SLACK, sizes::Account},
    params::TrainableLayout,
    rules,
    sharded::Cut,
};
use coxswain_proto::{
    memory::Category,
    run_spec::{Collectives, Offload, ReduceDtype, RunSpec},
};
use serde::Serialize;

use crate::{
    Pass, TaskError,
    dry_run::{Flops, PassCost},
};

/// Bytes that a ring keeps to receive into.
pub const RECEIVE_BYTES: u64 = 128 << 10;

/// A worker without model and data: runtime, telemetry, connections, metadata. Measured: 1.8 to 2.0 MiB.
pub const PROCESS: u64 = 1900 << 10;
/// What the library of products has on a GPU beside the matrices: as much as PyTorch gives it on Hopper.
pub const PRODUCTS: u64 = 32 << 20;
/// A CUDA context with its libraries' modules, and the unused ends of the allocator's pages.
const CONTEXT: u64 = 768 << 20;
/// Bytes of [`CONTEXT`] that the context takes alone, which a driver shows beside what the allocator
/// reserves: a guess, no GPU was at hand.
const BARE_CONTEXT: u64 = 512 << 20;
/// What a driver shows of a process on a GPU beside what its allocator reserves.
pub const BESIDE_RESERVED: u64 = BARE_CONTEXT + PRODUCTS;
/// A GPU without model and data.
pub const GPU: u64 = CONTEXT + PRODUCTS;
/// What NCCL has on each GPU of a run with several: of each of 24 channels, the buffers of one peer in a ring
/// and one in a tree to receive from, 4 MiB for long messages (`NCCL_BUFFSIZE`) and 5.2 for short ones. From
/// its defaults; no two GPUs were at hand.
const NCCL: u64 = 24 * 2 * (92 << 20) / 10;
/// Bytes of the second-level cache that each compute thread's packing buffer is as large as.
const THREAD: u64 = 1 << 20;

/// What a communicator takes of a GPU.
pub fn communicator(spec: &RunSpec, world: u64) -> u64 {
    if world > 1 && spec.launch.collectives != Collectives::Ring { NCCL } else { 0 }
}

/// Where a rank's memory is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// The host's: what the allocator counts. Weights whose type is the file's own stay in the page cache.
    Host {
        /// Compute threads of the rank.
        threads: u64,
    },
    /// A GPU's: everything is on it.
    Gpu,
}

impl Place {
    /// Where a pass is run to see what it holds there.
    pub fn account(self) -> Account {
        if self == Self::Gpu { Account::open_on_gpu() } else { Account::open() }
    }
}

/// One rank of a world.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ask {
    /// Samples of one forward pass.
    pub micro_batch: u64,
    /// Ranks.
    pub world: u64,
    /// Which of them.
    pub rank: u64,
    /// Where its memory is.
    pub place: Place,
}

impl Ask {
    /// The rank's chunk of what ranks share out.
    pub fn cut(self) -> Cut {
        Cut { rank: self.rank as usize, world: self.world.max(1) as usize }
    }
}

/// What one rank will hold at its worst moment, by category, and what a micro-batch computes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Prediction {
    by: [u64; Category::ALL.len()],
    /// Peak of activations in the forward pass.
    pub forward: u64,
    /// What of it the backward pass needs.
    pub kept: u64,
    /// Peak of activations in the backward pass.
    pub backward: u64,
    /// Products of a micro-batch.
    pub flops: Flops,
}

impl Prediction {
    /// With what a pass takes; `beside(stage)` bytes more are held in each stage. Booking them is left to the
    /// task.
    pub fn with_pass(self, pass: &PassCost, beside: impl Fn(&str) -> u64) -> Self {
        let [forward, backward] =
            [Pass::Forward, Pass::Backward].map(|direction| pass.peak(direction, &beside));
        Self { forward, kept: pass.kept, backward, flops: pass.flops, ..self }
    }

    /// What the engine itself holds on a rank for what trains, whatever the task: everything but frozen
    /// weights, activations and input.
    pub fn of_engine(spec: &RunSpec, layout: &TrainableLayout, ask: Ask) -> Self {
        let (mut prediction, trainables) = (Self::default(), layout.len() as u64);
        let on_gpu = ask.place == Place::Gpu;
        // Buffers on a GPU have room behind their last element.
        let room = if on_gpu { 4 * SLACK as u64 } else { 0 };
        prediction.set(Category::Trainables, 4 * trainables + room);
        prediction.set(Category::Gradients, 4 * trainables + room);
        if !(on_gpu && spec.memory.offload == Offload::Optimizer) {
            let [state, replica] = shards(spec, layout, room, ask);
            prediction.set(Category::OptimizerShard, state);
            prediction.set(Category::Replica, replica);
        }
        let receiving = if ask.world > 1 && !on_gpu { RECEIVE_BYTES } else { 0 };
        let narrowed = ask.world > 1 && spec.optimizer.reduce_dtype == ReduceDtype::Bfloat16;
        let travelling = if narrowed { 2 * trainables + room / 2 } else { 0 };
        prediction.set(Category::CollectiveBuffers, receiving + travelling);
        prediction.set(
            Category::Framework,
            match ask.place {
                Place::Gpu => GPU + communicator(spec, ask.world),
                Place::Host { threads } => PROCESS + threads * THREAD,
            },
        );
        prediction
    }

    /// What of the engine's own is in host memory beside a GPU.
    pub fn of_engine_beside_gpu(spec: &RunSpec, layout: &TrainableLayout, ask: Ask) -> u64 {
        let is_there = spec.memory.offload == Offload::Optimizer;
        if is_there { shards(spec, layout, 0, ask).iter().sum() } else { 0 }
    }

    /// Bytes of a category.
    pub fn of(&self, category: Category) -> u64 {
        self.by[category as usize]
    }

    /// Sets the bytes of a category.
    pub fn set(&mut self, category: Category, bytes: u64) {
        self.by[category as usize] = bytes;
    }

    /// Everything together.
    pub fn peak(&self) -> u64 {
        self.by.iter().sum()
    }

    /// What is there whatever the micro-batch.
    pub fn fixed(&self) -> u64 {
        self.peak() - self.of(Category::Activations) - self.of(Category::Input)
    }
}

/// This rank's part of the optimizer's state, and its copy of another rank's, with `room` bytes behind the
/// elements of each buffer.
fn shards(spec: &RunSpec, layout: &TrainableLayout, room: u64, ask: Ask) -> [u64; 2] {
    let rule = rules::rule_of::<Vec<f32>>(&spec.optimizer);
    let part = rule.grain().cuts(layout, ask.world.max(1) as usize).part(ask.rank as usize);
    let buffers = (rule.state().len() + usize::from(spec.optimizer.ema_decay.is_some())) as u64;
    let state = rules::state_bytes(&spec.optimizer, layout, &part) + buffers * room;
    let replicated = ask.world > 1 && spec.faults.replica;
    [state, if replicated { 4 * part.len() as u64 + room + state } else { 0 }]
}

/// What a run's model is used for besides training.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Use {
    /// Held-out samples measured within a run, `eval.batch` at once: beside all that training keeps.
    Evaluation,
    /// Prompts answered side by side outside of a run, by `cox generate`: weights alone, no optimizer.
    Answers,
}

/// A setting, and what it would do to a rank's peak.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Suggestion {
    /// What it is.
    pub what: String,
    /// How to pull it: an override of the run file.
    pub setting: String,
    /// Bytes less at the peak; negative where it would take more.
    pub saves: i64,
    /// What it costs, or why it saves nothing.
    pub remark: String,
}

/// What is predicted about: a run, and the sizes of its model and data. Nothing of either has been loaded.
pub trait Subject {
    /// The run.
    fn spec(&self) -> &RunSpec;

    /// What trains, and what has to be brought beside it: sizes of tensors by name. Adapters may have other
    /// names than in a checkpoint.
    fn layout(&self) -> &TrainableLayout;

    /// Names the model: what is learned from runs of one says nothing about another.
    fn model(&self) -> String;

    /// Predicts one rank.
    fn predict(&self, ask: Ask) -> Prediction;

    /// Predicts one rank while `ask.micro_batch` samples at once are used otherwise than in training; none
    /// where the task does not predict that.
    fn predict_use(&self, _using: Use, _ask: Ask) -> Option<Prediction> {
        None
    }

    /// What is held in host memory beside a GPU.
    fn beside_gpu(&self, ask: Ask) -> u64;

    /// What the allocator of a GPU of so much memory reserves, in whole pages; none where the task does not
    /// predict that.
    fn reserved(&self, _ask: Ask, _gpu: u64) -> Option<u64> {
        None
    }

    /// Every setting that is not yet as frugal as it can be.
    fn suggestions(&self, ask: Ask) -> Vec<Suggestion>;

    /// For people: what is frozen, what trains, how large a sample is. Label and text of a line each.
    fn describe(&self) -> Vec<(&'static str, String)>;

    /// In a few words, how precise activations are, where it is not the default.
    fn precision(&self) -> Option<&'static str> {
        None
    }

    /// The run and its sizes for programs, as JSON.
    fn to_json(&self) -> serde_json::Value;

    /// Samples of an epoch; none where sizes alone do not tell.
    fn epoch_len(&self) -> Option<u64> {
        None
    }

    /// This model and data under changed settings.
    fn changed(&self, change: &dyn Fn(&mut RunSpec)) -> Result<Box<dyn Subject>, TaskError>;
}
