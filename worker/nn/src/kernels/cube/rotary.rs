//! Rotary embedding in the rotate-half convention: one unit turns one pair of a head's elements.
//!
//! What is turned is read as it lies (a slice of a wider projection, a gradient ordered by heads), and
//! written as its reader wants it: forward by heads, as attention's products take their inputs, and back by
//! tokens, as the projection's gradient is. One kernel does that to queries and keys, and to values as well,
//! which it does not turn; and to all three where nothing is turned.

use burn_cubecl::{CubeElement, CubeRuntime, kernel::into_contiguous, ops::permute, tensor::CubeTensor};
use cubecl::prelude::*;

use super::launch::{by_element, elements, empty, len};

/// Tables of cosines and sines, contiguous: `[b, s, k]`, or `[1, s, k]` for all of the batch.
pub type Tables<R> = [CubeTensor<R>; 2];

/// `x cos + rotate_half(x) sin` of the first `rotated` of these, all `[b, s, h, k]` float32, and the others
/// as they are; by heads.
pub fn rotary<R: CubeRuntime, const N: usize>(
    xs: [CubeTensor<R>; N],
    rotated: usize,
    tables: Option<Tables<R>>,
) -> [CubeTensor<R>; N] {
    let ys = xs.each_ref().map(|x| {
        let [batch, tokens, heads, dim] = x.meta.shape().dims();
        empty(x, [batch, heads, tokens, dim].into(), x.dtype)
    });
    rotate::<R, f32, N>(xs, ys.clone(), OutputLayout::ByHead, rotated, tables);
    ys.map(|y| permute(y, &[0, 2, 1, 3]))
}

/// The gradients under [`rotary`], by tokens.
pub fn rotary_backward<R: CubeRuntime, const N: usize>(
    dys: [CubeTensor<R>; N],
    rotated: usize,
    tables: Option<Tables<R>>,
) -> [CubeTensor<R>; N] {
    let dxs = dys.each_ref().map(|dy| empty(dy, dy.meta.shape().clone(), dy.dtype));
    rotate::<R, f32, N>(dys, dxs.clone(), OutputLayout::ByToken, rotated, tables);
    dxs
}

/// The gradients under [`rotary`] side by side, `[b s, (h + .. + h) k]`, rounded to the type of the output.
pub fn rotary_backward_joined<R: CubeRuntime, O: CubeElement + Float, const N: usize>(
    dys: [CubeTensor<R>; N],
    rotated: usize,
    tables: Option<Tables<R>>,
) -> CubeTensor<R> {
    let [batch, tokens, _, _] = dys[0].meta.shape().dims();
    let dx = empty(&dys[0], [batch * tokens, widths(&dys)].into(), O::dtype());
    let outputs = dys.each_ref().map(|_| dx.clone());
    rotate::<R, O, N>(dys, outputs, OutputLayout::Joined, rotated, tables);
    dx
}

/// Elements that a token has in all of these.
fn widths<R: CubeRuntime>(xs: &[CubeTensor<R>]) -> usize {
    let width = |x: &CubeTensor<R>| {
        let [_, _, heads, dim] = x.meta.shape().dims();
        heads * dim
    };
    xs.iter().map(width).sum()
}

/// How outputs lie.
#[derive(Clone, Copy, PartialEq, Eq)]
enum OutputLayout {
    /// `[b, h, s, k]` each, forward.
    ByHead,
    /// `[b, s, h, k]` each, back.
    ByToken,
    /// Side by side in rows of one, back.
    Joined,
}

/// Whether heads are made of pairs, as the kernel wants them.
pub fn has_pairs<R: CubeRuntime>(x_bshk: &CubeTensor<R>) -> bool {
    let [_, _, _, dim] = x_bshk.meta.shape().dims();
    dim.is_multiple_of(2)
}

