//! A file of pairs as a run sees it: which of them train, and each as ids.
//!
//! [`Pairs::open`] reads every record, so that what people can mend is said before anything starts. What only
//! shows when a text is encoded (a token beyond the vocabulary) is the pair's own fault: the run goes on
//! without it.

use std::{any::Any, path::Path, sync::Arc};

use coxswain_data::{DataError, Fingerprint, TrainingSamples, surviving::surviving};
use coxswain_models::t5::{T5Config, tokenizer::TextTokenizer};
use coxswain_proto::{ids::Step, order::DamagedRow, run_spec::RunSpec};
use coxswain_task::{Batch, Sample, Samples};

use super::{
    batch::{PairBatch, PairSample},
    table::{Pair, Table},
};
use crate::{
    seq2seq::config::{PairData, Seq2SeqSettings},
    sft::data::training,
};

/// An opened file of pairs. Shared between threads.
pub struct Pairs {
    table: Table,
    tokenizer: TextTokenizer,
    data: PairData,
    /// Pad and the decoder's start.
    special: [u32; 2],
    training: Arc<TrainingSamples>,
}

impl Pairs {
    /// Opens the run's file, and what samples are made with.
    pub fn open(spec: &RunSpec) -> Result<Self, DataError> {
        let Seq2SeqSettings { model, data, .. } = settings(spec)?;
        let (path, model) = (Path::new(&spec.data.path), Path::new(&model.path));
        let table = Table::open(path, [&data.source, &data.target])?;
        let training = Arc::new(training(table.len(), data.holdout_every));
        if training.is_empty() {
            let found = format!("{} pairs, of which none is left to train on", table.len());
            let remedy = "write one pair a record, and at least two where data.holdout_every holds one out";
            return Err(DataError::invalid(path, "(file)", found, remedy));
        }
        let config = config(model)?;
        let tokenizer = TextTokenizer::open(model, &config)?;
        Ok(Self {
            table,
            tokenizer,
            data,
            special: [config.special.pad, config.special.decoder_start],
            training,
        })
    }

    /// Pairs, held-out ones included.
    pub fn len(&self) -> u64 {
        self.table.len()
    }

    /// Never true: opening refuses an empty file.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The texts of pair `index`.
    pub fn texts(&self, index: u64) -> Result<Pair, DataError> {
        self.table.pair(index)
    }

    /// What makes ids of texts.
    pub fn tokenizer(&self) -> &TextTokenizer {
        &self.tokenizer
    }

    /// Pair `index`, as training sees it.
    pub fn sample(&self, index: u64) -> Result<PairSample, DataError> {
        let pair = self.table.pair(index)?;
        let refuse = |fault| self.table.fault(index, fault);
        surviving(|| self.encoded(index, &pair).map_err(refuse), refuse)
    }

    fn encoded(&self, index: u64, pair: &Pair) -> Result<PairSample, String> {
        let data = &self.data;
        let source = format!("{}{}", data.source_prefix, pair.source);
        Ok(PairSample {
            index,
            source: self.tokenizer.ids(&source, data.max_source_tokens)?,
            target: self.tokenizer.ids(&pair.target, data.max_target_tokens)?,
        })
    }
}

/// Sizes and special tokens of the run's model.
pub(in crate::seq2seq) fn config(model: &Path) -> Result<T5Config, DataError> {
    T5Config::read(model).map_err(|error| DataError::Invalid {
        path: model.into(),
        field: "model.path".into(),
        found: error.to_string(),
        remedy: "name the Hugging Face directory of a T5 or mT5 checkpoint".into(),
    })
}

/// The task's keys. They have been checked, unless the specification did not come through the engine; then
/// they are refused.
pub(super) fn settings(spec: &RunSpec) -> Result<Seq2SeqSettings, DataError> {
    Seq2SeqSettings::of(spec).map_err(|error| DataError::Invalid {
        path: "the run's specification".into(),
        field: "task".into(),
        found: error.to_string(),
        remedy: "read it from a run file, or check it against the task's schema".into(),
    })
}

impl Samples for Pairs {
    fn training(&self) -> &Arc<TrainingSamples> {
        &self.training
    }

    fn holdout(&self) -> Vec<u64> {
        (0..self.len()).filter(|index| self.training.number(*index).is_none()).collect()
    }

    fn fingerprint(&self) -> Fingerprint {
        self.table.lines().fingerprint()
    }

    fn read(&self, index: u64) -> Result<Box<dyn Sample>, DataError> {
        Ok(Box::new(self.sample(index)?))
    }

    fn collate(&self, step: Step, samples: &[&dyn Sample]) -> Box<dyn Batch> {
        let samples: Vec<&PairSample> = samples.iter().map(|sample| sample.content()).collect();
        Box::new(PairBatch::of(step, &samples, self.special))
    }

    fn take_apart(&self, batch: &dyn Batch) -> Vec<Box<dyn Sample>> {
        let pairs = batch.content::<PairBatch>().apart();
        pairs.into_iter().map(|pair| Box::new(pair) as Box<dyn Sample>).collect()
    }

    fn damaged_row(&self, index: u64, _fault: &DataError) -> DamagedRow {
        // A record is needed by its own sample alone.
        let begin = self.training.number(index).unwrap_or_default();
        DamagedRow { row: index, begin, end: begin + 1 }
    }

    fn describe(&self) -> Result<Vec<(&'static str, String)>, DataError> {
        let held_out = match self.data.holdout_every {
            0 => "none held out".to_owned(),
            every => format!("one of {every} held out"),
        };
        let mut told = vec![("pairs", format!("{} pairs, {held_out}", self.len()))];
        if let Some(first) = self.training.get(0) {
            let PairSample { source, target, .. } = self.sample(first)?;
            told.push(("first_pair", format!("{} tokens become {}", source.len(), target.len())));
        }
        told.push(("tokenizer", self.tokenizer.path().display().to_string()));
        Ok(told)
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}
