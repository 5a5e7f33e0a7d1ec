//! Dropout on the input of a low-rank update: the words of [`dropout`](crate::kernels::dropout), computed
//! where they are used.

use burn::tensor::backend::Backend;
use burn_cubecl::{CubeRuntime, kernel::into_contiguous, tensor::CubeTensor};
use cubecl::prelude::*;

use super::launch::{by_element, empty_like, len, vector, width};
use crate::kernels::dropout::{Dropout, FIRST, SECOND, STRIDE, scale, threshold};

/// `x [n, i]` with the dropped elements zero and all others scaled up.
pub fn dropped<B, R>(x: CubeTensor<R>, dropout: &Dropout<B>) -> CubeTensor<R>
where
    B: Backend<FloatTensorPrimitive = CubeTensor<R>, IntTensorPrimitive = CubeTensor<R>, Device = R::Device>,
    R: CubeRuntime,
{
    let words = into_contiguous(dropout.rows.words_on(&x.device).into_primitive());
    let (y, client, lanes) = (empty_like(&x), x.client.clone(), vector(width(&x)));
    let vectors = width(&x) / lanes;
    let (count, dim) = by_element(len(&x) / lanes);
    dropped_kernel::launch::<R>(
        &client,
        count,
        dim,
        lanes,
        x.into_array_arg(),
        words.into_array_arg(),
        y.clone().into_array_arg(),
        vectors as u32,
        dropout.module as u32,
        (dropout.module >> 32) as u32,
        threshold(dropout.rate),
        scale(dropout.rate),
    );
    y
}

#[cube(launch)]
fn dropped_kernel<N: Size>(
    x: &Array<Vector<f32, N>>,
    words: &Array<u32>,
    y: &mut Array<Vector<f32, N>>,
    vectors: u32,
    module_low: u32,
    module_high: u32,
    threshold: u32,
    scale: f32,
) {
    if ABSOLUTE_POS < y.len() {
        let (row, at) = (ABSOLUTE_POS / vectors as usize, ABSOLUTE_POS % vectors as usize);
        let low = hashed(words[2 * row] ^ module_low, 0u32);
        let high = hashed(words[2 * row + 1] ^ module_high, low);
        let first = at * N::value();
        let value = x[ABSOLUTE_POS];
        let mut kept = Vector::<f32, N>::new(0.0);
        #[unroll]
        for lane in 0..N::value() {
            let word = hashed(low + (first + lane) as u32 * STRIDE, high);
            if word >> 8u32 >= threshold {
                kept[lane] = value[lane] * scale;
            }
        }
        y[ABSOLUTE_POS] = kept;
    }
}

#[cube]
fn hashed(word: u32, other: u32) -> u32 {
    let first = (word ^ (word >> 16u32)) * FIRST;
    let second = ((first ^ (first >> 15u32)) + other) * SECOND;
    second ^ (second >> 16u32)
}
