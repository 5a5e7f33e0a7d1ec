//! What the golden comparison (`integration-tests`) does not see: weights kept in bfloat16, shared storage,
//! and rotary positions of awkward prompts.

use std::{
    ops::ControlFlow,
    path::{Path, PathBuf},
};

use burn::{
    backend::{Flex, flex::FlexDevice},
    tensor::{DType, Tensor},
};
use coxswain_nn::dtypes::WeightsDtype;
use coxswain_nn::kernels::precision;
use coxswain_nn::lora::Lora;
use safetensors::{SafeTensors, tensor::TensorView};

use super::{
    QwenVl,
    config::QwenConfig,
    modules::modules,
    rules::{RULES, canonical_name},
};
use crate::{
    pretrained::{checkpoint::Checkpoint, error::TokenError, prompts::Rows},
    two_towers::{embed::ImageRows, rope::RopeIndex, sizes::TowersConfig},
    vision_language::LoadOptions,
};
use coxswain_nn::{
    block::Block,
    lora::{LoraPlan, ModuleKind},
    params::{ParamScope, TrainableLayout, Trainables},
};

fn golden(case: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../integration-tests/fixtures/golden")
        .join(case)
        .join("model")
}

/// Logits of a text-only prompt, flattened.
fn logits(dir: &Path, dtype: WeightsDtype) -> Vec<f32> {
    let mut layout = TrainableLayout::default();
    let options = LoadOptions { head: true, ..dtype.into() };
    let model = QwenVl::<Flex>::load(dir, options, None, &mut layout, &FlexDevice).unwrap();
    let trainables = Trainables::new(layout, Vec::new(), &FlexDevice);
    let params = ParamScope::<Flex>::frozen(&trainables);
    let (ids, valid) = ([3, 14, 15, 9, 26, 5], std::iter::once(0..6).collect::<Vec<_>>());
    let index = model.rope_index(&ids, Rows::Padded(&valid), &[]).unwrap();
    let context = model.text.context(&index.position_ids, Rows::Padded(&valid));
    let layers = &model.text.layers;
    let through = layers.fold(0..layers.count(), model.embed_tokens(&params, &ids), |x_nd, _, layer| {
        let h_nd = layer.attention_half(&params, x_nd, &context);
        ControlFlow::Continue(layer.mlp_half(&params, h_nd, &context))
    });
    let x_nd = through.unwrap();
    let logits = model.lm_head(&params, model.text.final_norm(&params, x_nd)).unwrap();
    assert_eq!(logits.dtype(), DType::F32);
    logits.into_data().into_vec().unwrap()
}

#[test]
fn bfloat16_weights_kept_as_they_are_give_the_result_of_widened_ones() {
    // A processor's own bfloat16 products round their inputs as well.
    precision::allow_bfloat16_matmul(false);
    let dir = golden("mqa-sharded-bf16");
    let (wide, narrow) = (logits(&dir, WeightsDtype::Float32), logits(&dir, WeightsDtype::Bfloat16));
    let norm = |x: &mut dyn Iterator<Item = f32>| x.map(|v| f64::from(v).powi(2)).sum::<f64>().sqrt();
    let difference = norm(&mut wide.iter().zip(&narrow).map(|(a, b)| a - b));
    let relative = difference / norm(&mut wide.iter().copied());
    assert!(relative < 1e-5, "relative difference {relative:.1e}");
}

#[test]
fn weights_of_the_wanted_type_borrow_the_mapped_file() {
    let checkpoint = Checkpoint::open(&golden("flat-gqa-left"), RULES).unwrap();
    let name = "model.language_model.layers.0.self_attn.q_proj.weight";
    let read = |dtype| checkpoint.matrix(name, &[32, 32], &[32, 32], dtype).unwrap();
    assert_eq!(
        read(WeightsDtype::Float32).bytes.as_ptr(),
        read(WeightsDtype::Float32).bytes.as_ptr(),
        "two reads share one storage"
    );
    assert_eq!(read(WeightsDtype::Bfloat16).dtype, DType::BF16);
}

#[test]
fn a_model_saved_whole_hides_the_index_of_earlier_shards() {
    let dir = tempfile::tempdir().unwrap();
    let whole = golden("flat-gqa-left").join("model.safetensors");
    std::fs::copy(whole, dir.path().join("model.safetensors")).unwrap();
    let stale = r#"{"weight_map": {"lm_head.weight": "model-00001-of-00002.safetensors"}}"#;
    std::fs::write(dir.path().join("model.safetensors.index.json"), stale).unwrap();
    let checkpoint = Checkpoint::open(dir.path(), RULES).unwrap();
    assert!(checkpoint.contains("model.language_model.layers.0.self_attn.q_proj.weight"));
}

/// A model whose configuration ties head and table, with a head of its own: the table's values, `change`d.
fn with_own_head(change: impl FnOnce(&mut [u8])) -> tempfile::TempDir {
    let (tied, dir) = (golden("nested-tied-right"), tempfile::tempdir().unwrap());
    std::fs::copy(tied.join("config.json"), dir.path().join("config.json")).unwrap();
    let bytes = std::fs::read(tied.join("model.safetensors")).unwrap();
    let stored = SafeTensors::deserialize(&bytes).unwrap();
    let mut tensors = stored.tensors();
    let table = tensors.iter().find(|(name, _)| name.ends_with("embed_tokens.weight")).unwrap().1.clone();
    let mut head = table.data().to_vec();
    change(&mut head);
    let head = TensorView::new(table.dtype(), table.shape().to_vec(), &head).unwrap();
    tensors.push(("lm_head.weight".into(), head));
    safetensors::serialize_to_file(tensors, None, &dir.path().join("model.safetensors")).unwrap();
    dir
}

