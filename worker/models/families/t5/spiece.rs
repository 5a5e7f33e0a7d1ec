//! SentencePiece's own file (`spiece.model`, a protobuf) as a tokenizer, for directories that bring no
//! `tokenizer.json`: what Transformers converts it to.
//!
//! Read are unigram models, which all of T5 and mT5 are (arXiv 1804.10959).

use std::path::Path;

use coxswain_data::DataError;
use coxswain_proto::{bounded, limits::MAX_TOKENIZER_BYTES};
use prost::Message;
use tokenizers::{
    AddedToken, Tokenizer,
    models::unigram::Unigram,
    normalizers::{Precompiled, Replace, Sequence, Strip, replace::ReplacePattern},
    pre_tokenizers::metaspace::{Metaspace, PrependScheme},
};

/// The sentinels of a T5, `<extra_id_0>` the last: they are not in the file.
const SENTINELS: usize = 100;
/// What a space is written as.
const SPACE: char = '▁';
/// Kinds of pieces that stand for no text: unknown, control, and unused.
const SPECIAL: [i32; 3] = [2, 3, 5];

/// As far as ids depend on it (sentencepiece_model.proto).
#[derive(Clone, PartialEq, Message)]
struct ModelProto {
    #[prost(message, repeated, tag = "1")]
    pieces: Vec<StoredPiece>,
    #[prost(message, optional, tag = "2")]
    trainer: Option<Trainer>,
    #[prost(message, optional, tag = "3")]
    normalizer: Option<Normalizer>,
}

#[derive(Clone, PartialEq, Message)]
struct StoredPiece {
    #[prost(string, optional, tag = "1")]
    piece: Option<String>,
    #[prost(float, optional, tag = "2")]
    score: Option<f32>,
    #[prost(int32, optional, tag = "3")]
    kind: Option<i32>,
}

#[derive(Clone, PartialEq, Message)]
struct Trainer {
    /// 1: unigram.
    #[prost(int32, optional, tag = "3")]
    model_type: Option<i32>,
    #[prost(bool, optional, tag = "35")]
    byte_fallback: Option<bool>,
    #[prost(int32, optional, tag = "40")]
    unk_id: Option<i32>,
}

#[derive(Clone, PartialEq, Message)]
struct Normalizer {
    #[prost(bytes = "vec", optional, tag = "2")]
    precompiled_charsmap: Option<Vec<u8>>,
}

/// Reads the file; `sentinels` says whether ids above its own are T5's sentinels.
pub fn read(path: &Path, sentinels: bool) -> Result<Tokenizer, DataError> {
    let refused = |found: String| {
        let remedy = "copy the checkpoint's spiece.model again, or save a tokenizer.json beside it";
        DataError::invalid(path, "(file)", found, remedy)
    };
    let bytes = bounded::read(path, MAX_TOKENIZER_BYTES).map_err(DataError::io(path, "read"))?;
    let model =
        ModelProto::decode(&*bytes).map_err(|error| refused(format!("not SentencePiece's: {error}")))?;
    let trainer = model.trainer.unwrap_or_default();
    if let Some(kind) = trainer.model_type.filter(|kind| *kind != 1) {
        return Err(refused(format!("a model of type {kind}; only unigram (1) is read")));
    }
    let piece =
        |piece: &StoredPiece| (piece.piece.clone().unwrap_or_default(), piece.score.unwrap_or(0.0).into());
    let mut vocab: Vec<(String, f64)> = model.pieces.iter().map(piece).collect();
    let special = model.pieces.iter().filter(|piece| piece.kind.is_some_and(|kind| SPECIAL.contains(&kind)));
    let mut special: Vec<String> = special.filter_map(|piece| piece.piece.clone()).collect();
    if sentinels {
        let names = (0..SENTINELS).rev().map(|number| format!("<extra_id_{number}>"));
        let names: Vec<String> = names.collect();
        vocab.extend(names.iter().map(|name| (name.clone(), 0.0)));
        special.extend(names);
    }
    let unknown = usize::try_from(trainer.unk_id.unwrap_or(0)).ok();
    let told = |error: tokenizers::Error| refused(error.to_string());
    let unigram = Unigram::from(vocab, unknown, trainer.byte_fallback.unwrap_or(false)).map_err(told)?;
    let mut tokenizer = Tokenizer::new(unigram);
    let charsmap = model.normalizer.and_then(|normalizer| normalizer.precompiled_charsmap);
    let charsmap = charsmap.filter(|map| !map.is_empty()).map(|map| Precompiled::from(&map));
    let charsmap = charsmap.transpose().map_err(|error| refused(error.to_string()))?;
    // As Transformers' converter has it: trailing spaces go, runs of them become one.
    let spaces = ReplacePattern::Regex(" {2,}".into());
    let spaces = Replace::new(spaces, SPACE.to_string()).map_err(told)?;
    let tail = [Strip::new(false, true).into(), spaces.into()];
    tokenizer
        .with_normalizer(Some(Sequence::new(charsmap.map(Into::into).into_iter().chain(tail).collect())));
    tokenizer.with_pre_tokenizer(Some(Metaspace::new(SPACE, PrependScheme::Always, true)));
    tokenizer.with_decoder(Some(Metaspace::new(SPACE, PrependScheme::Always, true)));
    let special: Vec<_> = special.into_iter().map(|token| AddedToken::from(token, true)).collect();
    tokenizer.add_special_tokens(&special);
    Ok(tokenizer)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn hostile_pieces_are_refused_or_made_a_tokenizer_of() {
        let tiny = concat!(env!("CARGO_MANIFEST_DIR"), "/../../configs/assets/tiny-t5/spiece.model");
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("spiece.model");
        let sample = fs::read(tiny).expect("it ships");
        coxswain_fuzz::Target::new("spiece.model", [sample]).holds(4 << 20, 1024).check(|bytes| {
            fs::write(&path, bytes).expect("it has space");
            if let Ok(tokenizer) = read(&path, true) {
                drop(tokenizer.encode_fast("translate: <extra_id_0> \u{3000}\u{200d}", false));
            }
        });
    }
}
