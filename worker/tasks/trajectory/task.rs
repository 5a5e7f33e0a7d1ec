//! Implements `Task` and `TaskOn` for trajectory.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    sync::Arc,
};

use coxswain_data::DataError;
use coxswain_models::Shelves;
use coxswain_nn::{
    dtypes::WeightsDtype,
    files::{StoredTensor, read_tensors},
    kernels::Tape,
    params::Group,
};
use coxswain_proto::{
    config::TaskSchema,
    run_spec::{CacheMode, Offload, RunSpec},
};
use coxswain_task::{
    Assembly, Float16, Samples, StarterFile, StarterJob, Task, TaskError, TaskOn, memory::Subject,
};
use safetensors::Dtype;

use crate::{pretrained, sample_file};

use super::{
    config::{SCHEMA, TrajectorySettings},
    data::ImageFolder,
    memory::TrajectorySizes,
    model::TrajectoryModel,
    network::{ADAPTERS, NETWORK},
    objective::{TrajectoryObjective, WEIGHTS},
};

/// Trains a small network on trajectories of layer activations, batch by batch, or adapts one with LoRA.
#[derive(Default)]
pub struct Trajectory<B: Tape<Base = B>> {
    /// The models whose activations it may learn from.
    pub models: Shelves<B>,
}

impl<B: Tape<Base = B>> Task for Trajectory<B> {
    fn schema(&self) -> TaskSchema {
        SCHEMA
    }

    fn open(&self, spec: &RunSpec) -> Result<Arc<dyn Samples>, DataError> {
        Ok(Arc::new(ImageFolder::from_spec(spec, self.models.sizes)?))
    }

    fn sizes(&self, spec: &RunSpec) -> Result<Box<dyn Subject>, TaskError> {
        Ok(Box::new(TrajectorySizes::from_spec(spec, self.models.sizes)?))
    }

    fn frugal_settings(&self, spec: &RunSpec) -> Vec<String> {
        // Whatever cannot be read was refused long before advice is asked for.
        let Ok(TrajectorySettings { extractor, data, .. }) = TrajectorySettings::from_spec(spec) else {
            return Vec::new();
        };
        let mut settings = Vec::new();
        if spec.cache.mode == CacheMode::Off {
            settings.push("cache.mode: exact (after the first epoch)".into());
        }
        if extractor.weights_dtype == WeightsDtype::Float32 {
            settings.push("extractor.weights_dtype: bfloat16".into());
        }
        if spec.memory.offload != Offload::Layers {
            settings
                .push("memory.offload: layers (if frozen weights are not mapped from their files)".into());
        }
        settings.push(format!("data.image_size below {}", data.image_size));
        settings.push(format!("extractor.spatial_resolution below {}", extractor.spatial_resolution));
        settings
    }

    fn starter(&self, job: &StarterJob<'_>) -> Option<Result<StarterFile, DataError>> {
        super::starter::starter(job)
    }

    fn write_sample(&self, spec: &RunSpec, index: u64, out: &Path) -> Result<(), DataError> {
        let folder = ImageFolder::from_spec(spec, self.models.sizes)?;
        let pixels = folder.sample(index)?.pixel_values;
        let grid = folder.grid();
        let patches: usize = grid.iter().map(|&side| side as usize).product();
        let sides = grid.map(i64::from);
        let shape = vec![patches, pixels.len() / patches.max(1)];
        let tensors = BTreeMap::from([
            ("pixel_values", sample_file::tensor(Dtype::F32, shape, bytemuck::cast_slice(&pixels[..]))),
            ("image_grid_thw", sample_file::tensor(Dtype::I64, vec![1, 3], bytemuck::cast_slice(&sides))),
        ]);
        sample_file::write(out, tensors, None)
    }

    fn weight_files(&self, path: &Path) -> Vec<PathBuf> {
        let file = if path.is_file() { path.to_path_buf() } else { path.join(WEIGHTS.path) };
        if file.is_file() { vec![file] } else { Vec::new() }
    }

    fn read_weights(&self, _spec: &RunSpec, path: &Path) -> Result<Vec<StoredTensor>, TaskError> {
        let mut tensors = Vec::new();
        for file in self.weight_files(path) {
            let read = read_tensors(&file);
            tensors
                .extend(read.map_err(|error| TaskError::bad_input(format!("{}: {error}", file.display())))?);
        }
        Ok(tensors)
    }

    fn other_meaning(&self, here: &RunSpec, there: &RunSpec, groups: &[Group]) -> Vec<String> {
        let (Ok(here), Ok(there)) =
            (TrajectorySettings::from_spec(here), TrajectorySettings::from_spec(there))
        else {
            return Vec::new();
        };
        let mut keys = Vec::new();
        if groups.contains(&NETWORK) {
            let heads = |settings: &TrajectorySettings| settings.network.heads.to_string();
            let layers = |settings: &TrajectorySettings| format!("{:?}", settings.extractor.layers);
            keys.push(("network.heads", heads(&there), heads(&here)));
            keys.push(("extractor.layers", layers(&there), layers(&here)));
        }
        if let (true, Some(ours), Some(theirs)) = (groups.contains(&ADAPTERS), &here.lora, &there.lora) {
            keys.push(("lora.alpha", theirs.alpha.to_string(), ours.alpha.to_string()));
            keys.push(("lora.rslora", theirs.rslora.to_string(), ours.rslora.to_string()));
        }
        let differing = keys.into_iter().filter(|(_, there, here)| there != here);
        differing.map(|(key, there, here)| format!("{key}: {there} there, {here} here")).collect()
    }

    fn brought(&self, spec: &RunSpec) -> Option<Group> {
        let settings = TrajectorySettings::from_spec(spec).ok()?;
        settings.lora.is_some().then_some(NETWORK)
    }

    fn float16(&self, spec: &RunSpec) -> Option<Float16> {
        let dtype = TrajectorySettings::from_spec(spec).ok()?.extractor.weights_dtype;
        (dtype == WeightsDtype::Float16)
            .then_some(Float16 { key: "extractor.weights_dtype", backward: false })
    }

    fn base_digest(&self, spec: &RunSpec) -> Option<Result<String, TaskError>> {
        pretrained::digest(spec, |dir| Ok(self.models.sizes.vision_language.of(dir)?.outline(dir)?.rules))
    }

    fn group_of(&self, tensor: &str) -> Option<Group> {
        tensor.starts_with("base_model.model.network.").then_some(ADAPTERS)
    }
}

impl<B: Tape<Base = B>> TaskOn<B> for Trajectory<B> {
    fn load(
        &self,
        spec: &RunSpec,
        _samples: &dyn Samples,
        device: &B::Device,
    ) -> Result<Assembly<B>, TaskError> {
        let (model, layout) = TrajectoryModel::<B>::load(spec, self.models.device, device)?;
        let objective = TrajectoryObjective { model, spec: spec.clone(), device: device.clone() };
        Ok(Assembly { objective: Box::new(objective), layout, initial: Vec::new() })
    }
}
