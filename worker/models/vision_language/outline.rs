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
    /// Streams of the vision tower that are added to hidden states where images are: the first behind decoder
    /// layer 0, the next behind layer 1, and so on.
    pub streams: usize,
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

/// Rows of features that samples have at taps.
#[derive(Clone, Copy, Debug)]
pub struct FeatureRows {
    patches: PatchShape,
    streams: usize,
}

impl FeatureRows {
    /// Rows of a sample of `tokens` tokens with images of these shapes: hidden states, or what the vision
    /// tower gives, and of every stream that is added above the tap as many as images have tokens.
    pub fn at(self, tap: Tap, tokens: usize, images: &[ImageShape]) -> usize {
        let of_images = images.iter().map(|shape| self.patches.tokens(*shape)).sum::<usize>();
        let own = match tap {
            Tap::Vision => of_images,
            Tap::Layer(_) | Tap::Final => tokens,
        };
        own + self.streams_above(tap) * of_images
    }

    fn streams_above(self, tap: Tap) -> usize {
        match tap {
            Tap::Vision => self.streams,
            Tap::Layer(layer) => self.streams.saturating_sub(layer),
            Tap::Final => 0,
        }
    }
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
        self.feature_rows().at(tap, tokens, images)
    }

    /// How rows of features are counted, as a value of its own.
    pub fn feature_rows(&self) -> FeatureRows {
        FeatureRows { patches: self.patches, streams: self.streams }
    }

    /// How many streams are added above a tap; features that are kept there hold them as well.
    pub fn streams_above(&self, tap: Tap) -> usize {
        self.feature_rows().streams_above(tap)
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn features_are_of_image_tokens_at_the_vision_tap_and_hold_every_stream_that_is_still_to_be_added() {
        let (patches, images) = (PatchShape { patch: 14, merge: 2, frames: 2 }, [[1, 6, 8], [1, 4, 4]]);
        let taps = [Tap::Vision, Tap::Layer(0), Tap::Layer(1), Tap::Layer(2), Tap::Layer(3), Tap::Final];
        let rows = |streams| taps.map(|tap| FeatureRows { patches, streams }.at(tap, 40, &images));
        assert_eq!(rows(0), [16, 40, 40, 40, 40, 40]);
        assert_eq!(rows(3), [4 * 16, 40 + 3 * 16, 40 + 2 * 16, 40 + 16, 40, 40]);
    }
}
