//! Its place among tasks.

use crate::{pretrained, vla_flow::config::VlaSettings};
use std::{
    path::{Path, PathBuf},
    sync::Arc,
};

use coxswain_data::{DataError, Role, preview::Preview};
use coxswain_models::{
    qwen2_5_vl::{
        forward,
        synthetic::{self, SyntheticCheckpoint},
    },
    t5::T5Config,
};
use coxswain_nn::{
    dtypes::{ActivationsDtype, FrozenDtype, WeightsDtype},
    files::StoredTensor,
    kernels::Tape,
    params::Group,
};
use coxswain_proto::{
    config::TaskSchema,
    run_spec::{Offload, RunSpec, Shard},
};
use coxswain_task::{
    Built, Float16, ForwardJob, Losses, Made, RandomJob, Responder, Samples, StarterFile, StarterJob, Task,
    TaskError, TaskOn, Width, memory::Subject,
};

use super::{
    EXPERT,
    data::{Dataset, Mixture, write_sample},
    memory,
    objective::{VlaObjective, run_data},
    policy::Policy,
    selftest,
    serving::PolicyResponder,
    start, starter,
};

/// Fine-tunes a vision-language model with LoRA below an action expert trained in full.
#[derive(Clone, Copy, Debug)]
pub struct VlaFlow;

impl Task for VlaFlow {
    fn name(&self) -> &'static str {
        "vla_flow"
    }

    fn schema(&self) -> TaskSchema {
        super::config::SCHEMA
    }

    fn open(&self, spec: &RunSpec) -> Result<Arc<dyn Samples>, DataError> {
        let several = VlaSettings::of(spec).is_ok_and(|settings| !settings.data.sets.is_empty());
        if several {
            return Ok(Arc::new(Mixture::open(spec)?));
        }
        Ok(Arc::new(Dataset::open(spec)?))
    }

    fn sizes(&self, spec: &RunSpec) -> Result<Box<dyn Subject>, TaskError> {
        Ok(Box::new(memory::Subject::read(spec).map_err(TaskError::bad_input)?))
    }

    fn frugal_settings(&self, spec: &RunSpec) -> Vec<String> {
        // Whatever cannot be read was refused long before advice is asked for.
        let Ok(vla) = VlaSettings::of(spec) else { return Vec::new() };
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
                .push("memory.offload: layers (where frozen weights are copied out of their files)".into());
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

    fn preview(&self, spec: &RunSpec, episode: u64, frames: usize) -> Option<Result<Preview, DataError>> {
        Some(Mixture::one_of(spec).and_then(|dataset| dataset.preview(episode, frames)))
    }

    fn write_sample(&self, spec: &RunSpec, index: u64, out: &Path) -> Result<(), DataError> {
        write_sample(spec, index, out)
    }

    fn make_checkpoint(&self, job: &RandomJob<'_>) -> Option<Result<Made, TaskError>> {
        let RandomJob { like, tokenizer, out, seed, .. } = *job;
        let made = SyntheticCheckpoint { like, tokenizer, out, dtype: dtype(job.bfloat16), seed }.write();
        let told = |made: synthetic::Made| {
            let synthetic::Made { parameters, tensors, bytes, shards } = made;
            Made { parameters, tensors, bytes, shards }
        };
        Some(made.map(told).map_err(TaskError::bad_input))
    }

    fn weight_files(&self, path: &Path) -> Vec<PathBuf> {
        start::files(path)
    }

    fn read_weights(&self, spec: &RunSpec, path: &Path) -> Result<Vec<StoredTensor>, TaskError> {
        start::read(spec, path)
    }

    fn other_meaning(&self, here: &RunSpec, there: &RunSpec, groups: &[Group]) -> Vec<String> {
        start::other_meaning(here, there, groups)
    }

    fn brought(&self, spec: &RunSpec) -> Option<Group> {
        let vla = VlaSettings::of(spec).ok()?;
        (!vla.expert.train || vla.optimizer.lr.expert == 0.0).then_some(EXPERT)
    }

    fn float16(&self, spec: &RunSpec) -> Option<Float16> {
        let dtype = VlaSettings::of(spec).ok()?.model.weights_dtype;
        (dtype == FrozenDtype::Float16).then_some(Float16 { key: "model.weights_dtype", backward: true })
    }

    fn base_digest(&self, spec: &RunSpec) -> Option<Result<String, TaskError>> {
        pretrained::digest(spec)
    }

    fn group_of(&self, tensor: &str) -> Option<Group> {
        pretrained::group_of(tensor)
    }

    fn known_losses(&self) -> &'static [f64] {
        &selftest::STORED
    }
}

impl<B: Tape<Base = B>> TaskOn<B> for VlaFlow {
    fn build(
        &self,
        spec: &RunSpec,
        samples: &dyn Samples,
        device: &B::Device,
    ) -> Result<Built<B>, TaskError> {
        let dims = run_data(samples).dims();
        let (policy, layout, initial) =
            Policy::<B>::load(spec, dims, device).map_err(TaskError::bad_input)?;
        let settings = VlaSettings::of(spec).map_err(TaskError::bad_input)?;
        let objective = Box::new(VlaObjective { policy, spec: spec.clone(), settings });
        Ok(Built { objective, layout, initial })
    }

    fn responder(
        &self,
        spec: &RunSpec,
        dir: &Path,
        device: &B::Device,
    ) -> Option<Result<Box<dyn Responder>, TaskError>> {
        let opened = PolicyResponder::<B>::open(spec, dir, device);
        Some(opened.map(|responder| Box::new(responder) as Box<dyn Responder>))
    }

    fn forward(&self, job: &ForwardJob<'_>, device: &B::Device) -> Option<Result<(), TaskError>> {
        let ForwardJob { model, adapter, inputs, out, dtype } = *job;
        if T5Config::is_here(model) {
            return None;
        }
        let job = forward::Job { model, adapter, inputs, out, dtype };
        Some(forward::run::<B>(&job, device).map_err(TaskError::bad_input))
    }

    fn few_steps(&self, device: &B::Device, width: Width) -> Option<Losses> {
        Some(selftest::step::<B>(device, width))
    }
}

fn dtype(bfloat16: bool) -> WeightsDtype {
    if bfloat16 { WeightsDtype::Bfloat16 } else { WeightsDtype::Float32 }
}
