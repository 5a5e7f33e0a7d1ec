//! The input file of `cox model forward` for a T5: tensors as Transformers takes them, checked.

use std::path::Path;

use coxswain_nn::next_token::TokenTargets;
use coxswain_proto::bounded;
use safetensors::{Dtype, SafeTensors};

use super::config::T5Config;
use crate::pretrained::error::ModelError;

/// Labels of this value are not predicted.
const IGNORED_LABEL: i64 = -100;

/// Tensors of one forward pass.
#[derive(Clone, Debug, PartialEq)]
pub struct SeqInputs {
    /// Rows.
    pub batch: usize,
    /// `[b, s]`.
    pub source: Vec<u32>,
    /// `[b, s]`.
    pub seen: Vec<bool>,
    /// What the decoder reads, `[b, t]`: labels shifted right.
    pub target: Vec<u32>,
    /// What it is to write.
    pub targets: TokenTargets,
    /// One word a token of sources, and of targets, by which adapters drop what they read.
    pub dropout_rows: Option<[Vec<u64>; 2]>,
}

/// `[b, s]` integers and `s`.
type Rows = (Vec<i64>, usize);

impl SeqInputs {
    /// Reads and checks the file.
    pub fn read(path: &Path, config: &T5Config) -> Result<Self, ModelError> {
        let bytes = bounded::read(path, u64::MAX).map_err(|source| ModelError::Io {
            path: path.into(),
            source,
            remedy: "name a safetensors file with input_ids, attention_mask and labels",
        })?;
        let tensors = SafeTensors::deserialize(&bytes).map_err(|error| ModelError::Safetensors {
            path: path.into(),
            problem: format!("not a valid safetensors file ({error})"),
        })?;
        let file = File { path, tensors };
        let (source, len) = file.rows("input_ids")?;
        let batch = source.len() / len;
        let source = file.ids("input_ids", source, config.vocab_size)?;
        let seen = match file.tensors.tensor("attention_mask") {
            Err(_) => vec![true; source.len()],
            Ok(_) => file.mask(batch, len)?,
        };
        let (labels, len) = file.rows("labels")?;
        if labels.len() / len != batch {
            let problem = format!("{} rows; input_ids has {batch}", labels.len() / len);
            return Err(file.error("labels", problem));
        }
        let known = |label: i64| if label == IGNORED_LABEL { config.special.pad.into() } else { label };
        let ids =
            file.ids("labels", labels.iter().map(|&label| known(label)).collect(), config.vocab_size)?;
        let learned = labels.iter().zip(&ids).map(|(&label, &id)| (label != IGNORED_LABEL).then_some(id));
        let targets = TokenTargets::of(learned);
        if targets.rows.is_empty() {
            return Err(file.error("labels", format!("every label is {IGNORED_LABEL}: nothing to predict")));
        }
        let target = shifted(&ids, len, config.special.decoder_start);
        let words = ["dropout_rows", "decoder_dropout_rows"].map(|name| file.words(name));
        let dropout_rows = match words {
            [Some(source_words), Some(target_words)] => Some([source_words?, target_words?]),
            _ => None,
        };
        let fits = |[of_source, of_target]: &[Vec<u64>; 2]| {
            of_source.len() == source.len() && of_target.len() == target.len()
        };
        if !dropout_rows.as_ref().is_none_or(fits) {
            let problem = "expected one value per input token, and decoder_dropout_rows one per label";
            return Err(file.error("dropout_rows", problem.into()));
        }
        Ok(Self { batch, source, seen, target, targets, dropout_rows })
    }
}

/// Rows of `len` ids, each moved right by one behind `start`.
pub fn shifted(ids: &[u32], len: usize, start: u32) -> Vec<u32> {
    let rows = ids.chunks(len.max(1));
    rows.flat_map(|row| std::iter::once(start).chain(row[..row.len() - 1].iter().copied())).collect()
}

struct File<'a> {
    path: &'a Path,
    tensors: SafeTensors<'a>,
}

impl File<'_> {
    fn rows(&self, name: &'static str) -> Result<Rows, ModelError> {
        let Ok(view) = self.tensors.tensor(name) else {
            return Err(self.error(name, "missing; expected i64 [batch, tokens]".into()));
        };
        let &[batch, len] = view.shape() else {
            return Err(self.error(name, format!("shape {:?}; expected two axes", view.shape())));
        };
        if batch * len == 0 {
            return Err(self.error(name, "no tokens".into()));
        }
        if view.dtype() != Dtype::I64 {
            return Err(self.error(name, format!("stored as {:?}; expected I64", view.dtype())));
        }
        Ok((view.data().as_chunks().0.iter().map(|le| i64::from_le_bytes(*le)).collect(), len))
    }

    fn mask(&self, batch: usize, len: usize) -> Result<Vec<bool>, ModelError> {
        let (mask, found) = self.rows("attention_mask")?;
        if found != len || mask.len() != batch * len {
            let problem = format!("shape [{}, {found}]; input_ids has [{batch}, {len}]", mask.len() / found);
            return Err(self.error("attention_mask", problem));
        }
        Ok(mask.into_iter().map(|seen| seen != 0).collect())
    }

    fn words(&self, name: &'static str) -> Option<Result<Vec<u64>, ModelError>> {
        let there = self.tensors.tensor(name).is_ok();
        there.then(|| self.rows(name).map(|(words, _)| words.into_iter().map(i64::cast_unsigned).collect()))
    }

    fn ids(&self, name: &'static str, values: Vec<i64>, vocab: usize) -> Result<Vec<u32>, ModelError> {
        let checked = values.into_iter().map(|id| match u32::try_from(id) {
            Ok(id) if (id as usize) < vocab => Ok(id),
            _ => Err(self.error(name, format!("token id {id} is outside the vocabulary ({vocab} entries)"))),
        });
        checked.collect()
    }

    fn error(&self, tensor: &'static str, problem: String) -> ModelError {
        ModelError::Input { path: self.path.into(), tensor, problem }
    }
}
