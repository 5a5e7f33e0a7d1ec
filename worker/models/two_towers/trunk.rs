//! The first blocks of the vision tower, frozen, without merger and language model: what images are between
//! its blocks, for tasks that learn from that.
//!
//! Only what runs is read. Patches are in the order in which blocks run them.

use std::{cell::Cell, ops::ControlFlow, path::Path, sync::Arc};

use burn::tensor::Tensor;
use coxswain_nn::{
    block::Block,
    kernels::{Tape, precision},
    memory,
    params::{ParamScope, TrainableLayout, Trainables},
};

use super::{
    sizes::TowersConfig,
    vision::{VisionStem, VisionTower},
};
use crate::{
    pretrained::{
        checkpoint::Checkpoint,
        error::{ModelError, TokenError},
        loader::Loader,
        pictures::ImageShape,
        trains::Trains,
    },
    vision_language::{LoadOptions, VisionTrunk, model::PassError},
};

/// The patch embedding and the first blocks.
pub struct TowerTrunk<B: Tape<Base = B>, V: VisionTower<B>> {
    /// With as many blocks as are there.
    stem: V::Stem,
    device: B::Device,
}

impl<B: Tape<Base = B>, V: VisionTower<B>> TowerTrunk<B, V> {
    /// Reads the patch embedding and the first `depth` blocks of a model directory; at most all there are.
    pub fn load(
        dir: &Path,
        options: LoadOptions,
        depth: usize,
        device: &B::Device,
    ) -> Result<Self, ModelError> {
        let (config, rules) = (V::Config::read(dir)?, V::Config::RULES);
        let sizes = V::Stem::cut(config.vision(), depth);
        let checkpoint = &Arc::new(Checkpoint::open_for(dir, rules, B::VALUES)?);
        let LoadOptions { dtype, blocks, .. } = options;
        precision::follow(dtype.dense());
        let (layout, trains) = (&mut TrainableLayout::default(), Trains::default());
        let in_flight = Cell::default();
        let mut loader = Loader { checkpoint, dtype, blocks, trains, layout, device, in_flight, within: "" };
        Ok(Self { stem: V::Stem::load(&mut loader, &sizes)?, device: device.clone() })
    }
}

impl<B: Tape<Base = B>, V: VisionTower<B>> VisionTrunk<B> for TowerTrunk<B, V> {
    fn sizes(&self) -> String {
        format!("{:?}", self.stem.sizes())
    }

    fn run(
        &self,
        pixel_values: &[&[f32]],
        grids: &[ImageShape],
        look: &mut dyn FnMut(usize, &Tensor<B, 2>),
    ) -> Result<(), PassError> {
        let context = self.stem.context(grids)?;
        // Nothing trains here.
        let none = Trainables::new(TrainableLayout::default(), Vec::new(), &self.device);
        let params = ParamScope::<B>::frozen(&none);
        let x_pi = self.stem.patches(pixel_values, &context)?;
        let x_pd = self.stem.embed(&params, x_pi, &context);
        let blocks = self.stem.blocks();
        blocks.fold(0..blocks.count(), x_pd, |x_pd, index, block| {
            memory::check();
            let x_pd = block.attention_half(&params, x_pd, &context);
            let x_pd = block.mlp_half(&params, x_pd, &context);
            look(index, &x_pd);
            ControlFlow::Continue(x_pd)
        })?;
        Ok(())
    }

    fn positions(&self, grid: ImageShape) -> Result<Vec<[u32; 2]>, TokenError> {
        self.stem.positions(grid)
    }

    fn most_streamed(&self) -> u64 {
        self.stem.blocks().most_streamed()
    }
}
