//! Families of pretrained models, a folder and a line each. None knows another.

pub mod paligemma;
pub mod qwen2_5_vl;
pub mod qwen3_vl;
pub mod smolvlm;
pub mod t5;

use coxswain_nn::kernels::Tape;

use crate::{
    pretrained::family::Families,
    shelf::{Shelf, Shelves},
};

/// The families of this repository.
pub fn shelf<B: Tape<Base = B>>() -> Shelf<B> {
    Shelf {
        vision_language: Families(&[&qwen2_5_vl::Qwen2_5Vl, &qwen3_vl::Qwen3Vl]),
        text_to_text: Families(&[&t5::T5Family]),
        joint: Families(&[&smolvlm::SMOLVLM, &paligemma::PALIGEMMA]),
    }
}

impl<B: Tape<Base = B>> Default for Shelves<B> {
    /// The families of this repository. Compiled where this is called.
    fn default() -> Self {
        Self { device: shelf(), sizes: shelf() }
    }
}
