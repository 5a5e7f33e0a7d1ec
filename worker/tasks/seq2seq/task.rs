//! Implements `Task` and `TaskOn` for seq2seq.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    sync::Arc,
};

use coxswain_data::DataError;
use coxswain_models::{Shelves, pretrained::job};
use coxswain_nn::{dtypes::FrozenDtype, files::StoredTensor, kernels::Tape, params::Group};
use coxswain_proto::{config::TaskSchema, run_spec::RunSpec};
use coxswain_task::{
    Assembly, Float16, ForwardJob, GenerateJob, Reply, Samples, StarterFile, StarterJob, Task, TaskError,
    TaskOn, memory::Subject,
};

use super::{
    config::Seq2SeqSettings,
    data::{PairSample, Pairs, Table},
    generation,
    memory::PairSizes,
    model::{PairModel, read_left},
    objective::Seq2SeqObjective,
};
use crate::{pretrained, sample_file, tokens::memory::frugal};

/// Fine-tunes T5 and mT5 on pairs of texts.
#[derive(Default)]
pub struct Seq2Seq<B: Tape<Base = B>> {
    /// The models that it may train.
    pub models: Shelves<B>,
}

impl<B: Tape<Base = B>> Task for Seq2Seq<B> {
    fn schema(&self) -> TaskSchema {
        super::config::SCHEMA
    }

    fn open(&self, spec: &RunSpec) -> Result<Arc<dyn Samples>, DataError> {
        Ok(Arc::new(Pairs::from_spec(spec, self.models.sizes)?))
    }

    fn faults(&self, spec: &RunSpec) -> Vec<DataError> {
        let settings = Seq2SeqSettings::from_spec(spec);
        settings.map_or_else(
            |_| Vec::new(),
            |of| Table::faults(Path::new(&spec.data.path), [&of.data.source, &of.data.target]),
        )
    }

    fn sizes(&self, spec: &RunSpec) -> Result<Box<dyn Subject>, TaskError> {
        Ok(Box::new(PairSizes::from_spec(spec, self.models.sizes)?))
    }

    fn frugal_settings(&self, spec: &RunSpec) -> Vec<String> {
        // Whatever cannot be read was refused long before advice is asked for.
        let Ok(settings) = Seq2SeqSettings::from_spec(spec) else { return Vec::new() };
        let mut frugal = frugal(&settings.model);
        frugal.push(format!("data.max_source_tokens below {}", settings.data.max_source_tokens));
        frugal.push(format!("data.max_target_tokens below {}", settings.data.max_target_tokens));
        frugal
    }

    fn weight_files(&self, path: &Path) -> Vec<PathBuf> {
        pretrained::files(path, &[pretrained::BASE.path])
    }

    fn read_weights(&self, spec: &RunSpec, path: &Path) -> Result<Vec<StoredTensor>, TaskError> {
        let settings = Seq2SeqSettings::from_spec(spec).map_err(TaskError::bad_input)?;
        read_left(&settings, self.models.sizes, path)
    }

    fn other_meaning(&self, here: &RunSpec, there: &RunSpec, groups: &[Group]) -> Vec<String> {
        let Ok(here) = Seq2SeqSettings::from_spec(here) else { return Vec::new() };
        pretrained::other_meaning(here.lora.as_ref(), there, groups)
    }

    fn float16(&self, spec: &RunSpec) -> Option<Float16> {
        let dtype = Seq2SeqSettings::from_spec(spec).ok()?.model.weights_dtype;
        (dtype == FrozenDtype::Float16).then_some(Float16 { key: "model.weights_dtype", backward: true })
    }

    fn base_digest(&self, spec: &RunSpec) -> Option<Result<String, TaskError>> {
        pretrained::digest(spec, |dir| Ok(self.models.sizes.text_to_text.of(dir)?.outline(dir)?.rules))
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
        write(&Pairs::from_spec(spec, self.models.sizes)?.sample(index)?, out)
    }
}

/// Tensors as `cox model forward` takes them.
fn write(sample: &PairSample, out: &Path) -> Result<(), DataError> {
    let integers = |ids: &[u32]| ids.iter().map(|&id| i64::from(id)).collect::<Vec<_>>();
    let (source, target) = (integers(&sample.source), integers(&sample.target));
    let mask = vec![1; source.len()];
    let tensors = BTreeMap::from([
        ("input_ids", sample_file::row(&source)),
        ("attention_mask", sample_file::row(&mask)),
        ("labels", sample_file::row(&target)),
    ]);
    sample_file::write(out, tensors, None)
}

impl<B: Tape<Base = B>> TaskOn<B> for Seq2Seq<B> {
    fn load(
        &self,
        spec: &RunSpec,
        _samples: &dyn Samples,
        device: &B::Device,
    ) -> Result<Assembly<B>, TaskError> {
        let settings = Seq2SeqSettings::from_spec(spec).map_err(TaskError::bad_input)?;
        let (model, layout, initial) = PairModel::<B>::load(spec, &settings, self.models.device, device)?;
        let objective = Box::new(Seq2SeqObjective { model, spec: spec.clone(), settings });
        Ok(Assembly { objective, layout, initial })
    }

    fn forward(&self, job: &ForwardJob<'_>, device: &B::Device) -> Option<Result<(), TaskError>> {
        let ForwardJob { model, adapter, inputs, out, dtype, .. } = *job;
        let family = self.models.device.text_to_text.find(model)?;
        let job = job::ForwardJob { model, adapter, inputs, out, dtype };
        Some(family.and_then(|family| family.forward(&job, device)).map_err(TaskError::bad_input))
    }

    fn generate(&self, job: &GenerateJob<'_>, device: &B::Device) -> Option<Result<Vec<Reply>, TaskError>> {
        Some(generation::generate::<B>(job, self.models, device))
    }
}
