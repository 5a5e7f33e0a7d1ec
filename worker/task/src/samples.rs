//! The opened data of a run, as its task sees it.

use std::{any::Any, path::Path, sync::Arc};

use coxswain_data::{DataError, Fingerprint, SampleOrder, TrainingSamples};
use coxswain_feature_store::{Digest, SampleKey, Store, StoreError};
use coxswain_proto::{
    ids::Step,
    order::{DamagedRow, SetShare},
};

use crate::{Batch, Inputs, Sample, batch::KEEPS_NOTHING};

/// Keys of all samples of a data set, by index; 33 bytes each.
pub struct SampleKeys {
    keys: Vec<Option<SampleKey>>,
    /// Inputs that were read and hashed for this table; 0 if all were remembered.
    pub inputs_read: u64,
}

impl SampleKeys {
    /// From the keys by index, none for samples that could not be read.
    pub fn new(keys: Vec<Option<SampleKey>>, inputs_read: u64) -> Self {
        Self { keys, inputs_read }
    }

    /// The key of sample `index`; none if it could not be read, or does not exist.
    pub fn get(&self, index: u64) -> Option<SampleKey> {
        self.keys.get(usize::try_from(index).ok()?).copied().flatten()
    }

    /// Bytes of memory that they take.
    pub fn bytes(&self) -> u64 {
        size_of_val(&*self.keys) as u64
    }

    /// Samples that have a key.
    pub fn len(&self) -> usize {
        self.keys.iter().flatten().count()
    }

    /// True if no sample has a key.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// How inputs are made: what features depend on besides sample and model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InputIngredients {
    /// How images become the model's input, in words.
    pub preprocessing: String,
    /// What stands around the sample's own text.
    pub prompt: String,
    /// The tokenizer's file.
    pub tokenizer: Digest,
}

/// A text that goes beside a run's results.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TextFile {
    /// Name in the run's directory; one below another directory is made with it.
    pub path: String,
    /// What it is, for the manifest.
    pub what: &'static str,
    /// Content.
    pub text: String,
}

/// Samples that could be read, and what is wrong with the others.
#[derive(Debug, Default)]
pub struct Readable {
    /// In the order asked for.
    pub samples: Vec<Box<dyn Sample>>,
    /// One for each sample that is not there.
    pub faults: Vec<DataError>,
}

/// An opened data set. Shared between threads, which read samples side by side. A task without an
/// [`Extractor`](super::Extractor) leaves [`Samples::read_beside`], [`Samples::keys`] and
/// [`Samples::ingredients`] as they are.
pub trait Samples: Any + Send + Sync {
    /// Samples that are trained on.
    fn training(&self) -> &Arc<TrainingSamples>;

    /// Samples that are held out, in order.
    fn holdout(&self) -> Vec<u64>;

    /// What an epoch takes of each set of a mixture, whose samples are numbered one set after another; empty
    /// where there is one data set, of which an epoch takes everything.
    fn shares(&self) -> &[SetShare] {
        &[]
    }

    /// Names the content, and keys the order of samples.
    fn fingerprint(&self) -> Fingerprint;

    /// Sample `index`, as it was recorded: what is evaluated, compared and kept.
    fn read(&self, index: u64) -> Result<Box<dyn Sample>, DataError>;

    /// What of a sample that can be read is probably not meant so, for people: a word for it, and where it
    /// lies with what is there.
    fn doubts(&self, _sample: &dyn Sample) -> Vec<(&'static str, DataError)> {
        Vec::new()
    }

    /// Sample `index` as a step of this epoch trains on it: a task that changes its inputs at random draws by
    /// seed, epoch and index alone.
    fn read_in_epoch(&self, index: u64, _epoch: u64) -> Result<Box<dyn Sample>, DataError> {
        self.read(index)
    }

    /// Sample `index` with these inputs, without those that its features stand for; reads as little as that
    /// takes. None if they are not the sample's own: those of another one under the same key.
    fn read_beside(&self, _index: u64, _inputs: Inputs) -> Result<Option<Box<dyn Sample>>, DataError> {
        unreachable!("{KEEPS_NOTHING}")
    }

    /// Whether samples lie in a bucket or on a server, where a request takes as long as many samples.
    fn is_remote(&self) -> bool {
        false
    }

    /// Compares what lies in a bucket with what it was when the run of this directory began, or notes that.
    fn pin(&self, _run: &Path) -> Result<(), DataError> {
        Ok(())
    }

    /// Brings what reading sample `index` takes, if [`Samples::is_remote`]; called side by side for samples
    /// whose turn comes soon. What fails here fails again where the sample is read.
    fn bring(&self, _index: u64) -> Result<(), DataError> {
        Ok(())
    }

    /// A batch of these samples, in this order.
    fn collate(&self, step: Step, samples: &[&dyn Sample]) -> Box<dyn Batch>;

    /// What [`Samples::collate`] was given.
    fn take_apart(&self, batch: &dyn Batch) -> Vec<Box<dyn Sample>>;

    /// What of the data set is to blame that sample `index` cannot be used, and which other samples need it.
    fn damaged_row(&self, index: u64, fault: &DataError) -> DamagedRow;

    /// Keys of all samples by content, from the store's memo and, where that does not know them, from the
    /// files.
    fn keys(&self, _store: &Store) -> Result<SampleKeys, StoreError> {
        unreachable!("{KEEPS_NOTHING}")
    }

    /// What features depend on besides sample and model.
    fn ingredients(&self) -> Result<InputIngredients, StoreError> {
        unreachable!("{KEEPS_NOTHING}")
    }

    /// What belongs beside the run's results, normalisation statistics for instance.
    fn files(&self) -> Vec<TextFile> {
        Vec::new()
    }

    /// Lines of `cox check` about the data: label and text.
    fn describe(&self) -> Result<Vec<(&'static str, String)>, DataError>;

    /// What in the data can be trained on and is probably not meant so: a line each, with what to do.
    fn warnings(&self) -> Vec<String> {
        Vec::new()
    }
}

impl dyn Samples {
    /// The data set itself, if it is of this type.
    pub fn downcast_ref<S: Samples>(&self) -> Option<&S> {
        (self as &dyn Any).downcast_ref()
    }

    /// Samples that are trained on.
    pub fn training_len(&self) -> u64 {
        self.training().len()
    }

    /// Samples of an epoch.
    pub fn epoch_len(&self) -> u64 {
        self.order(0).len()
    }

    /// The training sample that has so many before it in the data set.
    pub fn training_sample(&self, number: u64) -> Option<u64> {
        self.training().get(number)
    }

    /// The order of training samples under a run's seed.
    pub fn order(&self, seed: u64) -> SampleOrder {
        SampleOrder::new(seed, self.fingerprint(), self.training().clone()).of_sets(self.shares())
    }

    /// The samples among these that can be read, as they were recorded.
    pub fn readable(&self, indices: &[u64]) -> Readable {
        let mut readable = Readable::default();
        for &index in indices {
            match self.read(index) {
                Ok(sample) => readable.samples.push(sample),
                Err(fault) => readable.faults.push(fault),
            }
        }
        readable
    }

    /// A batch of these samples, in this order.
    pub fn batch(&self, step: Step, samples: &[Box<dyn Sample>]) -> Box<dyn Batch> {
        let samples: Vec<&dyn Sample> = samples.iter().map(|sample| &**sample).collect();
        self.collate(step, &samples)
    }
}
