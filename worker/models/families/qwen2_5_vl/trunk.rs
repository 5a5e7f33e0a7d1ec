//! The first blocks of the vision tower, frozen, without merger and language model: what images are between
//! its blocks, for tasks that learn from that.
//!
//! Only what runs is read. Patches are in window order throughout ([`WindowPlan`](super::windows)).

use std::{cell::Cell, ops::ControlFlow, path::Path, sync::Arc};

use burn::tensor::Tensor;
use coxswain_nn::{
    block::Block,
    kernels::{Tape, precision},
    lora::LoraLinear,
    memory,
    params::{ParamScope, TrainableLayout, Trainables},
};

use super::{
    config::{QwenConfig, VisionConfig},
    rules::RULES,
    vision::{VisionBlock, VisionContext, patch_embedding},
    windows::WindowPlan,
};
use crate::{
    pretrained::{
        checkpoint::Checkpoint,
        error::{ModelError, TokenError},
        loader::Loader,
        pictures::ImageShape,
        stack::Stack,
        trains::Trains,
    },
    vision_language::{LoadOptions, VisionTrunk, model::Broken},
};

/// The patch embedding and the first blocks.
pub struct QwenTrunk<B: Tape<Base = B>> {
    /// Sizes; as many blocks as are there.
    config: VisionConfig,
    blocks: Stack<B, VisionBlock<B>>,
    patch_embed: LoraLinear<B>,
    device: B::Device,
}

impl<B: Tape<Base = B>> QwenTrunk<B> {
    /// Reads the patch embedding and the first `depth` blocks of a model directory; at most all there are.
    pub fn load(
        dir: &Path,
        options: LoadOptions,
        depth: usize,
        device: &B::Device,
    ) -> Result<Self, ModelError> {
        let mut config = QwenConfig::read(dir)?.vision;
        config.depth = depth.min(config.depth);
        let checkpoint =
            &Arc::new(if B::VALUES { Checkpoint::open(dir, RULES)? } else { Checkpoint::hollow(dir, RULES) });
        let LoadOptions { dtype, blocks, .. } = options;
        if B::VALUES {
            precision::follow(dtype.dense());
        }
        let (layout, trains) = (&mut TrainableLayout::default(), Trains::default());
        let in_flight = Cell::default();
        let mut loader = Loader { checkpoint, dtype, blocks, trains, layout, device, in_flight };
        Ok(Self {
            patch_embed: patch_embedding(&mut loader, &config)?,
            blocks: Stack::load(&mut loader, &config, config.depth)?,
            config,
            device: device.clone(),
        })
    }
}

impl<B: Tape<Base = B>> VisionTrunk<B> for QwenTrunk<B> {
    fn sizes(&self) -> String {
        format!("{:?}", self.config)
    }

    fn run(
        &self,
        pixel_values: &[&[f32]],
        grids: &[ImageShape],
        look: &mut dyn FnMut(usize, &Tensor<B, 2>),
    ) -> Result<(), Broken> {
        let context = VisionContext::new(&self.config, grids, &self.device)?;
        // Nothing trains here.
        let none = Trainables::new(TrainableLayout::default(), Vec::new(), &self.device);
        let params = ParamScope::<B>::frozen(&none);
        let x_pi = context.patches(&self.config, pixel_values, &self.patch_embed, &self.device)?;
        let x_pd = self.patch_embed.forward(&params, x_pi);
        self.blocks.fold(0..self.blocks.count(), x_pd, |x_pd, index, block| {
            memory::check();
            let x_pd = block.attention_half(&params, x_pd, &context);
            let x_pd = block.mlp_half(&params, x_pd, &context);
            look(index, &x_pd);
            ControlFlow::Continue(x_pd)
        })?;
        Ok(())
    }

    fn positions(&self, grid: ImageShape) -> Result<Vec<[u32; 2]>, TokenError> {
        let plan = WindowPlan::new(&self.config, &[grid])?;
        Ok(plan.positions_in_windows(self.config.merge_unit()).collect())
    }

    fn most_streamed(&self) -> u64 {
        self.blocks.most_streamed()
    }
}
