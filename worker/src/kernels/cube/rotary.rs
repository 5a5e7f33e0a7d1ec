//! Rotary embedding in the rotate-half convention: one unit turns one pair of a head's elements.
//!
//! What is turned is read as it lies (a slice of a wider projection, a gradient ordered by heads), and written as its reader wants it: forward
//! by heads, as attention's products take their inputs, and back by tokens, as the projection's gradient is.

use burn_cubecl::{CubeRuntime, kernel::into_contiguous, ops::permute, tensor::CubeTensor};
use cubecl::prelude::*;

use super::launch::{by_element, elements, empty, len};

/// `x cos + rotate_half(x) sin`, by heads. `x [b, s, h, k]` float32; tables `[b, s, k]`, or `[1, s, k]` for all of the batch.
pub fn rotary<R: CubeRuntime>(x: CubeTensor<R>, cos: CubeTensor<R>, sin: CubeTensor<R>) -> CubeTensor<R> {
    let [batch, tokens, heads, dim] = x.meta.shape().dims();
    let y = empty(&x, [batch, heads, tokens, dim].into(), x.dtype);
    turn(x, [cos, sin], y.clone(), false);
    permute(y, &[0, 2, 1, 3])
}

/// The gradient of `x` under [`rotary`], by tokens.
pub fn rotary_backward<R: CubeRuntime>(
    dy: CubeTensor<R>,
    cos: CubeTensor<R>,
    sin: CubeTensor<R>,
) -> CubeTensor<R> {
    let dx = empty(&dy, dy.meta.shape().clone(), dy.dtype);
    turn(dy, [cos, sin], dx.clone(), true);
    dx
}

fn turn<R: CubeRuntime>(x: CubeTensor<R>, [cos, sin]: [CubeTensor<R>; 2], y: CubeTensor<R>, back: bool) {
    let x = if x.meta.strides()[3] == 1 { x } else { into_contiguous(x) };
    let ([_, tokens, heads, dim], client) = (x.meta.shape().dims(), x.client.clone());
    let [of_batch, of_token, of_head] = [0, 1, 2].map(|axis| x.meta.strides()[axis] as u32);
    let angles = len(&cos) / dim;
    let (count, cube) = by_element(len(&x) / 2);
    turn_kernel::launch::<R>(
        &client,
        count,
        cube,
        elements(x).into_array_arg(),
        cos.into_array_arg(),
        sin.into_array_arg(),
        y.into_array_arg(),
        tokens as u32,
        heads as u32,
        (dim / 2) as u32,
        of_batch,
        of_token,
        of_head,
        angles as u32,
        back,
    );
}

/// `of_..` are strides of `x`; `angles` is how many tokens the tables have: all, or those of one batch row.
#[cube(launch)]
fn turn_kernel(
    x: &Array<f32>,
    cos: &Array<f32>,
    sin: &Array<f32>,
    y: &mut Array<f32>,
    tokens: u32,
    heads: u32,
    half: u32,
    of_batch: u32,
    of_token: u32,
    of_head: u32,
    angles: u32,
    #[comptime] back: bool,
) {
    let (tokens, heads, half) = (tokens as usize, heads as usize, half as usize);
    if ABSOLUTE_POS < y.len() / 2 {
        let (row, j) = (ABSOLUTE_POS / half, ABSOLUTE_POS % half);
        let batch = row / (tokens * heads);
        let (mut token, mut head) = (row % tokens, row / tokens % heads);
        if back {
            token = row / heads % tokens;
            head = row % heads;
        }
        let from = batch * of_batch as usize + token * of_token as usize + head * of_head as usize + j;
        let (a, b) = (x[from], x[from + half]);
        let to = row * 2 * half + j;
        let angle = (batch * tokens + token) % angles as usize * 2 * half + j;
        if back {
            y[to] = a * cos[angle] + b * sin[angle + half];
            y[to + half] = b * cos[angle + half] - a * sin[angle];
        } else {
            y[to] = a * cos[angle] - b * sin[angle];
            y[to + half] = b * cos[angle + half] + a * sin[angle + half];
        }
    }
}