#[test]
fn a_head_of_other_values_than_the_table_is_taken_whatever_the_configuration_says() {
    let same = with_own_head(|_| ());
    assert!(QwenConfig::from_dir(same.path()).unwrap().tie_word_embeddings);
    let own = with_own_head(|head| head.rotate_left(64));
    assert!(!QwenConfig::from_dir(own.path()).unwrap().tie_word_embeddings);
    let of = |dir: &Path| logits(dir, WeightsDtype::Float32);
    assert_eq!(of(same.path()), of(&golden("nested-tied-right")));
    assert_ne!(of(own.path()), of(same.path()));
}

#[test]
fn both_spellings_have_one_canonical_name() {
    for (name, canonical) in [
        ("visual.blocks.0.attn.qkv.weight", "model.visual.blocks.0.attn.qkv.weight"),
        ("model.visual.merger.ln_q.weight", "model.visual.merger.ln_q.weight"),
        ("model.layers.3.mlp.up_proj.weight", "model.language_model.layers.3.mlp.up_proj.weight"),
        ("model.language_model.norm.weight", "model.language_model.norm.weight"),
        ("lm_head.weight", "lm_head.weight"),
    ] {
        assert_eq!(canonical_name(name), canonical);
    }
    let modules = modules(&QwenConfig::from_dir(&golden("flat-gqa-left")).unwrap());
    for module in modules.iter().filter(|m| matches!(m.kind, ModuleKind::Linear { .. })) {
        assert_eq!(canonical_name(&module.old_name), module.name);
    }
}

#[test]
fn images_next_to_each_other_and_images_in_rows_find_their_tokens() {
    let config = QwenConfig::from_dir(&golden("flat-gqa-left")).unwrap();
    let image = config.tokens.image;
    // Row 0: a 1x2 and a 2x1 image without anything between them. Row 1: text, padded on the left.
    let ids = [7, image, image, image, image, 7, 0, 0, 7, 7, 7, 7];
    let index =
        RopeIndex::new(&config.sizes(), &ids, Rows::Padded(&[0..6, 2..6]), &[[1, 2, 4], [1, 4, 2]]).unwrap();
    assert_eq!(index.images_per_row, [2, 0]);
    assert_eq!(index.image_rows, [1, 2, 3, 4]);
    let row = |axis: usize, row: usize| &index.position_ids[axis * 12 + row * 6..][..6];
    assert_eq!(row(0, 0), [0, 1, 1, 3, 3, 5]);
    assert_eq!(row(1, 0), [0, 1, 1, 3, 4, 5]);
    assert_eq!(row(2, 0), [0, 1, 2, 3, 3, 5]);
    assert_eq!(row(1, 1), [0, 0, 0, 1, 2, 3]);
}

#[test]
fn images_that_do_not_fit_the_tokens_are_refused() {
    let config = QwenConfig::from_dir(&golden("flat-gqa-left")).unwrap();
    let image = config.tokens.image;
    let index = |ids: &[u32], grids: &[[u32; 3]]| {
        RopeIndex::new(&config.sizes(), ids, Rows::SideBySide(&[0, ids.len() as u32]), grids).unwrap_err()
    };
    assert_eq!(
        index(&[1, image], &[[1, 4, 4]]),
        TokenError::ImageTokens { row: 0, id: image, tokens: 1, features: 4 }
    );
    // 65535 * 32767^2 cells: more than 32 bits hold.
    let absurd = index(&[1, image], &[[u16::MAX.into(); 3]]);
    let features = 65535 * 32767 * 32767;
    assert_eq!(absurd, TokenError::ImageTokens { row: 0, id: image, tokens: 1, features });
    assert_eq!(index(&[1, 2], &[[1, 2, 2]]), TokenError::ImageCount { given: 1, used: 0 });
    assert_eq!(
        index(&[1, image], &[]),
        TokenError::ImageTokens { row: 0, id: image, tokens: 1, features: 0 }
    );
}

#[test]
fn scatter_places_features_add_adds_them_and_gather_takes_them_back() {
    let x_nd = Tensor::<Flex, 2>::zeros([4, 2], &FlexDevice);
    let features_md = Tensor::<Flex, 2>::from_data([[1.0, 2.0], [3.0, 4.0]], &FlexDevice);
    let rows = ImageRows::new(vec![3, 1], 4);
    let placed_nd = rows.scatter(x_nd, features_md.clone());
    let values: Vec<f32> = placed_nd.clone().into_data().into_vec().unwrap();
    assert_eq!(values, [0.0, 0.0, 3.0, 4.0, 0.0, 0.0, 1.0, 2.0]);
    assert_eq!(rows.gather(placed_nd.clone()).into_data(), features_md.clone().into_data());
    let added_nd = rows.add(placed_nd, features_md);
    let values: Vec<f32> = added_nd.into_data().into_vec().unwrap();
    assert_eq!(values, [0.0, 0.0, 6.0, 8.0, 0.0, 0.0, 2.0, 4.0]);
}

#[test]
fn the_default_targets_are_every_linear_of_the_language_model() {
    let modules = modules(&QwenConfig::from_dir(&golden("flat-gqa-left")).unwrap());
    let lora = Lora { rank: 4, alpha: 8.0, ..Lora::default() };
    let plan = LoraPlan::resolve(&lora, &modules).unwrap();
    assert_eq!(plan.adapters().count(), 3 * 7);
    assert!(
        plan.adapters()
            .all(|(name, spec)| name.starts_with("model.language_model.layers.") && spec.scale == 2.0)
    );
}
