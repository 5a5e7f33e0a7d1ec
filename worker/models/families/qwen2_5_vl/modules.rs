//! The model's modules by the paths that Transformers 5 and PEFT give them, known from sizes alone.

use coxswain_nn::lora::{Module, ModuleKind};

use super::{config::QwenConfig, rules::of_vision};

/// All named modules of `Qwen2_5_VLForConditionalGeneration`, in its order.
pub fn modules(config: &QwenConfig) -> Vec<Module> {
    let mut list = List(Vec::new());
    list.other("model");
    vision(config, &mut list);
    text(config, &mut list);
    let (inputs, outputs) = (config.text.hidden_size, config.text.vocab_size);
    list.push("lm_head", ModuleKind::Linear { inputs, outputs, bias: false, head: true });
    list.0
}

/// Whether a linear has a bias: all of the vision tower's, and query, key and value of the language model.
fn has_bias(module: &str) -> bool {
    of_vision(module) || ["q_proj", "k_proj", "v_proj"].iter().any(|end| module.ends_with(end))
}

fn vision(config: &QwenConfig, list: &mut List) {
    let vision = &config.vision;
    let (d, f) = (vision.hidden_size, vision.intermediate_size);
    let side = vision.patch_size;
    let shape = [d, vision.in_channels, vision.temporal_patch_size, side, side];
    list.other("model.visual");
    list.other("model.visual.patch_embed");
    list.push("model.visual.patch_embed.proj", ModuleKind::Convolution { shape });
    list.other("model.visual.rotary_pos_emb");
    list.other("model.visual.blocks");
    for block in 0..vision.depth {
        let at = format!("model.visual.blocks.{block}");
        list.other(&at);
        list.norm(&format!("{at}.norm1"), d);
        list.norm(&format!("{at}.norm2"), d);
        list.other(&format!("{at}.attn"));
        list.linear(&format!("{at}.attn.qkv"), d, 3 * d);
        list.linear(&format!("{at}.attn.proj"), d, d);
        list.mlp(&at, d, f);
    }
    let merged = d * vision.merge_unit();
    list.other("model.visual.merger");
    list.norm("model.visual.merger.ln_q", d);
    list.other("model.visual.merger.mlp");
    list.linear("model.visual.merger.mlp.0", merged, merged);
    list.other("model.visual.merger.mlp.1");
    list.linear("model.visual.merger.mlp.2", merged, vision.out_hidden_size);
}

fn text(config: &QwenConfig, list: &mut List) {
    let text = &config.text;
    let (d, kv) = (text.hidden_size, text.num_kv_heads * text.head_dim);
    list.other("model.language_model");
    let table = ModuleKind::Embedding { rows: text.vocab_size, width: d, tied: config.tie_word_embeddings };
    list.push("model.language_model.embed_tokens", table);
    list.other("model.language_model.layers");
    for layer in 0..text.num_layers {
        let at = format!("model.language_model.layers.{layer}");
        list.other(&at);
        list.other(&format!("{at}.self_attn"));
        list.linear(&format!("{at}.self_attn.q_proj"), d, d);
        list.linear(&format!("{at}.self_attn.k_proj"), d, kv);
        list.linear(&format!("{at}.self_attn.v_proj"), d, kv);
        list.linear(&format!("{at}.self_attn.o_proj"), d, d);
        list.mlp(&at, d, text.intermediate_size);
        list.norm(&format!("{at}.input_layernorm"), d);
        list.norm(&format!("{at}.post_attention_layernorm"), d);
    }
    list.norm("model.language_model.norm", d);
    list.other("model.language_model.rotary_emb");
}

/// The path that `name` had before Transformers 4.52.
fn old_name(name: &str) -> String {
    match name.strip_prefix("model.") {
        Some(rest) if rest.starts_with("visual") => rest.into(),
        Some(rest) => {
            rest.strip_prefix("language_model.").map_or("model".into(), |rest| format!("model.{rest}"))
        }
        None => name.into(),
    }
}

struct List(Vec<Module>);

impl List {
    fn push(&mut self, name: &str, kind: ModuleKind) {
        self.0.push(Module { name: name.into(), old_name: old_name(name), kind });
    }

    fn other(&mut self, name: &str) {
        self.push(name, ModuleKind::Other);
    }

    fn norm(&mut self, name: &str, width: usize) {
        self.push(name, ModuleKind::Norm { width });
    }

    fn linear(&mut self, name: &str, inputs: usize, outputs: usize) {
        let bias = has_bias(name);
        self.push(name, ModuleKind::Linear { inputs, outputs, bias, head: false });
    }

    fn mlp(&mut self, at: &str, width: usize, inner: usize) {
        self.other(&format!("{at}.mlp"));
        self.linear(&format!("{at}.mlp.gate_proj"), width, inner);
        self.linear(&format!("{at}.mlp.up_proj"), width, inner);
        self.linear(&format!("{at}.mlp.down_proj"), inner, width);
        self.other(&format!("{at}.mlp.act_fn"));
    }
}
