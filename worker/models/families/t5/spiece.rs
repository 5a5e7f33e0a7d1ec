//! SentencePiece's own file (`spiece.model`, a protobuf) as a tokenizer, for directories that bring no
//! `tokenizer.json`: what Transformers converts it to.
//!
//! Read are unigram models, which all of T5 and mT5 are (arXiv 1804.10959).
//!
//! Ids above the file's own are, as Transformers numbers them: the sentinels, `<extra_id_0>` the last, as
//! many as `extra_ids` of `tokenizer_config.json` says, and then the tokens that were added: of
//! `added_tokens_decoder` there, or of `added_tokens.json`, and of `additional_special_tokens`.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::Path,
};

use coxswain_data::{DataError, text::read_json};
use coxswain_proto::{bounded, limits::MAX_TOKENIZER_BYTES};
use prost::Message;
use serde_json::Value;
use tokenizers::{
    AddedToken, Tokenizer,
    models::unigram::Unigram,
    normalizers::{Precompiled, Replace, Sequence, Strip, replace::ReplacePattern},
    pre_tokenizers::metaspace::{Metaspace, PrependScheme},
};

/// The sentinels, where nothing says how many.
const SENTINELS: usize = 100;
/// Tokens that are added at most.
const ADDED: usize = 1 << 16;
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

/// Tokens beside the file's own pieces.
#[derive(Debug, Default, PartialEq)]
struct AddedTokens {
    /// Sentinels.
    sentinels: usize,
    /// Tokens that were added, by id.
    added: BTreeMap<u32, AddedToken>,
    /// Further special ones, which have the next ids.
    special: Vec<String>,
}

impl AddedTokens {
    /// What stands beside the file at `path`.
    fn read_beside(path: &Path) -> Result<Self, DataError> {
        let json = |name: &str| -> Result<Value, DataError> {
            let file = path.with_file_name(name);
            if file.is_file() { read_json(&file) } else { Ok(Value::Null) }
        };
        let config = json("tokenizer_config.json")?;
        let sentinels =
            config["extra_ids"].as_u64().map_or(SENTINELS, |count| count.min(ADDED as u64) as usize);
        let flag = |token: &Value, name: &str| token[name].as_bool().unwrap_or(false);
        let mut added = BTreeMap::new();
        for (id, token) in config["added_tokens_decoder"].as_object().into_iter().flatten() {
            let (Ok(id), Some(text)) = (id.parse(), token["content"].as_str()) else { continue };
            let new = AddedToken::from(text, flag(token, "special"))
                .normalized(flag(token, "normalized"))
                .single_word(flag(token, "single_word"))
                .lstrip(flag(token, "lstrip"))
                .rstrip(flag(token, "rstrip"));
            added.insert(id, new);
        }
        for (text, id) in json("added_tokens.json")?.as_object().into_iter().flatten() {
            let id = id.as_u64().and_then(|id| u32::try_from(id).ok());
            id.map(|id| added.entry(id).or_insert_with(|| AddedToken::from(text, false).normalized(false)));
        }
        let text = |token: &Value| token.as_str().or_else(|| token["content"].as_str()).map(str::to_owned);
        let special = config["additional_special_tokens"].as_array().into_iter().flatten().filter_map(text);
        Ok(Self { sentinels, added, special: special.collect() })
    }
}

/// Reads the file, and what stands beside it.
pub fn read(path: &Path) -> Result<Tokenizer, DataError> {
    let refused = |found: String| {
        let remedy =
            "copy the checkpoint's spiece.model again, or save a tokenizer.json in the same directory";
        DataError::invalid(path, "(file)", found, remedy)
    };
    let bytes = bounded::read(path, MAX_TOKENIZER_BYTES).map_err(DataError::io(path, "read"))?;
    let model = ModelProto::decode(&*bytes)
        .map_err(|error| refused(format!("not a SentencePiece model: {error}")))?;
    let trainer = model.trainer.unwrap_or_default();
    if let Some(kind) = trainer.model_type.filter(|kind| *kind != 1) {
        return Err(refused(format!("SentencePiece model type {kind}; only type 1 (unigram) is supported")));
    }
    let piece =
        |piece: &StoredPiece| (piece.piece.clone().unwrap_or_default(), piece.score.unwrap_or(0.0).into());
    let mut vocab: Vec<(String, f64)> = model.pieces.iter().map(piece).collect();
    let special = model.pieces.iter().filter(|piece| piece.kind.is_some_and(|kind| SPECIAL.contains(&kind)));
    let mut special: Vec<String> = special.filter_map(|piece| piece.piece.clone()).collect();
    let beside = AddedTokens::read_beside(path)?;
    let sentinels: Vec<_> =
        (0..beside.sentinels).rev().map(|number| format!("<extra_id_{number}>")).collect();
    vocab.extend(sentinels.iter().map(|name| (name.clone(), 0.0)));
    special.extend(sentinels);
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
    add(&mut tokenizer, &beside).map_err(|found| {
        let remedy =
            "copy the checkpoint's tokenizer files again, or save a tokenizer.json in the same directory";
        DataError::invalid(&path.with_file_name("tokenizer_config.json"), "added tokens", found, remedy)
    })?;
    Ok(tokenizer)
}

