//! What trains: loss and gradients of a batch, its evaluation, and what is left when it is done.

use std::{path::Path, sync::Arc};

use coxswain_nn::{
    kernels::Tape,
    params::{GradientSums, ParamSpec, TrainableLayout, Trainables},
    sharded::{Cut, HeldParts, Peers},
};

use crate::{Batch, Example, Extractor, Samples, StageClock, TaskError};

/// The loss of one micro-batch.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct MicroLoss {
    /// Sum over valid elements.
    pub loss_sum: f64,
    /// Valid elements.
    pub valid: f64,
}

/// What was found on held-out samples. Adds up over batches and ranks; a measure is its sum over the count.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Evaluation {
    /// What the sums are divided by.
    pub count: f64,
    /// One for each name of [`Objective::measures`].
    pub sums: Vec<f64>,
    /// One for each name of [`Objective::parts`].
    pub parts: Vec<PartSum>,
}

/// A sum over a part of what [`Evaluation::count`] counts.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct PartSum {
    /// What the sum is divided by.
    pub count: f64,
    /// The sum.
    pub sum: f64,
}

/// One row of the start-up table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Module {
    /// A part of the model, or a group of trainables in it.
    pub module: String,
    /// Tensors.
    pub tensors: usize,
    /// Elements.
    pub parameters: usize,
    /// Whether it trains.
    pub trains: bool,
    /// How it is kept: `float32`, `bfloat16`, or both.
    pub dtype: &'static str,
    /// Bytes on the device, without gradients and optimizer state; of what is streamed as many as are there
    /// at once.
    pub bytes: u64,
}

impl Module {
    /// The row of these parameters, which are kept in float32.
    pub fn of_params(module: String, trains: bool, params: &[&ParamSpec]) -> Self {
        let parameters: usize = params.iter().map(|param| param.len()).sum();
        let (tensors, bytes) = (params.len(), 4 * parameters as u64);
        Self { module, tensors, parameters, trains, dtype: "float32", bytes }
    }
}

/// A file that a run leaves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Artifact {
    /// Path below the run's directory.
    pub path: &'static str,
    /// What it is, for the manifest.
    pub what: &'static str,
}

/// An objective, the layout of everything that trains in it, and the values it starts from; both are the same
/// on every rank.
pub struct Assembly<B: Tape<Base = B>> {
    /// What trains.
    pub objective: Box<dyn Objective<B>>,
    /// Trainables.
    pub layout: TrainableLayout,
    /// First values.
    pub initial: Vec<f32>,
}

/// Frozen weights, and what is computed with them and the trainables.
///
/// Losses are *sums* over valid elements, and so are gradients: the engine divides by the count of the global
/// batch. Random draws depend on the run's seed, the batch's step and each sample's index, on nothing else.
pub trait Objective<B: Tape<Base = B>> {
    /// Runs one micro-batch and adds the gradient of its loss sum to `grads`, which say what the loss is
    /// multiplied by where gradients may be small ([`GradientSums::scaled`]). On an error `grads` may hold a
    /// part of it: it is zeroed before the next attempt.
    fn forward_backward(
        &self,
        trainables: &Trainables<B>,
        batch: &dyn Batch,
        grads: &mut dyn GradientSums<B>,
        clock: &mut StageClock<'_>,
    ) -> Result<MicroLoss, TaskError>;

    /// The loss that [`Objective::forward_backward`] would have, from the same draws of noise, if nothing
    /// were dropped: what features are compared by.
    fn loss(&self, trainables: &Trainables<B>, batch: &dyn Batch) -> Result<MicroLoss, TaskError>;

    /// Names of what [`Objective::evaluate`] measures, errors of which less is better, the one that tells the
    /// best checkpoint first; empty if there is nothing to measure.
    fn measures(&self) -> &'static [&'static str];

    /// The measure of this name, from the mean of what was summed for it: that mean itself, unless the
    /// measure is a function of it.
    fn measure(&self, _name: &str, mean: f64) -> f64 {
        mean
    }

    /// Names of the parts by which it tells its measures, too: `mae/dim0`. Letters, digits, `_` and `/`; of
    /// more than [`MAX_PARTS`](coxswain_proto::limits::MAX_PARTS) the first are shown.
    fn parts(&self) -> Vec<String> {
        Vec::new()
    }

    /// Evaluates held-out samples; `batch` is never empty.
    fn evaluate(
        &self,
        trainables: &Trainables<B>,
        batch: &dyn Batch,
        samples: &dyn Samples,
    ) -> Result<Evaluation, TaskError>;

    /// These held-out samples beside what is predicted of them, for people; empty if there is nothing to
    /// show.
    fn examples(
        &self,
        _trainables: &Trainables<B>,
        _batch: &dyn Batch,
        _samples: &dyn Samples,
    ) -> Result<Vec<Example>, TaskError> {
        Ok(Vec::new())
    }

    /// Rows of the start-up table: frozen parts first, then what trains.
    fn modules(&self, layout: &TrainableLayout) -> Vec<Module>;

    /// What it started from, for the manifest of its results: a model's directory.
    fn base(&self) -> &str;

    /// What a run says of itself before its first step, where it is out of the ordinary; a line each.
    fn notes(&self) -> Vec<String> {
        Vec::new()
    }

    /// The values that trainables start from, once more.
    fn initial_values(&self, layout: &TrainableLayout) -> Result<Vec<f32>, TaskError>;

    /// Writes what a user takes away, each file whole or not at all, and says what it has written.
    fn export(
        &self,
        dir: &Path,
        layout: &TrainableLayout,
        values: &[f32],
    ) -> Result<Vec<Artifact>, TaskError>;

    /// Writes the pretrained model with what was trained of it merged in, to a directory that does not exist
    /// yet; nothing if there is nothing to merge.
    fn export_merged(
        &self,
        _dir: &Path,
        _layout: &TrainableLayout,
        _values: &[f32],
    ) -> Option<Result<(), TaskError>> {
        None
    }

    /// Writes a policy directory of LeRobot's, and says what the types in it have cost; nothing if this is no
    /// such policy.
    fn export_lerobot(
        &self,
        _dir: &Path,
        _layout: &TrainableLayout,
        _values: &[f32],
    ) -> Option<Result<String, TaskError>> {
        None
    }

    /// What of it may be kept; none if the run's cache is off, or nothing may.
    fn extractor(&self) -> Option<&dyn Extractor<B>> {
        None
    }

    /// Most bytes of frozen weights that are brought when they run (`memory.offload: layers`, `memory.shard:
    /// frozen`) that were in memory at once so far; what is held between runs not counted.
    fn most_streamed(&self) -> u64 {
        0
    }

    /// What this rank holds of frozen weights that ranks share out (`memory.shard: frozen`), for the others
    /// to ask for; none where every rank has all.
    fn held_parts(&self) -> Option<Arc<dyn HeldParts>> {
        None
    }

    /// From now on holds the part `cut` of them alone, read from the model's files, and asks `peers` for the
    /// others whenever a block runs. Before the first call everything is read from the files.
    fn share_out(&self, _cut: Cut, _peers: &Arc<dyn Peers>) -> Result<(), TaskError> {
        Ok(())
    }
}
