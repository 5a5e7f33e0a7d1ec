//! The families of a program.

use std::fmt;

use coxswain_nn::kernels::{Tape, sizes::Sizes};

use crate::{
    joint::JointFamilyOn, pretrained::family::Families, text_to_text::TextFamilyOn,
    vision_language::VlFamilyOn,
};

/// Families on one kind of device, by what their models do.
pub struct Shelf<B: Tape<Base = B>> {
    /// Images and text to hidden states and text.
    pub vision_language: Families<dyn VlFamilyOn<B>>,
    /// Text to text, by an encoder and a decoder.
    pub text_to_text: Families<dyn TextFamilyOn<B>>,
    /// Families that lend their layers to policies.
    pub joint: Families<dyn JointFamilyOn<B>>,
}

/// The families of a program: on the device that it computes on, and where sizes are all there is. Whatever
/// needs no device asks the second.
pub struct Shelves<B: Tape<Base = B>> {
    /// On the device.
    pub device: Shelf<B>,
    /// For predictions.
    pub sizes: Shelf<Sizes>,
}

impl<B: Tape<Base = B>> Clone for Shelf<B> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<B: Tape<Base = B>> Copy for Shelf<B> {}

impl<B: Tape<Base = B>> fmt::Debug for Shelf<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entry(&self.vision_language).entry(&self.text_to_text).entry(&self.joint).finish()
    }
}

impl<B: Tape<Base = B>> Clone for Shelves<B> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<B: Tape<Base = B>> Copy for Shelves<B> {}
