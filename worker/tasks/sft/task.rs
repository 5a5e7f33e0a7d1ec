//! Implements `Task` and `TaskOn` for sft.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    sync::Arc,
};

use coxswain_data::DataError;
use coxswain_models::Shelves;
use coxswain_nn::{dtypes::FrozenDtype, files::StoredTensor, kernels::Tape, params::Group};
use coxswain_proto::{
    config::TaskSchema,
    run_spec::{Offload, RunSpec, Shard},
};
use coxswain_task::{
    Assembly, Float16, GenerateJob, Reply, Samples, StarterFile, StarterJob, Task, TaskError, TaskOn,
    memory::Subject,
};
use safetensors::Dtype;

use super::{
    config::SftSettings,
    data::{ChatSample, Chats, faults},
    generation, memory,
    model::{ChatModel, read_left},
    objective::SftObjective,
};
use crate::{pretrained, sample_file, tokens::memory::frugal};

/// Fine-tunes a vision-language model with LoRA on chats.
#[derive(Default)]
pub struct Sft<B: Tape<Base = B>> {
    /// The models that it may train.
    pub models: Shelves<B>,
}

impl<B: Tape<Base = B>> Task for Sft<B> {
    fn schema(&self) -> TaskSchema {
        super::config::SCHEMA
    }

    fn open(&self, spec: &RunSpec) -> Result<Arc<dyn Samples>, DataError> {
        Ok(Arc::new(Chats::from_spec(spec, self.models.sizes)?))
    }

    fn faults(&self, spec: &RunSpec) -> Vec<DataError> {
        let settings = SftSettings::from_spec(spec);
        settings.map_or_else(|_| Vec::new(), |of| faults(Path::new(&spec.data.path), &of.data))
    }

    fn sizes(&self, spec: &RunSpec) -> Result<Box<dyn Subject>, TaskError> {
        Ok(Box::new(memory::ChatSizes::from_spec(spec, self.models.sizes)?))
    }

    fn frugal_settings(&self, spec: &RunSpec) -> Vec<String> {
        // Whatever cannot be read was refused long before somebody asks for advice.
        let Ok(sft) = SftSettings::from_spec(spec) else { return Vec::new() };
        let mut settings = frugal(&sft.model);
        if spec.memory.offload != Offload::Layers && spec.memory.shard == Shard::None {
            settings
                .push("memory.offload: layers (if frozen weights are not mapped from their files)".into());
        }
        settings.push(format!("data.max_tokens below {}", sft.data.max_tokens));
        settings
    }

    fn weight_files(&self, path: &Path) -> Vec<PathBuf> {
        pretrained::files(path, &[pretrained::BASE.path])
    }

    fn read_weights(&self, spec: &RunSpec, path: &Path) -> Result<Vec<StoredTensor>, TaskError> {
        let settings = SftSettings::from_spec(spec).map_err(TaskError::bad_input)?;
        read_left(&settings, self.models.sizes, path)
    }

    fn other_meaning(&self, here: &RunSpec, there: &RunSpec, groups: &[Group]) -> Vec<String> {
        let Ok(here) = SftSettings::from_spec(here) else { return Vec::new() };
        pretrained::other_meaning(here.lora.as_ref(), there, groups)
    }

    fn float16(&self, spec: &RunSpec) -> Option<Float16> {
        let dtype = SftSettings::from_spec(spec).ok()?.model.weights_dtype;
        (dtype == FrozenDtype::Float16).then_some(Float16 { key: "model.weights_dtype", backward: true })
    }

    fn base_digest(&self, spec: &RunSpec) -> Option<Result<String, TaskError>> {
        pretrained::digest(spec, |dir| Ok(self.models.sizes.vision_language.of(dir)?.outline(dir)?.rules))
    }

    fn next_commands(&self) -> [&'static str; 2] {
        ["cox generate RUN_DIR --prompt TEXT", "cox export RUN_DIR --merged"]
    }

    fn group_of(&self, tensor: &str) -> Option<Group> {
        pretrained::group_of(tensor)
    }

    fn starter(&self, job: &StarterJob<'_>) -> Option<Result<StarterFile, DataError>> {
        super::starter::starter(job)
    }

    fn write_sample(&self, spec: &RunSpec, index: u64, out: &Path) -> Result<(), DataError> {
        write(&Chats::from_spec(spec, self.models.sizes)?.sample(index)?, out)
    }
}

/// Tensors as `cox model forward` takes them: labels are -100 where nothing is learned.
fn write(sample: &ChatSample, out: &Path) -> Result<(), DataError> {
    let images = sample.image_shapes.len();
    let patches: usize = sample.image_shapes.iter().map(|grid| grid.iter().product::<u32>() as usize).sum();
    let ids: Vec<i64> = sample.input_ids.iter().map(|&id| id.into()).collect();
    let label = |(&id, &learned): (&i64, &bool)| if learned { id } else { -100 };
    let labels: Vec<i64> = ids.iter().zip(&sample.learned).map(label).collect();
    let mask = vec![1; ids.len()];
    let sides: Vec<i64> = sample.image_shapes.iter().flatten().map(|&side| side.into()).collect();
    let mut tensors = BTreeMap::from([
        ("input_ids", sample_file::row(&ids)),
        ("attention_mask", sample_file::row(&mask)),
        ("labels", sample_file::row(&labels)),
    ]);
    if images > 0 {
        let shape = vec![patches, sample.pixel_values.len() / patches.max(1)];
        let pixels = bytemuck::cast_slice(&sample.pixel_values[..]);
        tensors.insert("pixel_values", sample_file::tensor(Dtype::F32, shape, pixels));
        let sides = bytemuck::cast_slice(&sides);
        tensors.insert("image_grid_thw", sample_file::tensor(Dtype::I64, vec![images, 3], sides));
    }
    sample_file::write(out, tensors, None)
}

impl<B: Tape<Base = B>> TaskOn<B> for Sft<B> {
    fn load(
        &self,
        spec: &RunSpec,
        _samples: &dyn Samples,
        device: &B::Device,
    ) -> Result<Assembly<B>, TaskError> {
        let settings = SftSettings::from_spec(spec).map_err(TaskError::bad_input)?;
        let (model, layout, initial) = ChatModel::<B>::load(spec, &settings, self.models.device, device)?;
        let objective = Box::new(SftObjective { model, spec: spec.clone(), settings });
        Ok(Assembly { objective, layout, initial })
    }

    fn generate(&self, job: &GenerateJob<'_>, device: &B::Device) -> Option<Result<Vec<Reply>, TaskError>> {
        Some(generation::generate::<B>(job, self.models, device))
    }
}
