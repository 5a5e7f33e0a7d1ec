//! How large a run's samples are: what a memory prediction needs to know of the data.
//!
//! Sizes are those of the *longest* texts: the largest micro-batch is what has to fit. Without a tokenizer (a
//! plan from a configuration alone) every text is as long as it may be.

use std::path::Path;

use coxswain_data::DataError;
use coxswain_models::{Shelf, pretrained::directory, text_to_text::TextTokenizer};
use coxswain_nn::kernels::sizes::Sizes;
use coxswain_proto::run_spec::RunSpec;

use super::table::{Pair, Table};
use crate::{
    holdout::trained,
    seq2seq::config::{PairData, Seq2SeqSettings},
    settings::unread,
    tokens::outline::{SMALL_TOKENIZER, estimated, looked_at},
};

/// Sizes of a run's samples.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PairOutline {
    /// Tokens of the longest source, its end included.
    pub source: usize,
    /// Tokens of the longest target, its end included.
    pub target: usize,
    /// Whether tokens are an estimate.
    pub estimated: bool,
    /// Pairs that train.
    pub pairs: u64,
    /// Bytes of the tokenizer's file; 0 if there is none.
    pub tokenizer_bytes: u64,
}

impl PairOutline {
    /// Reads the run's pairs, and of its checkpoint what sizes depend on.
    pub fn from_settings(
        spec: &RunSpec,
        Seq2SeqSettings { model, data, .. }: &Seq2SeqSettings,
        models: Shelf<Sizes>,
    ) -> Result<Self, DataError> {
        let model = &directory::outline(&model.path)?;
        let table = Table::read_file(Path::new(&spec.data.path), [&data.source, &data.target])?;
        let pairs = trained(table.len(), data.holdout_every);
        let family = models.text_to_text.of(model).map_err(unread)?;
        let bytes = family.tokenizer_file(model).and_then(|file| std::fs::metadata(file).ok());
        let Some(tokenizer_bytes) = bytes.map(|file| file.len()) else {
            let (source, target) = (data.max_source_tokens, data.max_target_tokens);
            return Ok(Self { source, target, estimated: true, pairs, tokenizer_bytes: 0 });
        };
        let small = tokenizer_bytes <= SMALL_TOKENIZER;
        let tokenizer = small.then(|| family.tokenizer(model)).transpose()?;
        let looked_at = looked_at(table.len());
        let estimated = tokenizer.is_none() || (looked_at.len() as u64) < table.len();
        let mut outline = Self { tokenizer_bytes, estimated, pairs, ..Self::default() };
        for index in looked_at {
            let lengths = lengths(&table.pair(index)?, data, tokenizer.as_deref());
            let [source, target] = lengths.map_err(|fault| table.fault(index, fault))?;
            outline.source = outline.source.max(source);
            outline.target = outline.target.max(target);
        }
        Ok(outline)
    }
}

/// Tokens of source and target.
fn lengths(
    pair: &Pair,
    data: &PairData,
    tokenizer: Option<&dyn TextTokenizer>,
) -> Result<[usize; 2], String> {
    let source = format!("{}{}", data.source_prefix, pair.source);
    let of = |text: &str, most: usize| match tokenizer {
        Some(tokenizer) => tokenizer.ids(text, most).map(|ids| ids.len()),
        None => Ok((estimated(text.len()) + 1).min(most)),
    };
    Ok([of(&source, data.max_source_tokens)?, of(&pair.target, data.max_target_tokens)?])
}
