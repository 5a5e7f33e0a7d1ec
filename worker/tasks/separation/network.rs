//! The network: from the spectrum of a mixture to a complex mask for each stem and channel (band-split RNN,
//! arXiv 2209.15174, with attention for its recurrent paths, arXiv 2309.02612).
//!
//! ```text
//! spectrum of band k [b * t, w_k]  ─ split: W_k s + b_k ─▶  [b, t, k, d]
//! dual path, layers times          ─ a block along time, a block along bands ─▶  [b, t, k, d]
//! masks of band k                  ─ W_2k tanh(W_1k rms_norm(x_k) + b_1k) + b_2k ─▶  [b * t, m_k]
//! ```
//!
//! Masks are made band by band: a band's graph goes before the next one's is there, if anything is run again
//! in the backward pass at all. What this file does not do: know audio ([`scene`](super::scene)).

use std::ops::Range;

use burn::tensor::{Tensor, TensorData};
use coxswain_nn::{
    dense::{Dense, DenseShape},
    kernels::Tape,
    memory,
    params::{GradientSums, Group, ParamScope, TrainableLayout, Trainables},
    recompute::{
        self, Retention, Tower,
        segment::{Input, RecordedSegment, Segment},
    },
};
use coxswain_proto::run_spec::Recompute;

use super::{
    block::{AttentionAxis, BandGrid, PathBlock, PathLayer, normed},
    data::CHANNELS,
};

/// What trains; `optimizer.lr.separator` is its rate.
pub const SEPARATOR: Group = Group("separator");

// Stages, as their times are shown.
/// From spectra to rows.
pub const SPLIT: &str = "split";
/// All blocks.
pub const DUAL_PATH: &str = "dual_path";
/// From rows to masks.
pub const MASKS: &str = "masks";

/// Real and imaginary part.
const PARTS: usize = 2;

/// Sizes of a separator.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SeparatorShape {
    /// What a mixture is made of.
    pub stems: usize,
    /// Frequencies of each band.
    pub bands: Vec<Range<usize>>,
    /// Values of a row.
    pub width: usize,
    /// Dual-path blocks.
    pub layers: usize,
    /// Attention heads.
    pub heads: usize,
}

impl SeparatorShape {
    /// Values of band `band` in a frame of a mixture: `[channels, frequencies, 2]`.
    pub fn inputs(&self, band: usize) -> usize {
        CHANNELS * PARTS * self.bands[band].len()
    }

    /// Values of its masks: `[stems, channels, frequencies, 2]`.
    pub fn outputs(&self, band: usize) -> usize {
        self.stems * self.inputs(band)
    }
}

/// The network: where its parameters lie in the flat parameter buffer.
#[derive(Clone, Debug)]
pub struct Separator {
    shape: SeparatorShape,
    split: Vec<Dense>,
    blocks: Vec<PathBlock>,
    masks: Vec<MaskHead>,
}

/// What makes the masks of a band.
#[derive(Clone, Copy, Debug)]
struct MaskHead {
    hidden: Dense,
    output: Dense,
}

/// All bands of a frame as rows. Inputs are the bands' spectra.
struct SplitSegment<'a>(&'a [Dense]);

impl<B: Tape<Base = B>> Segment<B> for SplitSegment<'_> {
    fn run<T: Tape<Base = B>>(&self, params: &ParamScope<'_, T>, inputs: &[Tensor<T, 2>]) -> Tensor<T, 2> {
        let rows = self.0.iter().zip(inputs).map(|(dense, x_mi)| dense.apply(params, x_mi.clone()));
        let x_me = Tensor::cat(rows.collect(), 1);
        let ([frames, width], bands) = (x_me.dims(), self.0.len());
        x_me.reshape([frames * bands, width / bands])
    }
}

impl<B: Tape<Base = B>> Segment<B> for MaskHead {
    fn run<T: Tape<Base = B>>(&self, params: &ParamScope<'_, T>, inputs: &[Tensor<T, 2>]) -> Tensor<T, 2> {
        let inner = self.hidden.apply(params, normed(inputs[0].clone()));
        self.output.apply(params, inner.tanh())
    }
}

