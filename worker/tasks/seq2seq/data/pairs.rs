//! A file of pairs as a run sees it: which of them train, and each as ids.
//!
//! [`Pairs::from_spec`] reads every record, so that what people can mend is said before anything starts. What
//! only shows when a text is encoded (a token beyond the vocabulary) is the pair's own fault: the run goes on
//! without it.

use std::{path::Path, sync::Arc};

use coxswain_data::{DataError, Fingerprint, TrainingSamples, surviving::surviving};
use coxswain_models::{Shelf, pretrained::directory, text_to_text::TextTokenizer};
use coxswain_nn::kernels::sizes::Sizes;
use coxswain_proto::{ids::Step, order::DamagedRow, run_spec::RunSpec};
use coxswain_task::{Batch, Sample, Samples};

use super::{
    batch::{PairBatch, PairSample},
    table::{Pair, Table},
};
use crate::{
    holdout::Holdout,
    seq2seq::config::{PairData, Seq2SeqSettings},
    settings::{checked, unread},
};

/// An opened file of pairs. Shared between threads.
pub struct Pairs {
    table: Table,
    tokenizer: Box<dyn TextTokenizer>,
    data: PairData,
    /// Pad and the decoder's start.
    special: [u32; 2],
    holdout: Holdout,
}

impl Pairs {
    /// Opens the run's file, and what samples are made with.
    pub fn from_spec(spec: &RunSpec, models: Shelf<Sizes>) -> Result<Self, DataError> {
        let Seq2SeqSettings { model, data, .. } = checked(Seq2SeqSettings::from_spec(spec))?;
        let (path, model) = (Path::new(&spec.data.path), &directory::outline(&model.path)?);
        let table = Table::read_file(path, [&data.source, &data.target])?;
        let holdout = Holdout::new(path, "pair", "write a pair per record", table.len(), data.holdout_every)?;
        let family = models.text_to_text.of(model).map_err(unread)?;
        let outline = family.outline(model).map_err(unread)?;
        let tokenizer = family.tokenizer(model)?;
        let special = [outline.special.pad, outline.special.decoder_start];
        Ok(Self { table, tokenizer, data, special, holdout })
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
    pub fn tokenizer(&self) -> &dyn TextTokenizer {
        &*self.tokenizer
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

impl Samples for Pairs {
    fn training(&self) -> &Arc<TrainingSamples> {
        self.holdout.training()
    }

    fn holdout(&self) -> Vec<u64> {
        self.holdout.held_out()
    }

    fn fingerprint(&self) -> Fingerprint {
        self.table.lines().fingerprint()
    }

    fn read(&self, index: u64) -> Result<Box<dyn Sample>, DataError> {
        Ok(Box::new(self.sample(index)?))
    }

    fn doubts(&self, sample: &dyn Sample) -> Vec<(&'static str, DataError)> {
        let sample: &PairSample = sample.content();
        let Ok(pair) = self.table.pair(sample.index) else { return Vec::new() };
        let doubt = |kind, what| (kind, self.table.fault(sample.index, what));
        let mut doubts = Vec::new();
        if pair.source.trim().is_empty() {
            doubts.push(doubt("empty", "the source is empty; fill it in, or remove the pair".into()));
        }
        let source = format!("{}{}", self.data.source_prefix, pair.source);
        for (ids, text, key) in [
            (&sample.source, &source, "data.max_source_tokens"),
            (&sample.target, &pair.target, "data.max_target_tokens"),
        ] {
            let whole = self.tokenizer.ids(text, usize::MAX).map_or(0, |whole| whole.len());
            if let Some(over) = whole.checked_sub(ids.len()).filter(|over| *over > 0) {
                let what = format!("{whole} tokens, {over} too many: the end is cut off; raise {key}");
                doubts.push(doubt("cut", what));
            }
        }
        doubts
    }

    fn collate(&self, step: Step, samples: &[&dyn Sample]) -> Box<dyn Batch> {
        let samples: Vec<&PairSample> = samples.iter().map(|sample| sample.content()).collect();
        Box::new(PairBatch::from_samples(step, &samples, self.special))
    }

    fn take_apart(&self, batch: &dyn Batch) -> Vec<Box<dyn Sample>> {
        let pairs = batch.content::<PairBatch>().apart();
        pairs.into_iter().map(|pair| Box::new(pair) as Box<dyn Sample>).collect()
    }

    fn damaged_row(&self, index: u64, _fault: &DataError) -> DamagedRow {
        self.holdout.damaged(index)
    }

    fn describe(&self) -> Result<Vec<(&'static str, String)>, DataError> {
        let mut told = vec![("pairs", format!("{} pairs, {}", self.len(), self.holdout.describe()))];
        if let Some(first) = self.training().get(0) {
            let PairSample { source, target, .. } = self.sample(first)?;
            told.push((
                "first_pair",
                format!("the first has {} source tokens and {} target tokens", source.len(), target.len()),
            ));
        }
        told.push(("tokenizer", format!("tokenizer {}", self.tokenizer.path().display())));
        Ok(told)
    }
}
