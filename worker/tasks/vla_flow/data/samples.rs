//! What the engine sees of samples, micro-batches and the data set.

use std::{io, path::Path, sync::Arc};

use coxswain_data::{DataError, Fingerprint, TrainingSamples, place};
use coxswain_feature_store::{Digest, Store, StoreError};
use coxswain_models::pretrained::pictures::Rgb;
use coxswain_proto::{ids::Step, order::DamagedRow};
use coxswain_task::{Batch, CachedFeatures, InputIngredients, Inputs, SampleKeys, Samples, TextFile};

use super::{
    Dataset, MicroBatch, PolicyFile, STATS_FILE, Sample, SampleDims, collate, constant::odd_features,
    preview::pictures, run_data::RunData, take_apart,
};
use crate::vla_flow::base::{starts_from_policy, tokenizer};

impl coxswain_task::Sample for Sample {
    fn index(&self) -> u64 {
        self.index
    }

    fn inputs(&self) -> Inputs {
        Inputs { ids: self.input_ids.clone(), shapes: self.image_shapes.clone() }
    }

    fn take_seen(&mut self) -> Box<dyn coxswain_task::Sample> {
        Box::new(Self {
            input_ids: self.input_ids.clone(),
            image_shapes: self.image_shapes.clone(),
            pixel_values: std::mem::take(&mut self.pixel_values),
            ..self.without_content()
        })
    }
}

impl Batch for MicroBatch {
    fn step(&self) -> Step {
        self.step
    }

    fn samples(&self) -> &[u64] {
        &self.sample_indices
    }

    fn tokens(&self) -> u64 {
        Self::tokens(self)
    }

    fn cells(&self) -> usize {
        self.len() * self.seq_len
    }

    fn bytes(&self) -> u64 {
        Self::bytes(self)
    }

    fn features(&self) -> Option<&CachedFeatures> {
        self.features.as_ref()
    }

    fn features_mut(&mut self) -> &mut Option<CachedFeatures> {
        &mut self.features
    }

    fn with_features(&self, features: CachedFeatures) -> Box<dyn Batch> {
        Box::new(Self { features: Some(features), pixel_values: Vec::new(), ..self.clone() })
    }
}

/// Training samples that are read for the length of a prompt, until one can be.
const TRIED: u64 = 16;

impl Dataset {
    /// Tokens of the first training sample that can be read: one that cannot is left out by a run, and is no
    /// fault of the set.
    pub(super) fn prompt_tokens(&self) -> Result<usize, DataError> {
        let mut samples =
            (0..TRIED).map_while(|rank| self.training_sample(rank)).map(|index| self.sample(index));
        match samples.next() {
            Some(Err(fault)) => match samples.find_map(Result::ok) {
                Some(sample) => Ok(sample.input_ids.len()),
                None => Err(fault),
            },
            first => first.map_or(Ok(0), |sample| sample.map(|sample| sample.input_ids.len())),
        }
    }

    /// What belongs beside the results of a policy whose samples have these sizes.
    pub(super) fn text_files(&self, dims: SampleDims) -> Vec<TextFile> {
        let (path, text) = (STATS_FILE.to_owned(), self.stats().to_json());
        let stats = TextFile { path, what: "normalisation statistics", text };
        if starts_from_policy(&self.settings) {
            // Its own directory says what it takes and gives.
            return vec![stats];
        }
        let (path, text) = (PolicyFile::PATH.to_owned(), PolicyFile::from_dataset(self, dims).to_json());
        vec![stats, TextFile { path, what: "inputs and outputs of the policy", text }]
    }
}

/// A chunk that reaches beyond every episode: what is past an episode's end does not count, so that its last
/// actions are never learned.
fn chunk_too_long(dataset: &Dataset) -> Option<String> {
    let (horizon, stride) = (dataset.dims.horizon, dataset.settings.data.action_stride);
    let ahead = (horizon.max(1) - 1).saturating_mul(stride) as u64;
    let longest = dataset.catalog.episodes.episodes.iter().map(|episode| episode.length).max()?;
    (ahead >= longest).then(|| {
        format!(
            "data.horizon is {horizon} and data.action_stride {stride}: a chunk reaches {ahead} rows ahead, but the longest episode has \
             {longest} rows, so a chunk's last actions are never learned; lower one of the two keys"
        )
    })
}

/// Tasks that say nothing: their frames are learned with no instruction.
fn texts_empty(dataset: &Dataset) -> Option<String> {
    let tasks = &dataset.catalog.tasks;
    let mut empty = tasks.iter().filter(|(_, text)| text.trim().is_empty()).map(|(index, _)| index);
    let first = empty.next()?;
    let others = match empty.count() {
        0 => String::new(),
        more => format!(" ({} of {} task texts are empty)", more + 1, tasks.len()),
    };
    Some(format!(
        "{}: the text of task_index {first} is empty{others}: frames with an empty text are learned without an instruction; write what the robot does",
        dataset.catalog.info.tasks_path().display()
    ))
}