/// A micro-batch on its way through a separator.
pub struct SeparatorPass<'a, B: Tape<Base = B>> {
    separator: &'a Separator,
    grid: BandGrid,
    tower: Tower<'a, B, Vec<PathLayer<'a, B>>>,
    device: B::Device,
}

/// What a forward pass kept.
pub struct SeparatorTrace<'a, B: Tape<Base = B>> {
    split: RecordedSegment<'a, B>,
    blocks: recompute::Trace<'a, B>,
    /// What masks are made of, `[b * t, k * d]`.
    rows_me: Tensor<B, 2>,
    /// Segments of the bands, if nothing is run again.
    masks: Vec<RecordedSegment<'a, B>>,
}

impl Separator {
    /// Registers all parameters under `separator.…`.
    pub fn register(layout: &mut TrainableLayout, shape: SeparatorShape) -> Self {
        let (width, bands) = (shape.width, shape.bands.len());
        let mut dense =
            |name: String, shape| Dense::register(layout, SEPARATOR, &format!("separator.{name}"), shape);
        let split = (0..bands)
            .map(|band| dense(format!("split.{band}"), DenseShape::xavier(shape.inputs(band), width)))
            .collect();
        let masks = (0..bands)
            .map(|band| MaskHead {
                hidden: dense(format!("masks.{band}.in"), DenseShape::xavier(width, 2 * width)),
                output: dense(
                    format!("masks.{band}.out"),
                    DenseShape::xavier(2 * width, shape.outputs(band)),
                ),
            })
            .collect();
        let paths = [("time", AttentionAxis::Time), ("bands", AttentionAxis::Bands)];
        let blocks = (0..shape.layers)
            .flat_map(|layer| paths.map(|(name, path)| (format!("separator.blocks.{layer}.{name}"), path)))
            .map(|(name, path)| PathBlock::register(layout, SEPARATOR, &name, path, [width, shape.heads]))
            .collect();
        Self { shape, split, blocks, masks }
    }

    /// Sizes.
    pub fn shape(&self) -> &SeparatorShape {
        &self.shape
    }

    /// A micro-batch of so many segments of so many frames.
    pub fn run<'a, B: Tape<Base = B>>(
        &'a self,
        trainables: &'a Trainables<B>,
        retention: Retention,
        [batch, frames]: [usize; 2],
    ) -> SeparatorPass<'a, B> {
        let (grid, device) = (BandGrid { batch, frames, bands: self.shape.bands.len() }, trainables.device());
        let layers = PathLayer::all(&self.blocks, grid, self.shape.width, &device);
        let tower = Tower { layers, trainables, retention, sides: Vec::new(), dropout: None };
        SeparatorPass { separator: self, grid, tower, device }
    }
}

