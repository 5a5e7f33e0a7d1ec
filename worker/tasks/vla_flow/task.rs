//! Implements `Task` and `TaskOn` for vla_flow.

use crate::{pretrained, vla_flow::config::VlaSettings};
use std::{
    path::{Path, PathBuf},
    sync::Arc,
};

use coxswain_data::{
    DataError, Role,
    place::hub::{self, Repository},
    preview::Preview,
};
use coxswain_models::{
    Shelf, Shelves,
    pretrained::{
        job,
        synthetic::{self, SyntheticCheckpoint},
    },
};
use coxswain_nn::{
    dtypes::{ActivationsDtype, FrozenDtype, WeightsDtype},
    files::StoredTensor,
    kernels::Tape,
    params::{Group, Init, ParamSpec},
};
use coxswain_policies::{
    PassJob, PolicyFiles, PolicyKind,
    directory::{PolicyDirectory, is_policy},
    run_pass,
};
use coxswain_proto::{
    config::TaskSchema,
    run_spec::{Offload, RunSpec, Shard},
};
use coxswain_task::{
    Assembly, CheckpointSummary, Float16, ForwardJob, Losses, RandomJob, Responder, Samples, StarterFile,
    StarterJob, Task, TaskError, TaskOn, Width, memory::Subject,
};

use super::{
    EXPERT,
    base::PolicyBase,
    data::{Dataset, Mixture, write_sample},
    lerobot::{PolicyObjective, PolicySubject, make_policy},
    measures::run_data,
    memory,
    objective::VlaObjective,
    policy::Policy,
    selftest,
    serving::PolicyResponder,
    start, starter,
};

/// Fine-tunes a vision-language model with LoRA below an action expert trained in full.
#[derive(Default)]
pub struct VlaFlow<B: Tape<Base = B>> {
    /// The models that it may train.
    pub models: Shelves<B>,
}

impl<B: Tape<Base = B>> Task for VlaFlow<B> {
    fn schema(&self) -> TaskSchema {
        super::config::SCHEMA
    }

    fn open(&self, spec: &RunSpec) -> Result<Arc<dyn Samples>, DataError> {
        let several = VlaSettings::from_spec(spec).is_ok_and(|settings| !settings.data.sets.is_empty());
        if several {
            return Ok(Arc::new(Mixture::from_spec(spec, self.models.sizes)?));
        }
        Ok(Arc::new(Dataset::from_spec(spec, self.models.sizes)?))
    }

    fn sizes(&self, spec: &RunSpec) -> Result<Box<dyn Subject>, TaskError> {
        let (settings, models) =
            (VlaSettings::from_spec(spec).map_err(TaskError::bad_input)?, self.models.sizes);
        if let Some(base) = PolicyBase::from_settings(&settings, models).map_err(TaskError::bad_input)? {
            return Ok(Box::new(PolicySubject::from_spec(spec, base, models).map_err(TaskError::bad_input)?));
        }
        Ok(Box::new(memory::Subject::from_spec(spec, models).map_err(TaskError::bad_input)?))
    }

    fn frugal_settings(&self, spec: &RunSpec) -> Vec<String> {
        // Whatever cannot be read was refused long before advice is asked for.
        let Ok(vla) = VlaSettings::from_spec(spec) else { return Vec::new() };
        let mut settings = Vec::new();
        if vla.model.activations_dtype == ActivationsDtype::Float32 {
            settings.push("model.activations_dtype: bfloat16 (with recompute)".into());
        }
        if vla.model.weights_dtype == FrozenDtype::Float32 {
            settings.push("model.weights_dtype: bfloat16".into());
        }
        let held = spec.memory.offload != Offload::Layers && spec.memory.shard == Shard::None;
        if held && vla.model.weights_dtype.packing().is_none() {
            settings
                .push("memory.offload: layers (if frozen weights are not mapped from their files)".into());
        }
        if vla.expert.repeated_noise > 1 {
            settings.push(format!("expert.repeated_noise below {}", vla.expert.repeated_noise));
        }
        if vla.data.cameras.len() > 1 {
            settings.push(format!("fewer than {} data.cameras", vla.data.cameras.len()));
        }
        settings
    }

