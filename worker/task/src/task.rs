//! Tasks by name.

use std::{
    path::{Path, PathBuf},
    sync::Arc,
};

use coxswain_data::{DataError, Role, preview::Preview};
use coxswain_nn::{files::StoredTensor, kernels::Tape, params::Group};
use coxswain_proto::{config::TaskSchema, run_spec::RunSpec};

use crate::{
    Assembly, CheckpointSummary, ConvertJob, ForwardJob, GenerateJob, Losses, RandomJob, Reply, Responder,
    Samples, StarterFile, StarterJob, TaskError, Width, memory::Subject,
};

/// Where a run multiplies in float16: on a GPU alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Float16 {
    /// The key that says so.
    pub key: &'static str,
    /// Whether gradients pass such products, so that the loss has to be scaled.
    pub backward: bool,
}

impl Float16 {
    /// Why a run that does so does not begin on a CPU.
    pub fn refused_on_cpu(&self) -> String {
        format!(
            "{}: float16 is for GPUs only, but this run uses a CPU; use bfloat16 (same memory) or \
             float32, or set launch.device: cuda",
            self.key
        )
    }
}

/// Something that can be trained.
pub trait Task: Send + Sync {
    /// As `task.type` of a run file names it.
    fn name(&self) -> &'static str {
        self.schema().name
    }

    /// Keys in run files.
    fn schema(&self) -> TaskSchema;

    /// Opens the run's data: all metadata is read and checked against the run.
    fn open(&self, spec: &RunSpec) -> Result<Arc<dyn Samples>, DataError>;

    /// All that [`Task::open`] refuses of the data's rows and files, where that would name the first alone:
    /// for `cox data check`. Empty if there is nothing, or if the task has no more to say than `open`.
    fn faults(&self, _spec: &RunSpec) -> Vec<DataError> {
        Vec::new()
    }

    /// Sizes of what the run names, from configuration and headers alone.
    fn sizes(&self, spec: &RunSpec) -> Result<Box<dyn Subject>, TaskError>;

    /// The task's own settings of this run that would take less memory, most effective first, for people.
    fn frugal_settings(&self, _spec: &RunSpec) -> Vec<String> {
        Vec::new()
    }

    /// Keys of the section `data` that name features of a data set: for each the role of its feature, and
    /// that one's usual name.
    fn data_keys(&self) -> &'static [(&'static str, Role, &'static str)] {
        &[]
    }

    /// A run file, with comments, for the data at a place: what a user begins with. Nothing if such data is
    /// none of this task's.
    fn starter(&self, _job: &StarterJob<'_>) -> Option<Result<StarterFile, DataError>> {
        None
    }

    /// Makes the directory of a policy for the job's data in `out`, which must not exist, if the job's model
    /// is only the base of one; nothing if it is none of this task's.
    fn make_policy(&self, _job: &StarterJob<'_>, _out: &Path) -> Option<Result<(), DataError>> {
        None
    }

    /// An episode of a run's data as training sees it, with so many of its frames; nothing if samples of this
    /// task are of no episodes.
    fn preview(&self, _spec: &RunSpec, _episode: u64, _frames: usize) -> Option<Result<Preview, DataError>> {
        None
    }

    /// Writes sample `index` of a run's data, as training sees it, to `out`.
    fn write_sample(&self, spec: &RunSpec, index: u64, out: &Path) -> Result<(), DataError>;

    /// Makes a checkpoint of random weights; nothing if the model is none of this task's.
    fn make_checkpoint(&self, _job: &RandomJob<'_>) -> Option<Result<CheckpointSummary, TaskError>> {
        None
    }

    /// The files of weights in a format of the task's own that `train.init_from` may name; empty if there are
    /// none at `path`. Checkpoints are the engine's.
    fn weight_files(&self, _path: &Path) -> Vec<PathBuf> {
        Vec::new()
    }

    /// The tensors of [`Task::weight_files`] under the names that this run's layout has for them.
    fn read_weights(&self, _spec: &RunSpec, _path: &Path) -> Result<Vec<StoredTensor>, TaskError> {
        Ok(Vec::new())
    }

    /// Settings that keep weights of these groups of the run `there` from meaning in the run `here` what they
    /// meant there, though every shape fits; a line each, naming the key.
    fn other_meaning(&self, _here: &RunSpec, _there: &RunSpec, _groups: &[Group]) -> Vec<String> {
        Vec::new()
    }

    /// Where this run multiplies in float16; none if it does not.
    fn float16(&self, _spec: &RunSpec) -> Option<Float16> {
        None
    }

    /// The group that stays as `train.init_from` brings it, and is of no use as it is drawn; none if there is
    /// no such group in this run.
    fn brought(&self, _spec: &RunSpec) -> Option<Group> {
        None
    }

    /// Names the content of the run's pretrained model, wherever it lies: `train.base_digest`. Nothing if the
    /// task has none.
    fn base_digest(&self, _spec: &RunSpec) -> Option<Result<String, TaskError>> {
        None
    }

    /// The group that a tensor of this name is of, where the name does not begin with the group's: of weights
    /// for which a run has no place.
    fn group_of(&self, _tensor: &str) -> Option<Group> {
        None
    }

    /// What to try with the results of a run in `RUN_DIR`.
    fn next_commands(&self) -> [&'static str; 2] {
        ["cox eval RUN_DIR", "cox export RUN_DIR"]
    }

    /// The losses that [`TaskOn::few_steps`] had on the CPU of the machine it was written on; empty if it has
    /// none.
    fn known_losses(&self) -> &'static [f64] {
        &[]
    }
}

/// A task on one kind of device.
pub trait TaskOn<B: Tape<Base = B>>: Task {
    /// Reads the model and registers everything that trains, for this data. Where first values are only
    /// drawn, `initial` may be empty: they may be many, and not every caller uses them.
    fn load(&self, spec: &RunSpec, data: &dyn Samples, device: &B::Device) -> Result<Assembly<B>, TaskError>;

    /// Loads the task with all first values.
    fn build(
        &self,
        spec: &RunSpec,
        data: &dyn Samples,
        device: &B::Device,
    ) -> Result<Assembly<B>, TaskError> {
        let mut built = self.load(spec, data, device)?;
        if built.initial.is_empty() {
            built.initial = built.objective.initial_values(&built.layout)?;
        }
        Ok(built)
    }

    /// What a run of this task has left in `dir`, ready to answer requests; nothing if it answers none.
    fn responder(
        &self,
        _spec: &RunSpec,
        _dir: &Path,
        _device: &B::Device,
    ) -> Option<Result<Box<dyn Responder>, TaskError>> {
        None
    }

    /// One forward pass of the task's model; nothing if the model is none of this task's.
    fn forward(&self, _job: &ForwardJob<'_>, _device: &B::Device) -> Option<Result<(), TaskError>> {
        None
    }

    /// Answers to prompts, in their order; nothing if what this task trains writes no text.
    fn generate(&self, _job: &GenerateJob<'_>, _device: &B::Device) -> Option<Result<Vec<Reply>, TaskError>> {
        None
    }

    /// Makes files of files, each whole or not at all, and says what it has written for each, in their order;
    /// nothing if what this task trains makes no files.
    fn convert(
        &self,
        _job: &ConvertJob<'_>,
        _device: &B::Device,
    ) -> Option<Result<Vec<Vec<PathBuf>>, TaskError>> {
        None
    }

    /// Trains a small instance, which it brings along, for a few steps; nothing if it has none.
    fn few_steps(&self, _device: &B::Device, _width: Width) -> Option<Losses> {
        None
    }
}
