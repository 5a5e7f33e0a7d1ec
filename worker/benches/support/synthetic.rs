//! A Qwen2.5-VL checkpoint of any size with random weights, in a directory of its own, and a batch of text
//! for it: what benchmarks and memory tests run when nobody names a real one. Its vision tower is one block
//! that nothing passes through.

use std::{collections::BTreeMap, fs, path::Path};

use anyhow::Result;
use coxswain_nn::rng::{Draws, Key, Purpose};
use coxswain_proto::{ids::Step, run_spec::RunSpec};
use coxswain_tasks::vla_flow::data::{MicroBatch, SampleDims};
use safetensors::{Dtype, tensor::TensorView};
use serde_json::{Value, json};

/// Sizes of a sample: state and action only.
pub const DIMS: SampleDims =
    SampleDims { state: 8, sensor_window: 0, sensor_channels: 0, horizon: 16, action: 7 };
/// Ids below this are ordinary text.
const ORDINARY: u64 = 240;
const VOCABULARY: usize = 256;

/// Sizes of the language model.
#[derive(Clone, Copy, Debug)]
pub struct TextStack {
    /// Decoder layers.
    pub layers: usize,
    /// Model width; heads are 64 wide, three of them share a key.
    pub width: usize,
    /// Width of the MLP.
    pub inner: usize,
}

impl TextStack {
    /// Writes the checkpoint into `dir`.
    pub fn write(&self, dir: &Path) -> Result<()> {
        let Self { layers, width, inner } = *self;
        let (heads, keys) = (width / 64, width / 64 / 3);
        let config = json!({
            "model_type": "qwen2_5_vl", "vocab_size": VOCABULARY, "hidden_size": width, "intermediate_size": inner,
            "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": keys,
            "hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 1e6, "tie_word_embeddings": true,
            "rope_scaling": {"type": "mrope", "mrope_section": [8, 12, 12]}, "torch_dtype": "float32",
            "image_token_id": 250, "video_token_id": 251, "vision_start_token_id": 252, "vision_end_token_id": 253,
            "vision_config": {"depth": 1, "hidden_size": 64, "intermediate_size": 64, "num_heads": 2, "patch_size": 14,
                "spatial_merge_size": 2, "temporal_patch_size": 2, "tokens_per_second": 2, "window_size": 56,
                "out_hidden_size": width, "fullatt_block_indexes": [0], "in_chans": 3, "hidden_act": "silu"},
        });
        fs::write(dir.join("config.json"), serde_json::to_string_pretty(&config)?)?;
        let mut shapes = BTreeMap::new();
        let mut add = |name: String, shape: &[usize]| shapes.insert(name, shape.to_vec());
        add("model.embed_tokens.weight".into(), &[VOCABULARY, width]);
        add("model.norm.weight".into(), &[width]);
        for layer in 0..layers {
            let at = format!("model.layers.{layer}");
            for (name, outputs) in [("q", width), ("k", 64 * keys), ("v", 64 * keys)] {
                add(format!("{at}.self_attn.{name}_proj.weight"), &[outputs, width]);
                add(format!("{at}.self_attn.{name}_proj.bias"), &[outputs]);
            }
            add(format!("{at}.self_attn.o_proj.weight"), &[width, width]);
            add(format!("{at}.mlp.gate_proj.weight"), &[inner, width]);
            add(format!("{at}.mlp.up_proj.weight"), &[inner, width]);
            add(format!("{at}.mlp.down_proj.weight"), &[width, inner]);
            add(format!("{at}.input_layernorm.weight"), &[width]);
            add(format!("{at}.post_attention_layernorm.weight"), &[width]);
        }
        add("visual.patch_embed.proj.weight".into(), &[64, 3, 2, 14, 14]);
        for (name, shape) in [("attn.qkv", [192, 64]), ("attn.proj", [64, 64]), ("mlp.gate_proj", [64, 64])]
            .into_iter()
            .chain([("mlp.up_proj", [64, 64]), ("mlp.down_proj", [64, 64])])
        {
            add(format!("visual.blocks.0.{name}.weight"), &shape);
            add(format!("visual.blocks.0.{name}.bias"), &shape[..1]);
        }
        add("visual.blocks.0.norm1.weight".into(), &[64]);
        add("visual.blocks.0.norm2.weight".into(), &[64]);
        add("visual.merger.ln_q.weight".into(), &[64]);
        for (name, shape) in [("mlp.0", [256, 256]), ("mlp.2", [width, 256])] {
            add(format!("visual.merger.{name}.weight"), &shape);
            add(format!("visual.merger.{name}.bias"), &shape[..1]);
        }
        write_random(&dir.join("model.safetensors"), shapes)
    }
}

fn write_random(path: &Path, shapes: BTreeMap<String, Vec<usize>>) -> Result<()> {
    let tensors: Vec<(String, Vec<usize>, Vec<f32>)> = shapes
        .into_iter()
        .zip(0..)
        .map(|((name, shape), stream)| {
            let mut values = vec![0.0; shape.iter().product()];
            draws(stream).normal(&mut values);
            values.iter_mut().for_each(|value| *value *= 0.02);
            (name, shape, values)
        })
        .collect();
    let views = tensors.iter().map(|(name, shape, values)| {
        let bytes = bytemuck::cast_slice(values);
        TensorView::new(Dtype::F32, shape.clone(), bytes).map(|view| (name.as_str(), view))
    });
    let views = views.collect::<Result<Vec<_>, _>>()?;
    Ok(safetensors::serialize_to_file(views, None, path)?)
}

/// A run of this model with adapters of this rank on all linears of the language model, and an expert too
/// small to count.
pub fn spec(model: &Path, rank: usize, recompute: &Value) -> Result<RunSpec> {
    Ok(serde_json::from_value(json!({
        "run": {"name": "bench", "output_dir": "unused"},
        "model": {"path": model},
        "lora": {"rank": rank, "alpha": rank as f64,
            "targets": r".*language_model.*\.(q|k|v|o|gate|up|down)_proj"},
        "expert": {"width": 16, "heads": 1, "layers": 1},
        "data": {"path": "unused", "cameras": ["unused"]},
        "train": {"steps": 1, "global_batch": 1, "micro_batch": 1, "recompute": recompute},
    }))?)
}

/// `rows` prompts of `tokens` tokens each.
pub fn text_batch(rows: usize, tokens: usize, step: u64) -> MicroBatch {
    let mut draws = draws(1 << 32 | step);
    let input_ids = (0..rows * tokens).map(|_| (draws.word() % ORDINARY) as u32).collect();
    let mut normal = |len: usize| {
        let mut values = vec![0.0; len];
        draws.normal(&mut values);
        values
    };
    MicroBatch {
        step: Step(step),
        sample_indices: (0..rows as u64).collect(),
        input_ids,
        valid: vec![0..tokens as u32; rows],
        seq_len: tokens,
        pixel_values: vec![],
        image_shapes: vec![],
        images_per_row: vec![0; rows],
        state: normal(rows * DIMS.state),
        sensor: vec![],
        actions: normal(rows * DIMS.horizon * DIMS.action),
        action_widths: vec![DIMS.action; rows],
        action_valid: vec![1.0; rows * DIMS.horizon],
        features: None,
    }
}

fn draws(stream: u64) -> Draws {
    Key { seed: 0, purpose: Purpose::Init, step: stream, sample: 1, repeat: 0 }.draws()
}
