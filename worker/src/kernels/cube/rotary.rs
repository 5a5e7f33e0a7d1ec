//! Rotary embedding in the rotate-half convention: one unit turns one pair of a head's elements.

use burn_cubecl::{CubeRuntime, tensor::CubeTensor};
use cubecl::prelude::*;

use super::launch::{by_element, empty_like, len};

/// `x cos + rotate_half(x) sin`. `x [b, s, h, k]`; tables `[b, s, k]`, or `[1, s, k]` for all of the batch.
pub fn rotary<R: CubeRuntime>(x: CubeTensor<R>, cos: CubeTensor<R>, sin: CubeTensor<R>) -> CubeTensor<R> {
    turned(x, cos, sin, false)
}

/// The gradient of `x` under [`rotary`].
pub fn rotary_backward<R: CubeRuntime>(
    dy: CubeTensor<R>,
    cos: CubeTensor<R>,
    sin: CubeTensor<R>,
) -> CubeTensor<R> {
    turned(dy, cos, sin, true)
}

fn turned<R: CubeRuntime>(
    x: CubeTensor<R>,
    cos: CubeTensor<R>,
    sin: CubeTensor<R>,
    back: bool,
) -> CubeTensor<R> {
    let (y, client) = (empty_like(&x), x.client.clone());
    let (heads, dim) = (x.meta.shape()[2], x.meta.shape()[3]);
    let tokens = len(&cos) / dim;
    let (count, cube) = by_element(len(&x) / 2);
    turn_kernel::launch::<R>(
        &client,
        count,
        cube,
        x.into_array_arg(),
        cos.into_array_arg(),
        sin.into_array_arg(),
        y.clone().into_array_arg(),
        heads as u32,
        (dim / 2) as u32,
        tokens as u32,
        back,
    );
    y
}

/// `tokens` is how many the tables have: all, or those of one batch row.
#[cube(launch)]
fn turn_kernel(
    x: &Array<f32>,
    cos: &Array<f32>,
    sin: &Array<f32>,
    y: &mut Array<f32>,
    heads: u32,
    half: u32,
    tokens: u32,
    #[comptime] back: bool,
) {
    let half = half as usize;
    if ABSOLUTE_POS < y.len() / 2 {
        let (row, j) = (ABSOLUTE_POS / half, ABSOLUTE_POS % half);
        let first = row * 2 * half + j;
        let second = first + half;
        let angle = row / heads as usize % tokens as usize * 2 * half + j;
        let (a, b) = (x[first], x[second]);
        if back {
            y[first] = a * cos[angle] + b * sin[angle + half];
            y[second] = b * cos[angle + half] - a * sin[angle];
        } else {
            y[first] = a * cos[angle] - b * sin[angle];
            y[second] = b * cos[angle + half] + a * sin[angle + half];
        }
    }
}
