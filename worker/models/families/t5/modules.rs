//! The model's modules by the paths that Transformers and PEFT give them, known from sizes alone.

use coxswain_nn::lora::{Module, ModuleKind};

use super::{
    config::{FeedForward, T5Config},
    rules::RULES,
};
use crate::pretrained::{
    frozen::{FrozenTensor, frozen_tensors},
    rules::Place,
};

/// All named modules of `T5ForConditionalGeneration`, in its order.
pub fn modules(config: &T5Config) -> Vec<Module> {
    let mut list = ModuleList { config, modules: Vec::new() };
    // Under the name that the weights have it by.
    let table = config.table.trim_end_matches(".weight");
    list.push(
        table.into(),
        ModuleKind::Embedding { rows: config.vocab_size, width: config.d_model, tied: config.head.is_none() },
    );
    list.stack("encoder", config.encoder_layers);
    list.stack("decoder", config.decoder_layers);
    let head =
        ModuleKind::Linear { inputs: config.d_model, outputs: config.vocab_size, bias: false, head: true };
    list.push("lm_head".into(), head);
    list.modules
}

/// All tensors of the checkpoint that training loads, in the order of modules, as if none trained.
pub fn tensors(config: &T5Config) -> Vec<FrozenTensor> {
    let table = config.vocab_size * config.d_model;
    let matrix = |name: &str, elements, is_matrix| FrozenTensor {
        name: name.into(),
        elements,
        is_matrix,
        packs: None,
        place: Place::Other,
    };
    let mut tensors = vec![matrix(&config.table, table, true)];
    for stack in ["encoder", "decoder"] {
        tensors.push(matrix(&bias_table(stack), config.buckets[0] * config.heads, false));
    }
    let tables = |module: &Module| matches!(module.kind, ModuleKind::Embedding { .. });
    let others: Vec<_> = modules(config).into_iter().filter(|module| !tables(module)).collect();
    tensors.extend(frozen_tensors(RULES, &others));
    tensors.extend(config.head.iter().map(|head| matrix(head, table, true)));
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
        self.push(name, ModuleKind::Linear { inputs, outputs, bias: false, head: false });
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
                let [rows, width] = [self.config.buckets[0], self.config.heads];
                self.push(format!("{at}.{biases}"), ModuleKind::Embedding { rows, width, tied: false });
            }
            if stack == "decoder" {
                self.attention(&format!("{at}.layer.1"), "EncDecAttention");
            }
            self.feed_forward(&format!("{at}.layer.{}", if stack == "decoder" { 2 } else { 1 }));
        }
        self.push(
            format!("{stack}.final_layer_norm"),
            ModuleKind::Norm { width: self.config.d_model, bias: false },
        );
    }

    fn attention(&mut self, at: &str, kind: &str) {
        let (d, inner) = (self.config.d_model, self.config.inner());
        self.push(at.into(), ModuleKind::Other);
        self.push(format!("{at}.{kind}"), ModuleKind::Other);
        for name in ["q", "k", "v"] {
            self.linear(format!("{at}.{kind}.{name}"), d, inner);
        }
        self.linear(format!("{at}.{kind}.o"), inner, d);
        self.push(format!("{at}.layer_norm"), ModuleKind::Norm { width: self.config.d_model, bias: false });
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
        self.push(format!("{at}.layer_norm"), ModuleKind::Norm { width: self.config.d_model, bias: false });
    }
}
