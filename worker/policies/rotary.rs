//! Rotary tables and masks: which token sees which, and where it stands.
//!
//! Angles are `position / 10000^(2 j / k)` whatever the language model was made with. Masks are added to
//! scores: 0 where a key is seen, and so much that nothing is left of it where not.

use std::ops::Range;

use burn::tensor::{Tensor, TensorData};
use coxswain_models::joint::StreamShape;
use coxswain_nn::kernels::{ModelBackend, Tape};

/// The longest wavelength over 2 pi.
const WAVELENGTH: f32 = 10_000.0;
/// Added to the score of a key that is not seen.
const UNSEEN: f32 = -1e30;

/// Cosines and sines, `[b, s, k]`.
pub(crate) struct Rotary<B: ModelBackend>([Tensor<B, 3>; 2]);

impl<B: ModelBackend> Rotary<B> {
    /// Angles of tokens at these positions, `[b, s]`, in heads of `head_dim`.
    pub fn new(positions: &[u32], batch: usize, head_dim: usize, device: &B::Device) -> Self {
        let half = head_dim / 2;
        let shape = [batch, positions.len() / batch.max(1), head_dim];
        let timescale: Vec<f32> =
            (0..half).map(|j| WAVELENGTH.powf(2.0 / head_dim as f32 * j as f32)).collect();
        let table = |of: fn(f32) -> f32| {
            let row = |&position: &u32| {
                let angles: Vec<f32> = timescale.iter().map(|scale| of(position as f32 / scale)).collect();
                [angles.clone(), angles].concat()
            };
            placed(positions.iter().flat_map(row).collect(), shape, device)
        };
        Self([table(f32::cos), table(f32::sin)])
    }

    /// Queries or keys under it, `[b, s, heads, k]`.
    pub fn rotate<T: Tape<Base = B>>(&self, x_bshk: Tensor<T, 4>) -> Tensor<T, 4> {
        let [cos_bsk, sin_bsk] = self.0.each_ref().map(|table| T::lift(table.clone()));
        T::rotary(x_bshk, cos_bsk, sin_bsk)
    }
}

/// Scores of keys `[b, 1, 1, s + behind]`, for prefixes that are these ranges of `s` tokens: what is a row's
/// of them is seen, and every token behind them.
pub(crate) fn key_mask<B: ModelBackend>(
    valid: &[Range<u32>],
    [seq, behind]: [usize; 2],
    device: &B::Device,
) -> Tensor<B, 4> {
    let seen = |row: &Range<u32>, key: usize| key >= seq || row.contains(&(key as u32));
    let scores = valid.iter().flat_map(|row| (0..seq + behind).map(move |key| score(seen(row, key))));
    placed(scores.collect(), [valid.len(), 1, 1, seq + behind], device)
}

/// What is added to the score of a key.
pub(crate) fn score(seen: bool) -> f32 {
    if seen { 0.0 } else { UNSEEN }
}

/// Keys and values of a prefix, `[b * s, kv]`, by heads of such a layer.
pub(crate) fn by_head<T: Tape>(
    known: [Tensor<T, 2>; 2],
    batch: usize,
    layer: &StreamShape,
) -> [Tensor<T, 4>; 2] {
    known.map(|x_no| {
        let tokens = x_no.dims()[0] / batch.max(1);
        x_no.reshape([batch, tokens, layer.kv_heads, layer.head_dim])
    })
}

/// Queries `[b, q, heads, k]` that attend to keys and values `[b, s, kv_heads, k]` as the mask says.
pub(crate) fn attend<T: Tape>(
    q_bqhk: Tensor<T, 4>,
    [k_bshk, v_bshk]: [Tensor<T, 4>; 2],
    mask: &Tensor<T::Base, 4>,
) -> Tensor<T, 4> {
    let [_, _, heads, head_dim] = q_bqhk.dims();
    let [batch, keys, kv_heads, _] = k_bshk.dims();
    let group = heads / kv_heads;
    let repeated = |x_bshk: Tensor<T, 4>| {
        let x_bshgk = x_bshk.unsqueeze_dim::<5>(3).expand([batch, keys, kv_heads, group, head_dim]);
        x_bshgk.reshape([batch, keys, heads, head_dim])
    };
    let scale = (head_dim as f32).powf(-0.5);
    let inputs = [q_bqhk * scale, repeated(k_bshk), repeated(v_bshk)];
    T::biased_attention(inputs, &[T::lift(mask.clone())])
}

/// Values of this shape on a device.
pub(crate) fn placed<B: ModelBackend, const D: usize>(
    values: Vec<f32>,
    shape: [usize; D],
    device: &B::Device,
) -> Tensor<B, D> {
    if !B::VALUES {
        return Tensor::zeros(shape, device);
    }
    Tensor::from_data(TensorData::new(values, shape), device)
}
