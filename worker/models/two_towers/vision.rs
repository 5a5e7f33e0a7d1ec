//! What a family's vision tower offers to the parts that run it.

use std::fmt;

use burn::tensor::Tensor;
use coxswain_nn::{
    block::Block,
    kernels::{ModelBackend, Tape},
    params::ParamScope,
};

use super::sizes::TowersConfig;
use crate::pretrained::{
    error::{ModelError, TokenError},
    loader::Loader,
    pictures::ImageShape,
    stack::{Assemble, Stack},
};

/// The patch embedding and the blocks of a vision tower.
pub trait VisionStem<B: ModelBackend>: Sized {
    /// Every size that values depend on.
    type Sizes: Clone + fmt::Debug;
    /// One of its blocks.
    type Block: Assemble<B>;

    /// These sizes with at most `depth` blocks.
    fn cut(sizes: &Self::Sizes, depth: usize) -> Self::Sizes;

    /// Loads it. Registers what trains: patch embedding, then blocks.
    fn load(loader: &mut Loader<'_, B>, sizes: &Self::Sizes) -> Result<Self, ModelError>;

    /// Sizes.
    fn sizes(&self) -> &Self::Sizes;

    /// Tables and masks for images of these grids, `(t, h, w)` in patches.
    fn context(&self, grids: &[ImageShape]) -> Result<StemContext<B, Self>, TokenError>;

    /// Row and column of each patch of an image, in the order in which blocks run them.
    fn positions(&self, grid: ImageShape) -> Result<Vec<[u32; 2]>, TokenError>;

    /// Patches `[patches, channels * frames * side * side]` in the order in which blocks run them, given in
    /// raster order of merged squares and in pieces of whole images.
    fn patches(
        &self,
        pixel_values: &[&[f32]],
        context: &StemContext<B, Self>,
    ) -> Result<Tensor<B, 2>, TokenError>;

    /// Embeds patches: `[patches, d]`.
    fn embed<T: Tape<Base = B>>(
        &self,
        params: &ParamScope<'_, T>,
        x_pi: Tensor<T, 2>,
        context: &StemContext<B, Self>,
    ) -> Tensor<T, 2>;

    /// Whether anything of the embedding trains.
    fn embed_trains(&self) -> bool;

    /// Blocks, first to last.
    fn blocks(&self) -> &Stack<B, Self::Block>;
}

/// What all blocks of a stem share within one micro-batch.
pub type StemContext<B, S> = <<S as VisionStem<B>>::Block as Block<B>>::Context;

/// A merger of a tower, by where its patches come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MergerPlace {
    /// Behind the block of this stream.
    Stream(usize),
    /// Behind the last block.
    Last,
}

/// A vision tower: images to tokens of the language model's width.
pub trait VisionTower<B: ModelBackend>: Sized {
    /// What it is made of before its mergers.
    type Stem: VisionStem<B>;
    /// Family's configuration.
    type Config: TowersConfig<Vision = <Self::Stem as VisionStem<B>>::Sizes>;

    /// Loads everything below `model.visual`.
    fn load(
        loader: &mut Loader<'_, B>,
        sizes: &<Self::Stem as VisionStem<B>>::Sizes,
    ) -> Result<Self, ModelError>;

    /// Patch embedding and blocks.
    fn stem(&self) -> &Self::Stem;

    /// The blocks behind which a stream leaves the tower, ascending. Stream `j` is added to the hidden states
    /// behind decoder layer `j`, where the images are.
    fn leaves_behind(&self) -> &[usize] {
        &[]
    }

    /// Merges patches to tokens in raster order, `[tokens, width of the language model]`.
    fn merge<T: Tape<Base = B>>(
        &self,
        params: &ParamScope<'_, T>,
        x_pd: Tensor<T, 2>,
        place: MergerPlace,
        context: &StemContext<B, Self::Stem>,
    ) -> Tensor<T, 2>;

    /// Whether anything of a merger trains.
    fn merger_trains(&self, place: MergerPlace) -> bool;
}