/// Adds tokens under the ids that they are said to have; or says which has another.
fn add(tokenizer: &mut Tokenizer, beside: &AddedTokens) -> Result<(), String> {
    if beside.added.len() + beside.special.len() > ADDED {
        return Err(format!("more than {ADDED}"));
    }
    for (id, token) in &beside.added {
        let one = std::slice::from_ref(token);
        if token.special {
            tokenizer.add_special_tokens(one)
        } else {
            tokenizer.add_tokens(one)
        };
        match tokenizer.token_to_id(&token.content) {
            Some(found) if found == *id => {}
            found => {
                return Err(format!(
                    "`{}` has id {id}, but its position in the vocabulary gives {}",
                    token.content,
                    found.map_or("no id".to_owned(), |found| found.to_string())
                ));
            }
        }
    }
    let known: BTreeSet<&str> = beside.added.values().map(|token| token.content.as_str()).collect();
    let new = beside.special.iter().filter(|text| !known.contains(text.as_str()));
    tokenizer.add_special_tokens(&new.map(|text| AddedToken::from(text, true)).collect::<Vec<_>>());
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::fs;

    use serde_json::json;

    use super::*;

    const PIECES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../configs/assets/tiny-t5/spiece.model");

    /// Ids that the pieces with these files beside them make of a text with two new tokens and a sentinel.
    fn ids(files: &[(&str, Value)]) -> Result<Vec<u32>, String> {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("spiece.model");
        fs::copy(PIECES, &path).expect("it ships");
        for (name, json) in files {
            fs::write(dir.path().join(name), json.to_string()).expect("it has space");
        }
        let tokenizer = read(&path).map_err(|error| error.to_string())?;
        let text = "the <ORG> said<extra_id_0> hello <per> x";
        let encoded = tokenizer.encode_fast(text, false).map_err(|error| error.to_string())?;
        Ok(encoded.get_ids().to_vec())
    }

    #[test]
    fn sentinels_and_added_tokens_have_the_ids_that_transformers_gives_them() {
        let config = |more: Value| {
            let mut config = json!({"tokenizer_class": "T5Tokenizer", "extra_ids": 0});
            config.as_object_mut().expect("an object").extend(more.as_object().cloned().unwrap_or_default());
            ("tokenizer_config.json", config)
        };
        let token =
            |text: &str, special: bool| json!({"content": text, "special": special, "normalized": false});
        let decoder =
            json!({"0": token("<pad>", true), "86": token("<ORG>", true), "87": token("<per>", false)});
        let added = |id: u32| ("added_tokens.json", json!({"<ORG>": id}));
        // Transformers 5.24, `T5Tokenizer.from_pretrained`, without the end.
        for (files, wanted) in [
            (vec![], &[3, 2, 3, 2, 3, 2, 185, 3, 2, 3, 2, 3, 2][..]),
            (vec![config(json!({}))], &[3, 2, 3, 2, 3, 2, 3, 2, 3, 2, 3, 2]),
            (vec![config(json!({"extra_ids": 10}))], &[3, 2, 3, 2, 3, 2, 95, 3, 2, 3, 2, 3, 2]),
            (vec![config(json!({})), added(86)], &[3, 2, 86, 3, 2, 3, 2, 3, 2, 3, 2]),
            (vec![added(186)], &[3, 2, 186, 3, 2, 185, 3, 2, 3, 2, 3, 2]),
            (vec![config(json!({"added_tokens_decoder": decoder}))], &[3, 2, 86, 3, 2, 3, 2, 87, 3, 2]),
            (
                vec![config(json!({"additional_special_tokens": ["<ORG>", "<per>"]}))],
                &[3, 2, 86, 3, 2, 3, 2, 87, 3, 2],
            ),
        ] {
            assert_eq!(ids(&files).as_deref(), Ok(wanted), "{files:?}");
        }
        let error = ids(&[config(json!({})), added(90)]).expect_err("there is a gap");
        assert!(error.contains("`<ORG>` has id 90, but its position in the vocabulary gives 86"), "{error}");
    }

    #[test]
    fn hostile_pieces_are_refused_or_made_a_tokenizer_of() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("spiece.model");
        let sample = fs::read(PIECES).expect("it ships");
        coxswain_fuzz::Target::new("spiece.model", [sample]).holds(4 << 20, 1024).check(|bytes| {
            fs::write(&path, bytes).expect("it has space");
            if let Ok(tokenizer) = read(&path) {
                drop(tokenizer.encode_fast("translate: <extra_id_0> \u{3000}\u{200d}", false));
            }
        });
    }
}
