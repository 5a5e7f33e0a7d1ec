//! The frozen part: images to trajectories.
//!
//! ```text
//! patches ─▶ block 0 ─▶ block 1 ─▶ .. ─▶ last chosen block          [b * patches, d] between them
//!              │ pooled     │ pooled          │ pooled              [b * positions, d] of each chosen one
//!              └────────────┴───── side by side ─────▶              [b * positions, layers * d]
//! ```
//!
//! Pooling is the mean over the patches of a position: position `i` of `r` along a side of `g` patches has
//! those from `floor(i g / r)` to before `ceil((i + 1) g / r)`, as PyTorch's `adaptive_avg_pool2d` has them.
//! It runs as a product with the means' weights, patches in the order in which blocks have them, so hidden
//! states never leave the device, and of a layer no more than its pooled values stays. A row's bits depend
//! on its own image alone.

use burn::tensor::{Tensor, TensorData};
use coxswain_models::{
    Shelf,
    pretrained::{
        blocks::BlockWeights, directory, error::ModelError, frozen::FrozenTensor, pictures::ImageShape,
    },
    vision_language::{LoadOptions, ModelOutline, PassError, VisionTrunk},
};
use coxswain_nn::kernels::{LinearOps, Tape};
use coxswain_proto::run_spec::RunSpec;
use coxswain_task::TaskError;

use super::{config::TrajectorySettings, data::grid_of};
use crate::{frozen::FrozenTensors, pretrained};

/// The extractor, as its time is shown.
pub(super) const EXTRACTOR: &str = "extractor";

/// Sizes of trajectories.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TrajectoryShape {
    /// Positions of an image.
    pub positions: usize,
    /// Blocks whose outputs make a trajectory, ascending.
    pub layers: Vec<usize>,
    /// Values of a layer at a position.
    pub dim: usize,
    /// Patches of an image, `(t, h, w)`.
    pub grid: ImageShape,
}

impl TrajectoryShape {
    /// The shape that a run's extractor gives, a model of this outline; refused if it cannot give them.
    pub fn from_settings(settings: &TrajectorySettings, model: &ModelOutline) -> Result<Self, TaskError> {
        let (depth, dim) = (model.vision.depth, model.vision.width);
        let (layers, path) = (settings.extractor.layers.clone(), &settings.extractor.path);
        let layers = layers.unwrap_or_else(|| (0..depth).collect());
        let Some(last) = depth.checked_sub(1) else {
            return Err(TaskError::bad_input(format!(
                "extractor.path: the vision tower of {path} has no blocks whose outputs could be learned; \
                 name another model"
            )));
        };
        if let Some(beyond) = layers.iter().find(|layer| **layer > last) {
            return Err(TaskError::bad_input(format!(
                "extractor.layers: names block {beyond}, but the vision tower of {path} has only blocks 0 to {last}; remove that block"
            )));
        }
        let grid = grid_of(model.patches, settings).map_err(TaskError::bad_input)?;
        let shape = Self { positions: settings.extractor.spatial_resolution.pow(2), layers, dim, grid };
        let (latent, width) = (settings.network.latent_dim, shape.width());
        if latent >= width {
            return Err(TaskError::bad_input(format!(
                "network.latent_dim: {latent}, but a trajectory has only {} layers x {dim} = {width} values, so there is nothing to learn; give less than {width}",
                shape.layers.len()
            )));
        }
        Ok(shape)
    }

    /// Values of a trajectory.
    pub fn width(&self) -> usize {
        self.layers.len() * self.dim
    }

    /// Blocks that run.
    pub fn depth(&self) -> usize {
        self.layers.last().map_or(0, |last| last + 1)
    }

    /// Where trajectories are taken, in words.
    pub fn tap(&self) -> String {
        let layers: Vec<String> = self.layers.iter().map(usize::to_string).collect();
        format!("vision blocks {}, pooled to {} positions", layers.join(" "), self.positions)
    }

    /// The tensors of the checkpoint that are read for them.
    pub fn frozen(&self, model: &ModelOutline) -> impl Iterator<Item = FrozenTensor> {
        let (depth, mut behind) = (self.depth(), false);
        // What a tower has after its blocks joins it to the language model.
        model.tensors().into_iter().filter(|tensor| tensor.of_vision()).filter(move |tensor| {
            behind |= tensor.block().is_some();
            tensor.block().map_or(!behind, |block| block < depth)
        })
    }
}

/// The vision tower up to the last chosen block.
pub struct TrajectoryExtractor<B: Tape<Base = B>> {
    /// What it gives.
    pub shape: TrajectoryShape,
    trunk: Box<dyn VisionTrunk<B>>,
    model: ModelOutline,
    /// Weight of each patch in each position's mean, `[positions, patches]`.
    pooling_ps: Tensor<B, 2>,
}

