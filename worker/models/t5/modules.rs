//! The model's modules by the paths that Transformers and PEFT give them, known from sizes alone.

use coxswain_nn::lora::{Module, ModuleKind};

use super::config::{FeedForward, T5Config};
use crate::qwen2_5_vl::modules::FrozenTensor;

/// All named modules of `T5ForConditionalGeneration`, in its order.
pub fn modules(config: &T5Config) -> Vec<Module> {
    let mut list = ModuleList { config, modules: Vec::new() };
    // Under the name that the weights have it by.
    let table = config.table.trim_end_matches(".weight");
    list.push(table.into(), ModuleKind::Embedding { tied: config.head.is_none() });
    list.stack("encoder", config.encoder_layers);
    list.stack("decoder", config.decoder_layers);
    let head = ModuleKind::Linear { inputs: config.d_model, outputs: config.vocab_size, head: true };
    list.push("lm_head".into(), head);
    list.modules
}

/// All tensors of the checkpoint that training loads, in the order of modules, as if none trained.
pub fn tensors(config: &T5Config) -> Vec<FrozenTensor> {
    let mut tensors = Vec::new();
    let mut add = |name: String, elements, is_matrix, packs| {
        tensors.push(FrozenTensor { name, elements, is_matrix, packs })
    };
    let table = config.vocab_size * config.d_model;
    add(config.table.clone(), table, true, None);
    for stack in ["encoder", "decoder"] {
        add(bias_table(stack), config.buckets[0] * config.heads, false, None);
    }
    for Module { name, kind, .. } in modules(config) {
        match kind {
            ModuleKind::Linear { head: true, .. } => {}
            ModuleKind::Linear { inputs, outputs, .. } => {
                add(format!("{name}.weight"), inputs * outputs, true, Some([outputs, inputs]));
            }
            ModuleKind::Norm => add(format!("{name}.weight"), config.d_model, false, None),
            ModuleKind::Embedding { .. } | ModuleKind::Convolution | ModuleKind::Other => {}
        }
    }
    config.head.iter().for_each(|head| add(head.clone(), table, true, None));
    tensors
}

/// The position biases of a stack: all of its blocks have those of the first.
pub fn bias_table(stack: &str) -> String {
    format!("{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight")
}

struct ModuleList<'a> {
    config: &'a T5Config,
    modules: Vec<Module>,
}

impl ModuleList<'_> {
    fn push(&mut self, name: String, kind: ModuleKind) {
        self.modules.push(Module { old_name: name.clone(), name, kind });
    }

    fn linear(&mut self, name: String, inputs: usize, outputs: usize) {
        self.push(name, ModuleKind::Linear { inputs, outputs, head: false });
    }

    fn stack(&mut self, stack: &str, layers: usize) {
        self.push(stack.into(), ModuleKind::Other);
        self.push(format!("{stack}.block"), ModuleKind::Other);
        for block in 0..layers {
            let at = format!("{stack}.block.{block}");
            self.push(at.clone(), ModuleKind::Other);
            self.push(format!("{at}.layer"), ModuleKind::Other);
            self.attention(&format!("{at}.layer.0"), "SelfAttention");
            if block == 0 {
                let biases = "layer.0.SelfAttention.relative_attention_bias";
                self.push(format!("{at}.{biases}"), ModuleKind::Embedding { tied: false });
            }
            if stack == "decoder" {
                self.attention(&format!("{at}.layer.1"), "EncDecAttention");
            }
            self.feed_forward(&format!("{at}.layer.{}", if stack == "decoder" { 2 } else { 1 }));
        }
        self.push(format!("{stack}.final_layer_norm"), ModuleKind::Norm);
    }

    fn attention(&mut self, at: &str, kind: &str) {
        let (d, inner) = (self.config.d_model, self.config.inner());
        self.push(at.into(), ModuleKind::Other);
        self.push(format!("{at}.{kind}"), ModuleKind::Other);
        for name in ["q", "k", "v"] {
            self.linear(format!("{at}.{kind}.{name}"), d, inner);
        }
        self.linear(format!("{at}.{kind}.o"), inner, d);
        self.push(format!("{at}.layer_norm"), ModuleKind::Norm);
    }

    fn feed_forward(&mut self, at: &str) {
        let (d, f) = (self.config.d_model, self.config.d_ff);
        self.push(at.into(), ModuleKind::Other);
        self.push(format!("{at}.DenseReluDense"), ModuleKind::Other);
        let inner: &[&str] = match self.config.feed_forward {
            FeedForward::Relu => &["wi"],
            FeedForward::GatedGelu => &["wi_0", "wi_1"],
        };
        inner.iter().for_each(|name| self.linear(format!("{at}.DenseReluDense.{name}"), d, f));
        self.linear(format!("{at}.DenseReluDense.wo"), f, d);
        self.push(format!("{at}.layer_norm"), ModuleKind::Norm);
    }
}
