//! Implements `Task` and `TaskOn` for separation.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    sync::Arc,
};

use coxswain_data::DataError;
use coxswain_nn::{dtypes::ActivationsDtype, kernels::Tape};
use coxswain_proto::{
    config::TaskSchema,
    run_spec::{Recompute, RunSpec},
};
use coxswain_task::{
    Assembly, ConvertJob, Samples, StarterFile, StarterJob, Task, TaskError, TaskOn, memory::Subject,
};
use safetensors::Dtype;

use super::{
    config::SeparationSettings,
    data::{CHANNELS, SegmentSample, Tracks},
    memory::SeparatorSizes,
    objective::SeparationObjective,
    stems,
};
use crate::sample_file;

/// Trains a separator of stereo audio.
#[derive(Clone, Copy, Debug)]
pub struct Separation;

impl Task for Separation {
    fn schema(&self) -> TaskSchema {
        super::config::SCHEMA
    }

    fn next_commands(&self) -> [&'static str; 2] {
        ["cox generate RUN_DIR --audio FILE.wav", "cox eval RUN_DIR"]
    }

    fn open(&self, spec: &RunSpec) -> Result<Arc<dyn Samples>, DataError> {
        Ok(Arc::new(Tracks::from_spec(spec)?))
    }

    fn faults(&self, spec: &RunSpec) -> Vec<DataError> {
        let settings = SeparationSettings::from_spec(spec);
        settings.map_or_else(|_| Vec::new(), |of| Tracks::faults(Path::new(&spec.data.path), &of.data))
    }

    fn sizes(&self, spec: &RunSpec) -> Result<Box<dyn Subject>, TaskError> {
        Ok(Box::new(SeparatorSizes::from_spec(spec).map_err(TaskError::bad_input)?))
    }

    fn frugal_settings(&self, spec: &RunSpec) -> Vec<String> {
        // Whatever cannot be read was refused long before somebody asks for advice.
        let Ok(settings) = SeparationSettings::from_spec(spec) else { return Vec::new() };
        let mut frugal = vec![
            format!("data.segment_seconds below {}", settings.data.segment_seconds),
            format!("network.hidden_dim below {}", settings.network.hidden_dim),
            format!("network.bands below {}", settings.network.bands),
            format!("network.layers below {}", settings.network.layers),
        ];
        if settings.network.activations_dtype == ActivationsDtype::Float32
            && spec.train.recompute != Recompute::None
        {
            frugal.insert(0, "network.activations_dtype: bfloat16".into());
        }
        frugal
    }

    fn starter(&self, job: &StarterJob<'_>) -> Option<Result<StarterFile, DataError>> {
        super::starter::starter(job)
    }

    fn write_sample(&self, spec: &RunSpec, index: u64, out: &Path) -> Result<(), DataError> {
        write(&Tracks::from_spec(spec)?.sample(index)?, out)
    }
}

/// A segment as tensors: `mixture` `[channels, l]`, `stems` `[stems, channels, l]`.
fn write(sample: &SegmentSample, out: &Path) -> Result<(), DataError> {
    let samples = sample.mixture.len() / CHANNELS;
    let stems = sample.stems.len() / sample.mixture.len();
    let floats =
        |shape, values| sample_file::tensor(Dtype::F32, shape, bytemuck::cast_slice::<f32, u8>(values));
    let tensors = BTreeMap::from([
        ("mixture", floats(vec![CHANNELS, samples], &sample.mixture)),
        ("stems", floats(vec![stems, CHANNELS, samples], &sample.stems)),
    ]);
    sample_file::write(out, tensors, None)
}

impl<B: Tape<Base = B>> TaskOn<B> for Separation {
    fn load(
        &self,
        spec: &RunSpec,
        _samples: &dyn Samples,
        _device: &B::Device,
    ) -> Result<Assembly<B>, TaskError> {
        let (objective, layout) = SeparationObjective::new(spec).map_err(TaskError::bad_input)?;
        Ok(Assembly { objective: Box::new(objective), layout, initial: Vec::new() })
    }

    fn convert(
        &self,
        job: &ConvertJob<'_>,
        device: &B::Device,
    ) -> Option<Result<Vec<Vec<PathBuf>>, TaskError>> {
        Some(stems::convert::<B>(job, device))
    }
}
