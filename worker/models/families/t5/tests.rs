//! What the golden comparison (`integration-tests`) does not see: writing, and SentencePiece's own file.

use std::{
    fs,
    path::{Path, PathBuf},
};

use burn::backend::{Flex, flex::FlexDevice};
use coxswain_nn::{
    dtypes::WeightsDtype,
    params::{TrainableLayout, Trainables},
};
use safetensors::SafeTensors;
use serde_json::Value;

use super::{inputs::SeqInputs, model::T5, spiece};
use crate::{
    pretrained::trains::Trains,
    text_to_text::{Texts, likeliest},
};

fn fixture(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../integration-tests/fixtures").join(path)
}

/// Answers to the sources of a golden case, in batches of so many rows.
fn written(case: &str, rows: usize) -> (Vec<Vec<u32>>, Vec<Vec<u32>>) {
    let dir = fixture("golden").join(case);
    let mut layout = TrainableLayout::default();
    let (path, trains) = (dir.join("model"), Trains::default());
    let model = T5::<Flex>::load(&path, WeightsDtype::Float32, trains, &mut layout, &FlexDevice).unwrap();
    let trainables = Trainables::new(layout, Vec::new(), &FlexDevice);
    let inputs = SeqInputs::read(&dir.join("inputs.safetensors"), &model.config).unwrap();
    let len = inputs.source.len() / inputs.batch;
    let parts = inputs.source.chunks(rows * len).zip(inputs.seen.chunks(rows * len));
    let most = 12;
    let ours = parts.flat_map(|(source, seen)| {
        let texts = Texts { batch: source.len() / len, source, seen, target: &[] };
        model.write(&trainables, &texts, most, &mut |_, _, logits| likeliest(logits)).unwrap()
    });
    let bytes = fs::read(dir.join("expected.safetensors")).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let ids = file.tensor("base.written").unwrap().data().as_chunks().0;
    let ids: Vec<u32> = ids.iter().map(|le| i64::from_le_bytes(*le) as u32).collect();
    let theirs = ids.chunks(most).map(|row| {
        let end = row.iter().position(|&id| id == model.config.special.eos).map_or(row.len(), |at| at + 1);
        row[..end].to_vec()
    });
    (ours.collect(), theirs.collect())
}

#[test]
fn what_is_written_token_by_token_is_what_transformers_generates_whatever_the_batch() {
    for case in ["t5-first", "t5-gated-uneven", "mt5"] {
        for rows in [1, 3] {
            let (ours, theirs) = written(case, rows);
            assert_eq!(ours, theirs, "{case}, {rows} rows at a time");
        }
    }
}

#[test]
fn a_file_of_pieces_gives_the_ids_and_texts_of_transformers() {
    let expected = fs::read(fixture("data/pieces/expected.json")).unwrap();
    let expected: Value = serde_json::from_slice(&expected).unwrap();
    let tokenizer = spiece::read(&fixture("data/pieces/spiece.model")).unwrap();
    assert_eq!(Some(tokenizer.get_vocab_size(true) as u64), expected["vocab"].as_u64());
    for case in expected["cases"].as_array().unwrap() {
        let text = case["text"].as_str().unwrap();
        let mut ids = tokenizer.encode(text, false).unwrap().get_ids().to_vec();
        ids.push(1);
        let wanted: Vec<u32> = serde_json::from_value(case["ids"].clone()).unwrap();
        assert_eq!(ids, wanted, "{text:?}");
        assert_eq!(tokenizer.decode(&ids, true).unwrap(), case["decoded"].as_str().unwrap(), "{text:?}");
    }
}

#[test]
fn a_file_that_is_none_of_sentencepieces_is_refused_by_name() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("spiece.model");
    fs::write(&path, "version https://git-lfs.github.com/spec/v1").unwrap();
    let message = spiece::read(&path).unwrap_err().to_string();
    assert!(message.contains("spiece.model") && message.contains("tokenizer.json"), "{message}");
}
