//! The sensor encoder: a window of readings becomes a few tokens of the expert's width.
//!
//! ```text
//! window [b, w, c]  ->  patches [b * tokens, ceil(w / tokens) * c]
//!                    ->  W_2 gelu_tanh(W_1 x + b_1) + b_2 + position
//! ```
//!
//! A window that does not divide into `tokens` patches is extended at its old end by repeating the oldest
//! reading, so the newest reading is always the last value of the last token. Time order is kept by the
//! positions. Normalisation is the data pipeline's business, and which sensor this is does not matter here.

use burn::tensor::{Tensor, TensorData};

use coxswain_nn::{
    dense::{Dense, DenseShape},
    kernels::Tape,
    params::{Init, ParamId, ParamScope, TrainableLayout},
    recompute::segment::Segment,
};

use super::SENSOR;

/// Sizes of an encoder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SensorShape {
    /// Readings per window.
    pub window: usize,
    /// Channels per reading.
    pub channels: usize,
    /// Tokens it becomes; at most `window`.
    pub tokens: usize,
    /// Hidden width.
    pub width: usize,
    /// Width of the tokens: the expert's.
    pub outputs: usize,
}

impl SensorShape {
    /// Readings per token.
    pub fn patch(&self) -> usize {
        self.window.div_ceil(self.tokens)
    }
}

/// The encoder: where its parameters lie in the flat parameter buffer.
#[derive(Clone, Debug)]
pub struct SensorEncoder {
    shape: SensorShape,
    first: Dense,
    second: Dense,
    positions: ParamId,
}

/// The encoder on one micro-batch, as a segment without inputs; gives `[b * tokens, outputs]`.
pub struct SensorSegment<'a, B: Tape<Base = B>> {
    encoder: &'a SensorEncoder,
    patches_nc: Tensor<B, 2>,
}

impl SensorEncoder {
    /// Registers all parameters under `sensor.…`.
    pub fn register(layout: &mut TrainableLayout, shape: SensorShape) -> Self {
        let inputs = shape.patch() * shape.channels;
        let mut dense = |name, inputs, outputs| {
            Dense::register(layout, SENSOR, name, DenseShape::xavier(inputs, outputs))
        };
        let first = dense("sensor.in", inputs, shape.width);
        let second = dense("sensor.out", shape.width, shape.outputs);
        let positions = layout.add(
            "sensor.positions".into(),
            &[shape.tokens, shape.outputs],
            SENSOR,
            false,
            Init::Normal(0.02),
        );
        Self { shape, first, second, positions }
    }

    /// Sizes.
    pub fn shape(&self) -> &SensorShape {
        &self.shape
    }

    /// The encoder on `windows`, `[b, window, channels]`.
    pub fn segment<B: Tape<Base = B>>(&self, windows: &[f32], device: &B::Device) -> SensorSegment<'_, B> {
        let SensorShape { window, channels, tokens, .. } = self.shape;
        let patch = self.shape.patch();
        let missing = patch * tokens - window;
        let mut patches = Vec::with_capacity(windows.len() / window * patch * tokens);
        for window in windows.chunks_exact(window * channels) {
            (0..missing).for_each(|_| patches.extend_from_slice(&window[..channels]));
            patches.extend_from_slice(window);
        }
        let inputs = patch * channels;
        let shape = [patches.len() / inputs, inputs];
        SensorSegment {
            encoder: self,
            patches_nc: Tensor::from_data(TensorData::new(patches, shape), device),
        }
    }
}

impl<B: Tape<Base = B>> Segment<B> for SensorSegment<'_, B> {
    fn run<T: Tape<Base = B>>(&self, params: &ParamScope<'_, T>, _inputs: &[Tensor<T, 2>]) -> Tensor<T, 2> {
        let SensorShape { tokens, outputs, .. } = self.encoder.shape;
        let h_nf = self.encoder.first.apply(params, T::lift(self.patches_nc.clone()));
        let y_nd = self.encoder.second.apply(params, T::gelu_tanh(h_nf));
        let batch = y_nd.dims()[0] / tokens;
        let y_btd = y_nd.reshape([batch, tokens, outputs])
            + params.get::<2>(self.encoder.positions).reshape([1, tokens, outputs]);
        y_btd.reshape([batch * tokens, outputs])
    }
}

#[cfg(test)]
mod tests {
    use burn::backend::Flex;

    use super::*;
    use coxswain_nn::params::Trainables;

    fn encode(shape: SensorShape, windows: &[f32]) -> Vec<f32> {
        let mut layout = TrainableLayout::default();
        let encoder = SensorEncoder::register(&mut layout, shape);
        let trainables =
            Trainables::<Flex>::new(layout.clone(), layout.initial_values(4), &Default::default());
        let segment = encoder.segment::<Flex>(windows, &Default::default());
        let tokens = segment.run(&ParamScope::<Flex>::frozen(&trainables), &[]);
        assert_eq!(
            tokens.dims(),
            [windows.len() / (shape.window * shape.channels) * shape.tokens, shape.outputs]
        );
        tokens.into_data().into_vec().expect("f32")
    }

    #[test]
    fn a_token_sees_its_own_readings_only() {
        let shape = SensorShape { window: 6, channels: 2, tokens: 3, width: 8, outputs: 4 };
        let window: Vec<f32> = (0..12).map(|i| i as f32 / 10.0).collect();
        let mut newer = window.clone();
        newer[11] += 1.0;
        let (before, after) = (encode(shape, &window), encode(shape, &newer));
        assert_eq!(before[..8], after[..8]);
        assert_ne!(before[8..], after[8..]);
    }

    #[test]
    fn a_window_that_does_not_divide_repeats_its_oldest_reading() {
        let uneven = SensorShape { window: 5, channels: 1, tokens: 3, width: 8, outputs: 4 };
        let even = SensorShape { window: 6, ..uneven };
        assert_eq!(encode(uneven, &[1.0, 2.0, 3.0, 4.0, 5.0]), encode(even, &[1.0, 1.0, 2.0, 3.0, 4.0, 5.0]));
    }

    #[test]
    fn samples_do_not_mix() {
        let shape = SensorShape { window: 4, channels: 2, tokens: 2, width: 8, outputs: 4 };
        let windows: Vec<f32> = (0..16).map(|i| (i as f32).sin()).collect();
        let (first, second) = (encode(shape, &windows[..8]), encode(shape, &windows[8..]));
        assert_eq!(encode(shape, &windows), [first, second].concat());
    }
}