impl<B: Tape<Base = B>> TrajectoryExtractor<B> {
    /// Reads the blocks of a run's extractor.
    pub fn load(
        spec: &RunSpec,
        models: Shelf<B>,
        settings: &TrajectorySettings,
        device: &B::Device,
    ) -> Result<Self, TaskError> {
        let dir = pretrained::directory::<B>(&settings.extractor.path).map_err(TaskError::bad_input)?;
        let family = models.vision_language.of(&dir).map_err(TaskError::bad_input)?;
        let model = family.outline(&dir).map_err(TaskError::bad_input)?;
        let shape = TrajectoryShape::from_settings(settings, &model)?;
        let options =
            LoadOptions { blocks: BlockWeights::from_spec(spec), ..settings.extractor.weights_dtype.into() };
        let trunk = family.trunk(&dir, options, shape.depth(), device);
        let trunk = trunk.map_err(TaskError::bad_input)?;
        let positions = trunk.positions(shape.grid).map_err(TaskError::bad_input)?;
        let weights = pooling(&positions, shape.grid, settings.extractor.spatial_resolution);
        let pooling_ps =
            Tensor::from_data(TensorData::new(weights, [shape.positions, positions.len()]), device);
        Ok(Self { shape, trunk, model, pooling_ps })
    }

    /// Trajectories of these images, `[patches, patch values]` each: `[images * positions, layers * dim]`.
    pub fn trajectories(&self, pixel_values: &[&[f32]]) -> Result<Tensor<B, 2>, PassError> {
        let images = pixel_values.len();
        let mut layers = Vec::with_capacity(self.shape.layers.len());
        self.trunk.run(pixel_values, &vec![self.shape.grid; images], &mut |block, x_nd| {
            if self.shape.layers.contains(&block) {
                layers.push(self.pooled(x_nd.clone(), images));
            }
        })?;
        Ok(Tensor::cat(layers, 1))
    }

    /// Means over the patches of each position: `[b * patches, d]` to `[b * positions, d]`.
    fn pooled(&self, x_nd: Tensor<B, 2>, images: usize) -> Tensor<B, 2> {
        let ([n, d], p) = (x_nd.dims(), self.shape.positions);
        let patches = n / images;
        // A row for each channel of each image, so that the product is over patches.
        let rows_ms: Tensor<B, 2> =
            x_nd.reshape([images, patches, d]).swap_dims(1, 2).reshape([images * d, patches]);
        let means_mp = <B as LinearOps>::linear(rows_ms, self.pooling_ps.clone(), None);
        means_mp.reshape([images, d, p]).swap_dims(1, 2).reshape([images * p, d])
    }

    /// The tensors of the checkpoint that were read.
    pub fn frozen(&self) -> impl Iterator<Item = FrozenTensor> {
        self.shape.frozen(&self.model)
    }

    /// Most bytes of streamed blocks that were in memory at once so far.
    pub fn most_streamed(&self) -> u64 {
        self.trunk.most_streamed()
    }

    /// Everything frozen that trajectories depend on.
    pub fn weights(
        &self,
        settings: &TrajectorySettings,
        device: &B::Device,
    ) -> Result<FrozenTensors, ModelError> {
        let dir = &directory::whole(&settings.extractor.path)?;
        let names = self.frozen().map(|tensor| tensor.name);
        let dtype = settings.extractor.weights_dtype;
        let about = format!("{}\n{dtype:?}\n{}\n{:?}", B::name(device), self.trunk.sizes(), self.shape);
        FrozenTensors::from_checkpoint(dir, self.model.rules, names, &about)
    }
}

/// Weight of each patch in each position's mean, `[positions, patches]`, patches where `at` says.
fn pooling(at: &[[u32; 2]], [_, rows, columns]: ImageShape, resolution: usize) -> Vec<f32> {
    let span = |position: usize, patches: u32| {
        let patches = patches as usize;
        (position * patches / resolution) as u32..((position + 1) * patches).div_ceil(resolution) as u32
    };
    let mut weights = Vec::with_capacity(resolution * resolution * at.len());
    for (top, left) in (0..resolution).flat_map(|top| (0..resolution).map(move |left| (top, left))) {
        let (rows, columns) = (span(top, rows), span(left, columns));
        let each = 1.0 / (rows.len() * columns.len()) as f32;
        let weight = |[row, column]: &[u32; 2]| rows.contains(row) && columns.contains(column);
        weights.extend(at.iter().map(|patch| if weight(patch) { each } else { 0.0 }));
    }
    weights
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn positions_that_patches_do_not_divide_into_share_those_between_them() {
        let at: Vec<[u32; 2]> = (0..9).map(|patch| [patch / 3, patch % 3]).collect();
        let weights = pooling(&at, [1, 3, 3], 2);
        let q = 0.25;
        assert_eq!(weights[..9], [q, q, 0.0, q, q, 0.0, 0.0, 0.0, 0.0]);
        assert_eq!(weights[27..], [0.0, 0.0, 0.0, 0.0, q, q, 0.0, q, q]);
        assert_eq!(pooling(&at, [1, 3, 3], 1), [1.0 / 9.0; 9]);
        for position in pooling(&at, [1, 3, 3], 3).chunks(9) {
            assert_eq!(position.iter().filter(|weight| **weight == 1.0).count(), 1);
        }
    }
}
