//! What a model's configuration says of it, before any weight is read: a value.

use coxswain_nn::lora::{Module, ModuleKind};

use super::tap::Tap;
use crate::pretrained::{
    frozen::{FrozenTensor, frozen_tensors, head_tensor},
    pictures::{ImageShape, PatchShape},
    rules::{Place, Rules},
};

/// A model as its configuration has it.
#[derive(Clone, Debug)]
pub struct ModelOutline {
    /// What names mean in its family.
    pub rules: Rules,
    /// The class of Transformers that reads it.
    pub class: &'static str,
    /// All named modules, in the order in which Transformers has them.
    pub modules: Vec<Module>,
    /// Width of the language model's hidden states.
    pub hidden_size: usize,
    /// Decoder layers.
    pub layers: usize,
    /// Rows of the table of token embeddings.
    pub vocab_size: usize,
    /// What images become.
    pub patches: PatchShape,
    /// Tokens that a prompt is made of where its words do not matter.
    pub tokens: PromptTokens,
    /// Every size that values depend on, as text: part of the names of kept features and measurements, so
    /// that it may only change where values do.
    pub sizes: String,
    /// The vision tower's part of them.
    pub vision: VisionOutline,
}

/// Sizes of a vision tower.
#[derive(Clone, Debug)]
pub struct VisionOutline {
    /// Repeated blocks.
    pub depth: usize,
    /// Width between them.
    pub width: usize,
    /// Every size that values depend on, as text.
    pub sizes: String,
}

/// Tokens that a prompt is made of where its words do not matter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PromptTokens {
    /// Stands for a token of an image.
    pub image: u32,
    /// What precedes and follows an image.
    pub around: [u32; 2],
    /// Any other.
    pub word: u32,
}

impl ModelOutline {
    /// The tensors that training loads, in the order of modules. An LM head of its own is not among them.
    pub fn tensors(&self) -> Vec<FrozenTensor> {
        frozen_tensors(self.rules, &self.modules)
    }

    /// The weight of the LM head, where it is a matrix of its own.
    pub fn head(&self) -> Option<FrozenTensor> {
        head_tensor(&self.modules)
    }

    /// The tensor that is the LM head's weight as well, if there is such a one.
    pub fn tied_to_head(&self) -> Option<String> {
        let tied = |module: &&Module| matches!(module.kind, ModuleKind::Embedding { tied: true, .. });
        self.modules.iter().find(tied).map(|module| format!("{}.weight", module.name))
    }

    /// Where a module or tensor is, by its canonical name.
    pub fn place(&self, name: &str) -> Place {
        (self.rules.place)(name)
    }

    /// Rows of features, each as wide as hidden states, that a sample of `tokens` tokens with images of these
    /// shapes has at a tap.
    pub fn rows_at(&self, tap: Tap, tokens: usize, images: &[ImageShape]) -> usize {
        match tap {
            Tap::Vision => images.iter().map(|shape| self.patches.tokens(*shape)).sum(),
            Tap::Layer(_) | Tap::Final => tokens,
        }
    }

    /// Ids of a prompt with images of these shapes, filled up with words to at least `tokens`.
    pub fn prompt(&self, images: &[ImageShape], tokens: usize) -> Vec<u32> {
        let PromptTokens { image, around: [before, after], word } = self.tokens;
        let mut ids = Vec::with_capacity(tokens);
        for &shape in images {
            ids.push(before);
            ids.resize(ids.len() + self.patches.tokens(shape), image);
            ids.push(after);
        }
        ids.resize(tokens.max(ids.len()), word);
        ids
    }
}