    fn data_keys(&self) -> &'static [(&'static str, Role, &'static str)] {
        &[
            ("state", Role::Vector, "observation.state"),
            ("sensor", Role::Window, "observation.sensor"),
            ("action", Role::Action, "action"),
        ]
    }

    fn starter(&self, job: &StarterJob<'_>) -> Option<Result<StarterFile, DataError>> {
        starter::starter(job)
    }

    fn make_policy(&self, job: &StarterJob<'_>, out: &Path) -> Option<Result<(), DataError>> {
        make_policy(job, out)
    }

    fn preview(&self, spec: &RunSpec, episode: u64, frames: usize) -> Option<Result<Preview, DataError>> {
        Some(Mixture::one_of(spec, self.models.sizes).and_then(|dataset| dataset.preview(episode, frames)))
    }

    fn write_sample(&self, spec: &RunSpec, index: u64, out: &Path) -> Result<(), DataError> {
        write_sample(spec, self.models.sizes, index, out)
    }

    fn make_checkpoint(&self, job: &RandomJob<'_>) -> Option<Result<CheckpointSummary, TaskError>> {
        let RandomJob { like, tokenizer, out, seed, .. } = *job;
        let family = self.models.sizes.vision_language.find(like)?;
        let checkpoint = SyntheticCheckpoint { like, tokenizer, out, dtype: dtype(job.bfloat16), seed };
        let made = family.and_then(|family| family.make_checkpoint(&checkpoint));
        let told = |made: synthetic::SyntheticSummary| {
            let synthetic::SyntheticSummary { parameters, tensors, bytes, shards } = made;
            CheckpointSummary { parameters, tensors, bytes, shards }
        };
        Some(made.map(told).map_err(TaskError::bad_input))
    }

    fn weight_files(&self, path: &Path) -> Vec<PathBuf> {
        start::files(path)
    }

    fn read_weights(&self, spec: &RunSpec, path: &Path) -> Result<Vec<StoredTensor>, TaskError> {
        start::read(spec, self.models.sizes, path)
    }

    fn other_meaning(&self, here: &RunSpec, there: &RunSpec, groups: &[Group]) -> Vec<String> {
        start::other_meaning(here, there, groups)
    }

    fn brought(&self, spec: &RunSpec) -> Option<Group> {
        let vla = VlaSettings::from_spec(spec).ok()?;
        (!vla.expert.train || vla.optimizer.lr.expert == 0.0).then_some(EXPERT)
    }

    fn float16(&self, spec: &RunSpec) -> Option<Float16> {
        let dtype = VlaSettings::from_spec(spec).ok()?.model.weights_dtype;
        (dtype == FrozenDtype::Float16).then_some(Float16 { key: "model.weights_dtype", backward: true })
    }

    fn base_digest(&self, spec: &RunSpec) -> Option<Result<String, TaskError>> {
        pretrained::digest(spec, |dir| match is_policy(dir) {
            true => Ok(PolicyKind::from_directory(&PolicyDirectory::from_dir(dir)?)?.rules()),
            false => Ok(self.models.sizes.vision_language.of(dir)?.outline(dir)?.rules),
        })
    }

    fn group_of(&self, tensor: &str) -> Option<Group> {
        pretrained::group_of(tensor)
    }

    fn next_commands(&self) -> [&'static str; 2] {
        ["cox serve RUN_DIR", "cox eval RUN_DIR"]
    }

    fn known_losses(&self) -> &'static [f64] {
        &selftest::STORED
    }
}

impl<B: Tape<Base = B>> TaskOn<B> for VlaFlow<B> {
    fn load(
        &self,
        spec: &RunSpec,
        samples: &dyn Samples,
        device: &B::Device,
    ) -> Result<Assembly<B>, TaskError> {
        let settings = VlaSettings::from_spec(spec).map_err(TaskError::bad_input)?;
        let models = self.models.device;
        if let Some(base) = PolicyBase::from_settings(&settings, models).map_err(TaskError::bad_input)? {
            return PolicyObjective::build(spec, base, models, samples, device);
        }
        let dims = run_data(samples).dims();
        let loaded = Policy::<B>::load_without_values(spec, models, dims, device);
        let (policy, layout) = loaded.map_err(TaskError::bad_input)?;
        // What is read from files may be wrong, and is read.
        let is_read = |param: &ParamSpec| matches!(param.init, Init::Pretrained | Init::RowNorms);
        let reads = settings.lora.as_ref().is_some_and(|lora| lora.init_from.is_some())
            || layout.params().iter().any(is_read);
        let initial = if reads { policy.initial_values(spec, &layout) } else { Ok(Vec::new()) };
        let initial = initial.map_err(TaskError::bad_input)?;
        let objective = Box::new(VlaObjective { policy, spec: spec.clone(), settings });
        Ok(Assembly { objective, layout, initial })
    }

    fn responder(
        &self,
        spec: &RunSpec,
        dir: &Path,
        device: &B::Device,
    ) -> Option<Result<Box<dyn Responder>, TaskError>> {
        let opened = PolicyResponder::load(spec, self.models, dir, device);
        Some(opened.map(|responder| Box::new(responder) as Box<dyn Responder>))
    }

    fn forward(&self, job: &ForwardJob<'_>, device: &B::Device) -> Option<Result<(), TaskError>> {
        let ForwardJob { model, adapter, inputs, out, dtype, .. } = *job;
        let model = &match hub::directory(model, Repository::Model) {
            Ok(dir) => dir,
            Err(error) => return Some(Err(TaskError::bad_input(error))),
        };
        if is_policy(model) {
            return Some(forward_policy(&ForwardJob { model, ..*job }, self.models.device, device));
        }
        let family = self.models.device.vision_language.find(model)?;
        let job = job::ForwardJob { model, adapter, inputs, out, dtype };
        Some(family.and_then(|family| family.forward(&job, device)).map_err(TaskError::bad_input))
    }

    fn few_steps(&self, device: &B::Device, width: Width) -> Option<Losses> {
        Some(selftest::step::<B>(self.models.device, device, width))
    }
}

fn forward_policy<B: Tape<Base = B>>(
    job: &ForwardJob<'_>,
    models: Shelf<B>,
    device: &B::Device,
) -> Result<(), TaskError> {
    let ForwardJob { model, adapter, backbone, inputs, out, dtype, gradients } = *job;
    if adapter.is_some() {
        let problem = "--adapter is not supported for LeRobot policies; merge the adapter into the policy";
        return Err(TaskError::bad_input(format!("{}: {problem}", model.display())));
    }
    let base = PolicyBase::from_dir(model, backbone, models).map_err(TaskError::bad_input)?;
    let files = PolicyFiles { directory: &base.directory, backbone: &base.backbone, dtype };
    run_pass(PassJob { files, inputs, out, gradients }, models, device).map_err(TaskError::bad_input)
}

fn dtype(bfloat16: bool) -> WeightsDtype {
    if bfloat16 { WeightsDtype::Bfloat16 } else { WeightsDtype::Float32 }
}
