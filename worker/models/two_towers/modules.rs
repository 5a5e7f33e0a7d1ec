//! Named modules, listed in the order of Transformers; those of the language model, which families share.

use coxswain_nn::lora::{Module, ModuleKind};

use super::sizes::TextSizes;

/// A list of modules that grows.
pub struct TowersModules {
    modules: Vec<Module>,
    /// The path that a module had before Transformers 4.52.
    old_name: fn(&str) -> String,
}

impl TowersModules {
    /// An empty one.
    pub fn new(old_name: fn(&str) -> String) -> Self {
        Self { modules: Vec::new(), old_name }
    }

    /// What was listed; a loaded model keeps it.
    pub fn into_modules(mut self) -> Vec<Module> {
        self.modules.shrink_to_fit();
        self.modules
    }

    /// Adds one.
    pub fn push(&mut self, name: &str, kind: ModuleKind) {
        self.modules.push(Module { name: name.into(), old_name: (self.old_name)(name), kind });
    }

    /// A container or an activation.
    pub fn other(&mut self, name: &str) {
        self.push(name, ModuleKind::Other);
    }

    /// An RMS norm.
    pub fn norm(&mut self, name: &str, width: usize) {
        self.push(name, ModuleKind::Norm { width, bias: false });
    }

    /// A layer norm.
    pub fn layer_norm(&mut self, name: &str, width: usize) {
        self.push(name, ModuleKind::Norm { width, bias: true });
    }

    /// A linear from so many inputs to so many outputs.
    pub fn linear(&mut self, name: &str, [inputs, outputs]: [usize; 2], bias: bool) {
        self.push(name, ModuleKind::Linear { inputs, outputs, bias, head: false });
    }

    /// The gated MLP of a block.
    pub fn gated_mlp(&mut self, at: &str, [width, inner]: [usize; 2], bias: bool) {
        self.other(&format!("{at}.mlp"));
        self.linear(&format!("{at}.mlp.gate_proj"), [width, inner], bias);
        self.linear(&format!("{at}.mlp.up_proj"), [width, inner], bias);
        self.linear(&format!("{at}.mlp.down_proj"), [inner, width], bias);
        self.other(&format!("{at}.mlp.act_fn"));
    }

    /// The language model, and the head.
    pub fn language_model(&mut self, text: &TextSizes, tied: bool) {
        let (d, bias) = (text.hidden_size, text.qkv_bias);
        let [q, kv] = [text.num_heads, text.num_kv_heads].map(|heads| heads * text.head_dim);
        self.other("model.language_model");
        let table = ModuleKind::Embedding { rows: text.vocab_size, width: d, tied };
        self.push("model.language_model.embed_tokens", table);
        self.other("model.language_model.layers");
        for layer in 0..text.num_layers {
            let at = format!("model.language_model.layers.{layer}");
            self.other(&at);
            self.other(&format!("{at}.self_attn"));
            self.linear(&format!("{at}.self_attn.q_proj"), [d, q], bias);
            self.linear(&format!("{at}.self_attn.k_proj"), [d, kv], bias);
            self.linear(&format!("{at}.self_attn.v_proj"), [d, kv], bias);
            self.linear(&format!("{at}.self_attn.o_proj"), [q, d], false);
            if text.head_norms {
                self.norm(&format!("{at}.self_attn.q_norm"), text.head_dim);
                self.norm(&format!("{at}.self_attn.k_norm"), text.head_dim);
            }
            self.gated_mlp(&at, [d, text.intermediate_size], false);
            self.norm(&format!("{at}.input_layernorm"), d);
            self.norm(&format!("{at}.post_attention_layernorm"), d);
        }
        self.norm("model.language_model.norm", d);
        self.other("model.language_model.rotary_emb");
        let (inputs, outputs) = (d, text.vocab_size);
        self.push("lm_head", ModuleKind::Linear { inputs, outputs, bias: false, head: true });
    }
}
