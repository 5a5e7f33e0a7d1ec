//! Checkpoints of random weights that are made like published ones.

use std::{
    fs,
    path::{Path, PathBuf},
};

use burn::backend::{Flex, flex::FlexDevice};
use coxswain_nn::{dtypes::WeightsDtype, params::TrainableLayout};
use serde_json::Value;

use super::{Qwen2_5Vl, QwenVl, config::QwenConfig, modules::modules, rules::RULES};
use crate::{
    chatml::TOKEN_IDS,
    pretrained::{
        checkpoint::Checkpoint,
        error::ModelError,
        frozen::{FrozenTensor, frozen_tensors},
        synthetic::{DrawnTensor, SyntheticCheckpoint, SyntheticSummary, entries, shards},
        tokens,
    },
    vision_language::VlFamily,
};

fn asset(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../configs/assets").join(name)
}

fn make(like: &Path, out: &Path, dtype: WeightsDtype) -> Result<SyntheticSummary, ModelError> {
    Qwen2_5Vl.make_checkpoint(&SyntheticCheckpoint { like, tokenizer: None, out, dtype, seed: 3 })
}

#[test]
fn what_is_made_loads_and_has_every_tensor_of_the_model_it_is_like() {
    let dir = tempfile::tempdir().unwrap();
    let like = asset("tiny-vla");
    for (dtype, name) in [(WeightsDtype::Float32, "f32"), (WeightsDtype::Bfloat16, "bf16")] {
        let out = dir.path().join(name);
        let made = make(&like, &out, dtype).unwrap();
        let original = Checkpoint::open(&like, RULES).unwrap();
        let checkpoint = Checkpoint::open(&out, RULES).unwrap();
        let config = QwenConfig::from_dir(&out).unwrap();
        assert_eq!(config, QwenConfig::from_dir(&like).unwrap());
        for FrozenTensor { name: tensor, .. } in frozen_tensors(RULES, &modules(&config)) {
            assert!(checkpoint.contains(&tensor) && original.contains(&tensor), "{tensor}");
            assert_eq!(
                checkpoint.copied_bytes(&tensor, dtype),
                Some(0),
                "{tensor} is used as it lies in the file"
            );
        }
        assert_eq!(made.shards, 1);
        QwenVl::<Flex>::load(&out, dtype, None, &mut TrainableLayout::default(), &FlexDevice).unwrap();
        assert!(out.join("tokenizer.json").is_file() && out.join("preprocessor_config.json").is_file());
    }
}

#[test]
fn the_same_arguments_give_the_same_weights_and_another_seed_gives_others() {
    let dir = tempfile::tempdir().unwrap();
    let like = asset("tiny-vla");
    let weights = |name: &str, seed| {
        let out = dir.path().join(name);
        let dtype = WeightsDtype::Bfloat16;
        let job = SyntheticCheckpoint { like: &like, tokenizer: None, out: &out, dtype, seed };
        Qwen2_5Vl.make_checkpoint(&job).unwrap();
        fs::read(out.join("model.safetensors")).unwrap()
    };
    let first = weights("a", 1);
    assert!(first == weights("b", 1));
    assert!(first != weights("c", 2));
}

#[test]
fn the_published_3b_has_its_parameters_and_its_names() {
    let config = QwenConfig::from_dir(&asset("qwen2.5-vl-3b")).unwrap();
    let entries = entries(&modules(&config), 0.02);
    let parameters: usize = entries.iter().map(DrawnTensor::len).sum();
    // Qwen/Qwen2.5-VL-3B-Instruct: 3,754,622,976 parameters in 824 tensors.
    assert_eq!((parameters, entries.len()), (3_754_622_976, 824));
    for name in
        ["visual.patch_embed.proj.weight", "model.embed_tokens.weight", "model.layers.35.mlp.up_proj.weight"]
    {
        assert!(entries.iter().any(|entry| entry.name == name), "{name}");
    }
    let shards = shards(&entries, 2);
    assert!(shards.len() >= 2 && shards.iter().all(|shard| !shard.is_empty()));
    assert_eq!(shards.iter().map(|shard| shard.len()).sum::<usize>(), entries.len());
}

#[test]
fn a_tokenizer_from_elsewhere_brings_its_token_ids_along() {
    let dir = tempfile::tempdir().unwrap();
    let like = asset("qwen2.5-vl-3b");
    let mut config: Value = serde_json::from_slice(&fs::read(like.join("config.json")).unwrap()).unwrap();
    tokens::adopt(&mut config, TOKEN_IDS, &asset("tiny-vla").join("tokenizer.json")).unwrap();
    let tiny = QwenConfig::from_dir(&asset("tiny-vla")).unwrap();
    fs::write(dir.path().join("config.json"), config.to_string()).unwrap();
    let adopted = QwenConfig::from_dir(dir.path()).unwrap();
    assert_eq!(adopted.tokens, tiny.tokens);
    assert_eq!(adopted.text, QwenConfig::from_dir(&like).unwrap().text);
}

#[test]
fn a_directory_that_exists_is_not_touched_and_a_failed_attempt_leaves_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let error = make(&asset("tiny-vla"), dir.path(), WeightsDtype::Bfloat16).unwrap_err().to_string();
    assert!(error.contains("does not exist"), "{error}");
    let (like, out) = (asset("tiny-vla"), dir.path().join("out"));
    let nowhere = dir.path().join("nowhere");
    let dtype = WeightsDtype::Bfloat16;
    let job = SyntheticCheckpoint { like: &like, tokenizer: Some(&nowhere), out: &out, dtype, seed: 0 };
    assert!(Qwen2_5Vl.make_checkpoint(&job).is_err());
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
}
