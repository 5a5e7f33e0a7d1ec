//! Its place among tasks.

use std::sync::Arc;

use coxswain_data::DataError;
use coxswain_nn::kernels::Tape;
use coxswain_proto::{
    config::TaskSchema,
    run_spec::{Offload, RunSpec},
    vla_flow::{ActivationsDtype, VlaSettings, WeightsDtype},
};
use coxswain_task::{Built, Losses, Samples, Task, TaskError, TaskOn, Width, memory::Subject};

use super::{
    data::Dataset,
    memory,
    objective::{VlaObjective, dataset},
    policy::Policy,
    selftest,
};

/// Fine-tunes a vision-language model with LoRA below an action expert trained in full.
#[derive(Clone, Copy, Debug)]
pub struct VlaFlow;

impl Task for VlaFlow {
    fn name(&self) -> &'static str {
        "vla_flow"
    }

    fn schema(&self) -> TaskSchema {
        TaskSchema::of::<VlaSettings>()
    }

    fn open(&self, spec: &RunSpec) -> Result<Arc<dyn Samples>, DataError> {
        Ok(Arc::new(Dataset::open(spec)?))
    }

    fn sizes(&self, spec: &RunSpec) -> Result<Box<dyn Subject>, TaskError> {
        Ok(Box::new(memory::Subject::read(spec).map_err(TaskError::bad_input)?))
    }

    fn frugal_settings(&self, spec: &RunSpec) -> Vec<String> {
        let vla = spec.vla();
        let mut settings = Vec::new();
        if vla.model.activations_dtype == ActivationsDtype::Float32 {
            settings.push("model.activations_dtype: bfloat16 (with recompute)".into());
        }
        if vla.model.weights_dtype == WeightsDtype::Float32 {
            settings.push("model.weights_dtype: bfloat16".into());
        }
        if spec.memory.offload != Offload::Layers {
            settings.push("memory.offload: layers (where frozen weights are copied out of their files)".into());
        }
        if vla.expert.repeated_noise > 1 {
            settings.push(format!("expert.repeated_noise below {}", vla.expert.repeated_noise));
        }
        if vla.data.cameras.len() > 1 {
            settings.push(format!("fewer than {} data.cameras", vla.data.cameras.len()));
        }
        settings
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
        let dims = dataset(samples).dims();
        let (policy, layout, initial) =
            Policy::<B>::load(spec, dims, device).map_err(TaskError::bad_input)?;
        let objective = Box::new(VlaObjective { policy, spec: spec.clone(), settings: spec.vla() });
        Ok(Built { objective, layout, initial })
    }

    fn few_steps(&self, device: &B::Device, width: Width) -> Option<Losses> {
        Some(selftest::step::<B>(device, width))
    }
}