fn rotate<R: CubeRuntime, O: CubeElement + Float, const N: usize>(
    xs: [CubeTensor<R>; N],
    ys: [CubeTensor<R>; N],
    written: OutputLayout,
    rotated: usize,
    tables: Option<Tables<R>>,
) {
    let [_, _, _, dim] = xs[0].meta.shape().dims();
    let (row, mut start) = (widths(&xs), 0);
    let client = xs[0].client.clone();
    // Without tables nothing is turned, and they are not read.
    let [cos, sin] = tables.unwrap_or_else(|| [elements(xs[0].clone()), elements(xs[0].clone())]);
    let pairs = xs.iter().map(len).sum::<usize>() / 2;
    let (mut inputs, mut outputs, mut lies) = (SequenceArg::new(), SequenceArg::new(), SequenceArg::new());
    for (x, y) in xs.into_iter().zip(ys) {
        let x = if x.meta.strides()[3] == 1 { x } else { into_contiguous(x) };
        let [of_batch, of_token, of_head] = [0, 1, 2].map(|axis| x.meta.strides()[axis] as u32);
        let [_, tokens, heads, _] = x.meta.shape().dims();
        let count = len(&x) / 2;
        let to = if written == OutputLayout::Joined { [start, row] } else { [0, heads * dim] };
        start += heads * dim;
        let [start_of_row, row] = to.map(|elements| elements as u32);
        lies.push(InputLayoutLaunch::new(
            count as u32,
            tokens as u32,
            heads as u32,
            of_batch,
            of_token,
            of_head,
            start_of_row,
            row,
        ));
        inputs.push(elements(x).into_array_arg());
        outputs.push(y.into_array_arg());
    }
    let angles = len(&cos) / dim;
    let (count, cube) = by_element(pairs);
    rotate_kernel::launch::<O, R>(
        &client,
        count,
        cube,
        inputs,
        outputs,
        lies,
        cos.into_array_arg(),
        sin.into_array_arg(),
        (dim / 2) as u32,
        angles as u32,
        rotated,
        written != OutputLayout::ByHead,
    );
}

/// How an input lies: its pairs, tokens and heads, and strides; and where it goes in a row of the output, and
/// how long that is.
#[derive(CubeType, CubeLaunch)]
struct InputLayout {
    pairs: u32,
    tokens: u32,
    heads: u32,
    of_batch: u32,
    of_token: u32,
    of_head: u32,
    start: u32,
    row: u32,
}

/// Units are dealt to inputs one after another; `angles` is how many tokens the tables have: all, or those of
/// one batch row.
#[cube(launch)]
fn rotate_kernel<O: Float>(
    inputs: &Sequence<Array<f32>>,
    outputs: &mut Sequence<Array<O>>,
    lies: &Sequence<InputLayout>,
    cos: &Array<f32>,
    sin: &Array<f32>,
    half: u32,
    angles: u32,
    #[comptime] rotated: usize,
    #[comptime] back: bool,
) {
    let half = half as usize;
    let mut before = 0usize;
    #[unroll]
    for number in 0..inputs.len() {
        let lie = lies.index(number);
        let pairs = lie.pairs as usize;
        if ABSOLUTE_POS >= before && ABSOLUTE_POS < before + pairs {
            let input = inputs.index(number);
            let output = outputs.index_mut(number);
            let (row, j) = ((ABSOLUTE_POS - before) / half, (ABSOLUTE_POS - before) % half);
            let (tokens, heads) = (lie.tokens as usize, lie.heads as usize);
            let batch = row / (tokens * heads);
            let (mut token, mut head) = (row % tokens, row / tokens % heads);
            if back {
                token = row / heads % tokens;
                head = row % heads;
            }
            let from = batch * lie.of_batch as usize
                + token * lie.of_token as usize
                + head * lie.of_head as usize
                + j;
            let (a, b) = (input[from], input[from + half]);
            let mut to = row * 2 * half + j;
            if back {
                to = (batch * tokens + token) * lie.row as usize + lie.start as usize + head * 2 * half + j;
            }
            if comptime!(number >= rotated) {
                output[to] = O::cast_from(a);
                output[to + half] = O::cast_from(b);
            } else {
                let angle = (batch * tokens + token) % angles as usize * 2 * half + j;
                if back {
                    output[to] = O::cast_from(a * cos[angle] + b * sin[angle + half]);
                    output[to + half] = O::cast_from(b * cos[angle + half] - a * sin[angle]);
                } else {
                    output[to] = O::cast_from(a * cos[angle] - b * sin[angle]);
                    output[to + half] = O::cast_from(b * cos[angle + half] + a * sin[angle + half]);
                }
            }
        }
        before += pairs;
    }
}
