//! Dropout on the input of a low-rank update: the words of [`dropout`](crate::kernels::dropout), computed
//! where they are used.

use burn::tensor::{DType, backend::Backend};
use burn_cubecl::{CubeElement, CubeRuntime, kernel::into_contiguous, tensor::CubeTensor};
use cubecl::prelude::*;
use half::{bf16, f16};

use super::launch::{by_element, empty, len, vector, width};
use crate::kernels::dropout::{Dropout, FIRST, SECOND, STRIDE, scale, threshold};

/// `x [n, i]`, contiguous, with the dropped elements zero and all others scaled up, in its own type.
pub fn dropped<B, R>(x: CubeTensor<R>, dropout: &Dropout<B>) -> CubeTensor<R>
where
    B: Backend<FloatTensorPrimitive = CubeTensor<R>, IntTensorPrimitive = CubeTensor<R>, Device = R::Device>,
    R: CubeRuntime,
{
    let words = into_contiguous(dropout.rows.words_on(&x.device).into_primitive());
    match x.dtype {
        DType::BF16 => launch::<R, bf16>(x, words, dropout.module, dropout.rate),
        DType::F16 => launch::<R, f16>(x, words, dropout.module, dropout.rate),
        _ => launch::<R, f32>(x, words, dropout.module, dropout.rate),
    }
}

fn launch<R: CubeRuntime, F: CubeElement + Float>(
    x: CubeTensor<R>,
    words: CubeTensor<R>,
    module: u64,
    rate: f64,
) -> CubeTensor<R> {
    let (y, client, lanes) =
        (empty(&x, x.meta.shape().clone(), x.dtype), x.client.clone(), vector(width(&x)));
    let vectors = width(&x) / lanes;
    let (count, dim) = by_element(len(&x) / lanes);
    dropped_kernel::launch::<F, R>(
        &client,
        count,
        dim,
        lanes,
        x.into_array_arg(),
        words.into_array_arg(),
        y.clone().into_array_arg(),
        vectors as u32,
        module as u32,
        (module >> 32) as u32,
        threshold(rate),
        scale(rate),
    );
    y
}

#[cube(launch)]
fn dropped_kernel<N: Size, F: Float>(
    x: &Array<Vector<F, N>>,
    words: &Array<u32>,
    y: &mut Array<Vector<F, N>>,
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
        let value = Vector::<f32, N>::cast_from(x[ABSOLUTE_POS]);
        let mut kept = Vector::<f32, N>::new(0.0);
        #[unroll]
        for lane in 0..N::value() {
            let word = hashed(low + (first + lane) as u32 * STRIDE, high);
            if word >> 8u32 >= threshold {
                kept[lane] = value[lane] * scale;
            }
        }
        y[ABSOLUTE_POS] = Vector::cast_from(kept);
    }
}

#[cube]
fn hashed(word: u32, other: u32) -> u32 {
    let first = (word ^ (word >> 16u32)) * FIRST;
    let second = ((first ^ (first >> 15u32)) + other) * SECOND;
    second ^ (second >> 16u32)
}
