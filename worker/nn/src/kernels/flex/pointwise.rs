//! Gates, GELU and the rotary embedding: one pass over memory each, forward and backward.

use super::{rows, simd};

/// `silu(gate) * up`.
pub fn swiglu(gate: &[f32], up: &[f32]) -> Vec<f32> {
    flat(
        gate.len(),
        #[inline(always)]
        |start, out| {
            let inputs = gate[start..].iter().zip(&up[start..]);
            for (y, (&gate, &up)) in out.iter_mut().zip(inputs) {
                *y = gate * simd::sigmoid(gate) * up;
            }
        },
    )
}

/// `(dgate, dup)`.
pub fn swiglu_backward(gate: &[f32], up: &[f32], dy: &[f32]) -> (Vec<f32>, Vec<f32>) {
    rows::build2(gate.len(), 1, |start, dgate, dup| {
        let len = dgate.len();
        let (gate, up, dy) = (&gate[start..][..len], &up[start..][..len], &dy[start..][..len]);
        let dup = &mut dup[..len];
        simd::vectorised(
            #[inline(always)]
            || {
                for i in 0..len {
                    let s = simd::sigmoid(gate[i]);
                    dup[i] = dy[i] * (gate[i] * s);
                    dgate[i] = dy[i] * up[i] * (s * (1.0 + gate[i] * (1.0 - s)));
                }
            },
        );
    })
}

const GELU_SLOPE: f32 = 0.797_884_6; // sqrt(2 / pi)
const GELU_CUBE: f32 = 0.044_715;

/// `x / 2 * (1 + tanh u) = x * sigmoid(2 u)`, `u = sqrt(2 / pi) (x + 0.044715 x^3)`: no cancellation near
/// zero.
pub fn gelu_tanh(x: &[f32]) -> Vec<f32> {
    flat(
        x.len(),
        #[inline(always)]
        |start, out| {
            for (y, &x) in out.iter_mut().zip(&x[start..]) {
                *y = x * simd::sigmoid(2.0 * GELU_SLOPE * (x + GELU_CUBE * (x * x * x)));
            }
        },
    )
}

/// With `s = sigmoid(2 u)`: `dx = dy (s + x s (1 - s) 2 u')`.
pub fn gelu_tanh_backward(x: &[f32], dy: &[f32]) -> Vec<f32> {
    flat(
        x.len(),
        #[inline(always)]
        |start, out| {
            for ((dx, &x), &dy) in out.iter_mut().zip(&x[start..]).zip(&dy[start..]) {
                let s = simd::sigmoid(2.0 * GELU_SLOPE * (x + GELU_CUBE * (x * x * x)));
                let slope = 2.0 * GELU_SLOPE * (1.0 + 3.0 * GELU_CUBE * (x * x));
                *dx = dy * (s + x * (s * (1.0 - s)) * slope);
            }
        },
    )
}

/// A buffer of `count` values; `fill` gets its parts with their start, inside a vectorised call.
fn flat(count: usize, fill: impl Fn(usize, &mut [f32]) + Sync) -> Vec<f32> {
    rows::build(count, 1, |start, out| {
        simd::vectorised(
            #[inline(always)]
            || fill(start, out),
        );
    })
}

/// One head of one token for [`rotary`]: where it starts, and its row in the tables.
pub struct Rotation<'a> {
    /// The cosine table, `[rows, k]`.
    pub cos: &'a [f32],
    /// The sine table, `[rows, k]`.
    pub sin: &'a [f32],
    /// Rows of the tables; token `n` reads row `n % rows`.
    pub rows: usize,
    /// Whether to apply the transpose, which takes gradients back.
    pub backward: bool,
}

/// `[x1 | x2] -> [x1 cos1 - x2 sin1 | x2 cos2 + x1 sin2]` for every head. `x` is `[n, h, k]`, contiguous.
pub fn rotary(x: &[f32], [tokens, heads, dim]: [usize; 3], rotation: &Rotation<'_>) -> Vec<f32> {
    let half = dim / 2;
    rows::build(tokens, heads * dim, |first, out| {
        simd::vectorised(
            #[inline(always)]
            || {
                for (i, out) in out.chunks_exact_mut(heads * dim).enumerate() {
                    let token = first + i;
                    let at = token % rotation.rows * dim;
                    let (cos1, cos2) = rotation.cos[at..][..dim].split_at(half);
                    let (sin1, sin2) = rotation.sin[at..][..dim].split_at(half);
                    let x = &x[token * heads * dim..][..heads * dim];
                    for (x, y) in x.chunks_exact(dim).zip(out.chunks_exact_mut(dim)) {
                        let (x1, x2) = x.split_at(half);
                        let (y1, y2) = y.split_at_mut(half);
                        if rotation.backward {
                            for j in 0..half {
                                y1[j] = x1[j] * cos1[j] + x2[j] * sin2[j];
                                y2[j] = x2[j] * cos2[j] - x1[j] * sin1[j];
                            }
                        } else {
                            for j in 0..half {
                                y1[j] = x1[j] * cos1[j] - x2[j] * sin1[j];
                                y2[j] = x2[j] * cos2[j] + x1[j] * sin2[j];
                            }
                        }
                    }
                }
            },
        );
    })
}