/// Task texts that are longer than the run keeps them.
fn texts_cut(dataset: &Dataset) -> Option<String> {
    let most = dataset.settings.observation.max_text_tokens?;
    let texts: Vec<_> = dataset.catalog.tasks.values().collect();
    let cut: Vec<_> =
        texts.iter().map(|text| (dataset.prompt.cut(text), text)).filter(|(cut, _)| *cut > 0).collect();
    let (lost, longest) = cut.iter().max()?;
    Some(format!(
        "observation.max_text_tokens: texts are cut after {most} tokens, which shortens {} of {} task texts; the longest loses {lost} tokens: {longest:?}",
        cut.len(),
        texts.len(),
    ))
}

impl RunData for Dataset {
    fn dims(&self) -> SampleDims {
        Self::dims(self)
    }

    fn set_of(&self, _: u64) -> Option<usize> {
        None
    }

    fn denormalize_actions(&self, _: u64, actions: &mut [f32]) {
        Self::denormalize_actions(self, actions);
    }

    fn action_names(&self, _: u64) -> Vec<String> {
        self.action.element_names()
    }

    fn scene(&self, index: u64) -> (String, Vec<(String, Rgb)>) {
        let task = self.at(index).and_then(|at| at.task().map(str::to_owned)).unwrap_or_default();
        let pictures = self.sample(index).map(|sample| pictures(&*self.images, &sample)).unwrap_or_default();
        // What it sees now comes last.
        let past = pictures.len().saturating_sub(self.cameras.len());
        let names = self.cameras.iter().map(|camera| camera.name.clone());
        (task, names.zip(pictures.into_iter().skip(past)).collect())
    }
}

impl Samples for Dataset {
    fn training(&self) -> &Arc<TrainingSamples> {
        &self.training
    }

    fn holdout(&self) -> Vec<u64> {
        Self::holdout(self).collect()
    }

    fn fingerprint(&self) -> Fingerprint {
        Self::fingerprint(self)
    }

    fn read(&self, index: u64) -> Result<Box<dyn coxswain_task::Sample>, DataError> {
        Ok(Box::new(self.sample(index)?))
    }

    fn read_in_epoch(&self, index: u64, epoch: u64) -> Result<Box<dyn coxswain_task::Sample>, DataError> {
        Ok(Box::new(self.sample_in_epoch(index, epoch)?))
    }

    fn is_remote(&self) -> bool {
        place::is_remote(&self.catalog.root)
    }

    fn pin(&self, run: &Path) -> Result<(), DataError> {
        let root = &self.catalog.root;
        let name = Digest::of("coxswain bucket objects v1", [("root", root.as_os_str().as_encoded_bytes())]);
        place::pin(root, &run.join(format!("objects-{}.txt", &name.to_string()[..8])))
    }

    fn bring(&self, index: u64) -> Result<(), DataError> {
        self.at(index)?.bring()
    }

    fn read_beside(
        &self,
        index: u64,
        inputs: Inputs,
    ) -> Result<Option<Box<dyn coxswain_task::Sample>>, DataError> {
        Ok(self.sample_beside(index, inputs)?.map(|sample| Box::new(sample) as _))
    }

    fn collate(&self, step: Step, samples: &[&dyn coxswain_task::Sample]) -> Box<dyn Batch> {
        let samples: Vec<&Sample> = samples.iter().map(|sample| sample.content()).collect();
        Box::new(collate(step, &samples, self.pad_token()))
    }

    fn take_apart(&self, batch: &dyn Batch) -> Vec<Box<dyn coxswain_task::Sample>> {
        let rows = take_apart(batch.content());
        rows.into_iter().map(|row| Box::new(row) as Box<dyn coxswain_task::Sample>).collect()
    }

    fn damaged_row(&self, index: u64, fault: &DataError) -> DamagedRow {
        Self::damaged_row(self, index, fault)
    }

    fn keys(&self, store: &Store) -> Result<SampleKeys, StoreError> {
        self.sample_keys(store)
    }

    fn ingredients(&self) -> Result<InputIngredients, StoreError> {
        let model = &self.settings.model.path;
        let away =
            |error| StoreError::Io { action: "read", path: model.into(), source: io::Error::other(error) };
        let path = tokenizer(&self.settings).map_err(away)?;
        let tokenizer = Digest::of_file(&path);
        Ok(InputIngredients {
            preprocessing: self.preprocessing(),
            prompt: self.prompt_template(),
            tokenizer: tokenizer.map_err(|source| StoreError::Io { action: "read", path, source })?,
        })
    }

    fn files(&self) -> Vec<TextFile> {
        self.text_files(self.dims())
    }

    fn describe(&self) -> Result<Vec<(&'static str, String)>, DataError> {
        let prompt = self.prompt_tokens()?;
        let left_out = self.selection.describe().map(|told| ("left_out", told));
        let names = self.cameras.iter().map(|camera| camera.name.trim_start_matches("observation.images."));
        let cameras = match names.collect::<Vec<_>>()[..] {
            [] => "no camera".to_owned(),
            [one] => format!("camera {one}"),
            ref several => format!("cameras {}", several.join(" and ")),
        };
        let (trained, all) = (self.selection.trained(), self.catalog.episodes.episodes.len());
        let told = format!("{trained} of {all} episodes, {cameras}, {prompt} prompt tokens a sample");
        Ok([("data", told)].into_iter().chain(left_out).collect())
    }

    fn warnings(&self) -> Vec<String> {
        odd_features(self)
            .into_iter()
            .chain(texts_empty(self))
            .chain(texts_cut(self))
            .chain(chunk_too_long(self))
            .collect()
    }
}
