//! Parameters of the published sizes, and checkpoints of random weights that are made like them.

use std::path::{Path, PathBuf};

use burn::backend::{Flex, flex::FlexDevice};
use coxswain_nn::{dtypes::WeightsDtype, params::TrainableLayout};

use super::{Qwen3Vl, Qwen3VlModel, config::Qwen3VlConfig, modules::modules, rules::RULES};
use crate::{
    pretrained::{
        checkpoint::Checkpoint,
        frozen::frozen_tensors,
        synthetic::{DrawnTensor, SyntheticCheckpoint, entries},
    },
    vision_language::VlFamily,
};

fn asset(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../configs/assets").join(name)
}

#[test]
fn the_published_sizes_have_their_parameters() {
    for (name, parameters, of_vision) in [
        ("qwen3-vl-2b", 2_127_532_032, 406_957_056),
        ("qwen3-vl-4b", 4_437_815_808, 415_347_712),
        ("qwen3-vl-8b", 8_767_123_696, 576_388_336),
    ] {
        let config = Qwen3VlConfig::from_dir(&asset(name)).unwrap();
        let entries = entries(&modules(&config), 0.02);
        let of = |is_meant: fn(&DrawnTensor) -> bool| {
            entries.iter().filter(|entry| is_meant(entry)).map(DrawnTensor::len).sum::<usize>()
        };
        let vision = of(|entry| entry.name.starts_with("model.visual."));
        assert_eq!((of(|_| true), vision), (parameters, of_vision), "{name}");
    }
}

#[test]
fn the_published_names_are_there() {
    let entries = entries(&modules(&Qwen3VlConfig::from_dir(&asset("qwen3-vl-4b")).unwrap()), 0.02);
    for name in [
        "model.visual.patch_embed.proj.bias",
        "model.visual.pos_embed.weight",
        "model.visual.blocks.23.mlp.linear_fc2.bias",
        "model.visual.merger.norm.bias",
        "model.visual.deepstack_merger_list.2.linear_fc1.weight",
        "model.language_model.layers.35.self_attn.q_norm.weight",
        "model.language_model.embed_tokens.weight",
    ] {
        assert!(entries.iter().any(|entry| entry.name == name), "{name}");
    }
    assert!(!entries.iter().any(|entry| entry.name == "lm_head.weight"), "2B and 4B are tied");
}

#[test]
fn what_is_made_loads_and_has_every_tensor_of_the_model_it_is_like() {
    let dir = tempfile::tempdir().unwrap();
    let like = asset("../../integration-tests/fixtures/golden/qwen3-untied-right/model");
    let (out, dtype) = (dir.path().join("made"), WeightsDtype::Float32);
    let job = SyntheticCheckpoint { like: &like, tokenizer: None, out: &out, dtype, seed: 3 };
    Qwen3Vl.make_checkpoint(&job).unwrap();
    let [original, made] = [&like, &out].map(|dir| Checkpoint::open(dir, RULES).unwrap());
    let config = Qwen3VlConfig::from_dir(&out).unwrap();
    let tensors = frozen_tensors(RULES, &modules(&config));
    for tensor in &tensors {
        assert!(made.contains(&tensor.name) && original.contains(&tensor.name), "{}", tensor.name);
    }
    // All of it, with the head.
    assert_eq!(original.names().count(), tensors.len() + 1);
    Qwen3VlModel::<Flex>::load(&out, dtype, None, &mut TrainableLayout::default(), &FlexDevice).unwrap();
}