impl<'a, B: Tape<Base = B>> SeparatorPass<'a, B> {
    /// Masks of all bands, `[b * t, m_k]` each, and what one backward pass needs. `inputs` are the bands'
    /// spectra.
    pub fn forward(
        &self,
        inputs: Vec<Vec<f32>>,
        lap: &mut dyn FnMut(&'static str),
    ) -> (Vec<Vec<f32>>, SeparatorTrace<'a, B>) {
        let segment = SplitSegment(&self.separator.split);
        let inputs = self.uploaded(inputs).map(Input::constant).collect();
        let split = RecordedSegment::run(&segment, self.tower.trainables, inputs);
        lap(SPLIT);
        let Ok((rows_nd, blocks)) = self.tower.forward(split.output(), true);
        lap(DUAL_PATH);
        let rows_me = self.by_frame(rows_nd);
        let (mut masks, mut kept) = (Vec::new(), Vec::new());
        for band in 0..self.grid.bands {
            memory::check();
            masks.push(host(match self.runs_again() {
                true => self.plain_masks(&rows_me, band),
                false => {
                    kept.push(self.recorded_masks(&rows_me, band));
                    kept[band].output()
                }
            }));
        }
        lap(MASKS);
        (masks, SeparatorTrace { split, blocks, rows_me, masks: kept })
    }

    /// The masks alone.
    pub fn masks(&self, inputs: Vec<Vec<f32>>) -> Vec<Vec<f32>> {
        let params = ParamScope::<B>::frozen(self.tower.trainables);
        let inputs: Vec<_> = self.uploaded(inputs).collect();
        let split_nd = SplitSegment(&self.separator.split).run(&params, &inputs);
        let Ok(rows_nd) = self.tower.run(split_nd);
        let rows_me = self.by_frame(rows_nd);
        (0..self.grid.bands).map(|band| host(self.plain_masks(&rows_me, band))).collect()
    }

    /// Carries the gradients of masks, which `slope` gives band by band, down to the parameters.
    pub fn backward(
        &self,
        kept: SeparatorTrace<'a, B>,
        mut slope: impl FnMut(usize) -> Vec<f32>,
        grads: &mut dyn GradientSums<B>,
        lap: &mut dyn FnMut(&'static str),
    ) {
        let SeparatorTrace { split, blocks, rows_me, masks } = kept;
        let mut kept_masks = masks.into_iter();
        let mut slopes = Vec::with_capacity(self.grid.bands);
        for band in 0..self.grid.bands {
            memory::check();
            let head = kept_masks.next().unwrap_or_else(|| self.recorded_masks(&rows_me, band));
            let slope = self.upload(slope(band));
            slopes.extend(head.backward(slope, grads).into_iter().flatten());
        }
        drop(rows_me);
        let dx_nd = Tensor::cat(slopes, 1).reshape([self.grid.rows(), self.separator.shape.width]);
        lap(MASKS);
        let Ok(gradient) = self.tower.backward(blocks, dx_nd, grads);
        lap(DUAL_PATH);
        if let Some(dx_nd) = gradient.input {
            split.backward(dx_nd, grads);
        }
        lap(SPLIT);
    }

    /// Whether masks are made again in the backward pass.
    fn runs_again(&self) -> bool {
        matches!(self.tower.retention.recompute, Recompute::Full | Recompute::Selective)
    }

    fn plain_masks(&self, rows_me: &Tensor<B, 2>, band: usize) -> Tensor<B, 2> {
        let params = ParamScope::<B>::frozen(self.tower.trainables);
        self.separator.masks[band].run(&params, &[self.of_band(rows_me, band)])
    }

    fn recorded_masks(&self, rows_me: &Tensor<B, 2>, band: usize) -> RecordedSegment<'a, B> {
        let rows = Input::tracked(self.of_band(rows_me, band));
        RecordedSegment::run(&self.separator.masks[band], self.tower.trainables, vec![rows])
    }

    fn by_frame(&self, rows_nd: Tensor<B, 2>) -> Tensor<B, 2> {
        rows_nd.reshape([self.grid.all_frames(), self.grid.bands * self.separator.shape.width])
    }

    /// The rows of a band, `[b * t, d]`.
    fn of_band(&self, rows_me: &Tensor<B, 2>, band: usize) -> Tensor<B, 2> {
        let width = self.separator.shape.width;
        rows_me.clone().narrow(1, band * width, width)
    }

    fn uploaded(&self, bands: Vec<Vec<f32>>) -> impl Iterator<Item = Tensor<B, 2>> {
        bands.into_iter().map(|values| self.upload(values))
    }

    /// Values of all frames.
    fn upload(&self, values: Vec<f32>) -> Tensor<B, 2> {
        let rows = self.grid.all_frames();
        let shape = [rows, values.len() / rows.max(1)];
        Tensor::from_data(TensorData::new(values, shape), &self.device)
    }
}

fn host<B: Tape<Base = B>>(tensor: Tensor<B, 2>) -> Vec<f32> {
    tensor.into_data().convert::<f32>().into_vec().expect("converted to f32")
}
