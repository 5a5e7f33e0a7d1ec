//! What names in a policy's file mean: where the vision-language model is in it, whose own names are
//! Transformers'.

use coxswain_models::pretrained::rules::Place;

/// Where a vision-language model is in a policy's file, and its parts in it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct VlmNames {
    /// What the names of its tensors begin with, before Transformers' own.
    pub model: &'static str,
    /// What follows before the tower's, dot included.
    pub tower: &'static str,
    /// The one linear behind the tower.
    pub connector: &'static str,
    /// What is before the language model's, dot included.
    pub text: &'static str,
}

impl VlmNames {
    /// Where the module or tensor of this name is.
    pub fn place(self, name: &str) -> Place {
        let Some(name) = name.strip_prefix(self.model) else { return Place::Other };
        if name.starts_with(self.tower) || name.starts_with(self.connector) {
            return Place::Vision(Place::number(name, &format!("{}encoder.layers.", self.tower)));
        }
        match name.strip_prefix(self.text) {
            None if name == "lm_head.weight" => Place::Head,
            None => Place::Other,
            Some("embed_tokens.weight") => Place::Table,
            Some("norm.weight") => Place::FinalNorm,
            Some(name) => Place::number(name, "layers.").map_or(Place::Other, Place::Layer),
        }
    }

    /// Whether what a policy computes depends on a module of this name, or on the module that a tensor or an
    /// adapter of this name is part of, above so many decoder layers.
    pub fn is_reached(self, name: &str, layers: usize) -> bool {
        let Some((_, name)) = name.split_once(self.model) else { return true };
        let Some(name) = name.strip_prefix(self.text) else { return !name.starts_with("lm_head") };
        let last = format!("layers.{}.", layers.saturating_sub(1));
        let read = ["self_attn.k_proj", "self_attn.v_proj", "input_layernorm"];
        match name.strip_prefix(&last) {
            Some(part) => read.iter().any(|read| part.starts_with(read)),
            None => !name.starts_with("norm"),
        }
    }

    /// The linear behind the tower, by its full name.
    pub fn connector(self) -> String {
        format!("{}{}", self.model, self.connector)
    }
}
