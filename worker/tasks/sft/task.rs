//! Its place among tasks.

use std::{
    path::{Path, PathBuf},
    sync::Arc,
};

use coxswain_data::DataError;
use coxswain_nn::{
    dtypes::{ActivationsDtype, WeightsDtype},
    files::{StoredTensor, replace},
    kernels::Tape,
    params::Group,
};
use coxswain_proto::{
    config::TaskSchema,
    run_spec::{Offload, RunSpec},
};
use coxswain_task::{Built, GenerateJob, Samples, Task, TaskError, TaskOn, Written, memory::Subject};
use safetensors::{Dtype, tensor::TensorView};

use super::{
    config::SftSettings,
    data::{ChatSample, Chats},
    generation, memory,
    model::ChatModel,
    objective::SftObjective,
    results,
};
use crate::pretrained;

/// Fine-tunes a vision-language model with LoRA on chats.
#[derive(Clone, Copy, Debug)]
pub struct Sft;

impl Task for Sft {
    fn name(&self) -> &'static str {
        "sft"
    }

    fn schema(&self) -> TaskSchema {
        super::config::SCHEMA
    }

    fn open(&self, spec: &RunSpec) -> Result<Arc<dyn Samples>, DataError> {
        Ok(Arc::new(Chats::open(spec)?))
    }

    fn sizes(&self, spec: &RunSpec) -> Result<Box<dyn Subject>, TaskError> {
        Ok(Box::new(memory::ChatSizes::read(spec).map_err(TaskError::bad_input)?))
    }

    fn frugal_settings(&self, spec: &RunSpec) -> Vec<String> {
        // Whatever cannot be read was refused long before somebody asks for advice.
        let Ok(sft) = SftSettings::of(spec) else { return Vec::new() };
        let mut settings = Vec::new();
        if sft.model.activations_dtype == ActivationsDtype::Float32 {
            settings.push("model.activations_dtype: bfloat16 (with recompute)".into());
        }
        if sft.model.weights_dtype == WeightsDtype::Float32 {
            settings.push("model.weights_dtype: bfloat16".into());
        }
        if spec.memory.offload != Offload::Layers {
            settings
                .push("memory.offload: layers (where frozen weights are copied out of their files)".into());
        }
        settings.push(format!("data.max_tokens below {}", sft.data.max_tokens));
        settings
    }

    fn weight_files(&self, path: &Path) -> Vec<PathBuf> {
        results::files(path)
    }

    fn read_weights(&self, spec: &RunSpec, path: &Path) -> Result<Vec<StoredTensor>, TaskError> {
        results::read(spec, path)
    }

    fn other_meaning(&self, here: &RunSpec, there: &RunSpec, groups: &[Group]) -> Vec<String> {
        let Ok(here) = SftSettings::of(here) else { return Vec::new() };
        pretrained::other_meaning(here.lora.as_ref(), there, groups)
    }

    fn base_digest(&self, spec: &RunSpec) -> Option<Result<String, TaskError>> {
        pretrained::digest(spec)
    }

    fn group_of(&self, tensor: &str) -> Option<Group> {
        pretrained::group_of(tensor)
    }

    fn write_sample(&self, spec: &RunSpec, index: u64, out: &Path) -> Result<(), DataError> {
        write(&Chats::open(spec)?.sample(index)?, out)
    }
}

/// Tensors as `cox model forward` takes them: labels are -100 where nothing is learned.
fn write(sample: &ChatSample, out: &Path) -> Result<(), DataError> {
    let integers =
        |values: &mut dyn Iterator<Item = i64>| values.flat_map(i64::to_le_bytes).collect::<Vec<_>>();
    let (seq, images) = (sample.input_ids.len(), sample.image_grids.len());
    let patches: usize = sample.image_grids.iter().map(|grid| grid.iter().product::<u32>() as usize).sum();
    let ids = integers(&mut sample.input_ids.iter().map(|&id| id.into()));
    let label = |(&id, &learned): (&u32, &bool)| if learned { id.into() } else { -100 };
    let labels = integers(&mut sample.input_ids.iter().zip(&sample.learned).map(label));
    let mask = integers(&mut std::iter::repeat_n(1, seq));
    let grids = integers(&mut sample.image_grids.iter().flatten().map(|&side| side.into()));
    let pixels: Vec<u8> = sample.pixel_values.iter().flat_map(|value| value.to_le_bytes()).collect();
    let columns = sample.pixel_values.len() / patches.max(1);
    let mut tensors = vec![
        ("input_ids", Dtype::I64, vec![1, seq], &ids),
        ("attention_mask", Dtype::I64, vec![1, seq], &mask),
        ("labels", Dtype::I64, vec![1, seq], &labels),
    ];
    if images > 0 {
        tensors.push(("pixel_values", Dtype::F32, vec![patches, columns], &pixels));
        tensors.push(("image_grid_thw", Dtype::I64, vec![images, 3], &grids));
    }
    let views = tensors.into_iter().map(|(name, dtype, shape, bytes)| {
        (name, TensorView::new(dtype, shape, bytes).expect("shapes are taken from the values"))
    });
    let views: Vec<_> = views.collect();
    replace(out, |path| safetensors::serialize_to_file(views, None, path).map_err(std::io::Error::other))
        .map_err(DataError::io(out, "write"))
}

impl<B: Tape<Base = B>> TaskOn<B> for Sft {
    fn build(
        &self,
        spec: &RunSpec,
        _samples: &dyn Samples,
        device: &B::Device,
    ) -> Result<Built<B>, TaskError> {
        let (model, layout, initial) = ChatModel::<B>::load(spec, device).map_err(TaskError::bad_input)?;
        let settings = SftSettings::of(spec).map_err(TaskError::bad_input)?;
        let objective = Box::new(SftObjective { model, spec: spec.clone(), settings });
        Ok(Built { objective, layout, initial })
    }

    fn generate(&self, job: &GenerateJob<'_>, device: &B::Device) -> Option<Result<Vec<Written>, TaskError>> {
        Some(generation::generate::<B>(job, device))
    }
}
