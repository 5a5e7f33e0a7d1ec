//! AdamW (Loshchilov and Hutter, arXiv 1711.05101), element by element; in host memory on as many threads as
//! there are, in a device's memory in burn's own operations.
//!
//! ```text
//! g = gradient * factor                              (1 / valid, times the clip coefficient)
//! m = m + (1 - b1) (g - m)        v = b2 v + (1 - b2) g^2
//! w = w (1 - lr * decay) - lr / (1 - b1^t) * m / (sqrt(v) / sqrt(1 - b2^t) + eps)
//! ```
//!
//! the order of operations of `torch.optim.AdamW`. Coefficients are computed in f64 and used in f32, as
//! there. Seven streams of memory and one square root and division per element: with the widest registers the
//! memory is the limit. With an average (EMA) of the weights there are two more, and not a pass of its own.

use std::ops::Range;

use burn::tensor::{Tensor, backend::Backend};
use rayon::prelude::*;

use super::tensors::{Origins, PIECE, Updates, part, pieces, put};
use crate::kernels::vectorised;

/// Elements given to a thread at once: four streams of 64 KiB stay in the L2 cache, and a task's cost does
/// not count.
const TASK: usize = 16 << 10;

/// What one step multiplies with, for one learning rate and decay.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Coefficients {
    /// Applied to the gradient first.
    pub factor: f32,
    /// `1 - b1`
    pub one_minus_beta1: f32,
    /// `b2`
    pub beta2: f32,
    /// `1 - b2`
    pub one_minus_beta2: f32,
    /// `1 - lr * decay`
    pub keep: f32,
    /// `lr / (1 - b1^t)`
    pub step_size: f32,
    /// `1 / sqrt(1 - b2^t)`
    pub root_factor: f32,
    /// `eps`
    pub eps: f32,
}

impl Coefficients {
    /// Updates elements on one thread; all slices are equally long.
    pub(crate) fn update(&self, weights: &mut [f32], grads: &[f32], [exp_avg, exp_avg_sq]: [&mut [f32]; 2]) {
        let c = *self;
        vectorised(
            #[inline(always)]
            || {
                let moments = exp_avg.iter_mut().zip(exp_avg_sq.iter_mut());
                for ((w, &g), (m, v)) in weights.iter_mut().zip(grads.iter()).zip(moments) {
                    let g = g * c.factor;
                    *m += c.one_minus_beta1 * (g - *m);
                    *v = *v * c.beta2 + c.one_minus_beta2 * (g * g);
                    let root = v.sqrt() * c.root_factor + c.eps;
                    *w = *w * c.keep - c.step_size * (*m / root);
                }
            },
        );
    }
}

/// One part of the flat parameter buffer, and what it is updated with. Gradients and, for a rank's own part,
/// weights are buffers of full length.
#[derive(Debug)]
pub struct Part<'a, F, S = [&'a mut F; 2]> {
    /// Weights.
    pub weights: &'a mut F,
    /// Where the part begins in them.
    pub weights_from: usize,
    /// What the update rule keeps of the part: AdamW its first and second moments.
    pub state: S,
    /// Gradients.
    pub grads: &'a F,
    /// Where the part begins in them.
    pub grads_from: usize,
}

/// Consecutive elements of a part with the same coefficients.
#[derive(Clone, Debug, PartialEq)]
pub struct Run {
    /// Positions in the part.
    pub range: Range<usize>,
    /// What applies to them.
    pub coefficients: Coefficients,
}

/// What follows the weights of a part.
#[derive(Debug)]
pub struct Average<'a, F> {
    /// As many elements as the part has.
    pub values: &'a mut F,
    /// How much of their way they go.
    pub share: f32,
}

type Task<'a> = (Streams<'a>, Option<Coefficients>);

/// Elements at the same places of four buffers, and of the average if there is one.
struct Streams<'a> {
    weights: &'a mut [f32],
    exp_avg: &'a mut [f32],
    exp_avg_sq: &'a mut [f32],
    grads: &'a [f32],
    average: &'a mut [f32],
}

impl<'a> Streams<'a> {
    /// Takes the first `count` elements off.
    fn split_front(&mut self, count: usize) -> Streams<'a> {
        fn front<'a>(slice: &mut &'a mut [f32], count: usize) -> &'a mut [f32] {
            slice.split_off_mut(..count).expect("runs lie within the part")
        }
        Streams {
            weights: front(&mut self.weights, count),
            exp_avg: front(&mut self.exp_avg, count),
            exp_avg_sq: front(&mut self.exp_avg_sq, count),
            grads: self.grads.split_off(..count).expect("runs lie within the part"),
            average: {
                let there = count.min(self.average.len());
                front(&mut self.average, there)
            },
        }
    }

    /// Cuts them into tasks; without coefficients nothing but the average moves.
    fn cut(mut self, coefficients: Option<Coefficients>, tasks: &mut Vec<Task<'a>>) {
        while !self.exp_avg.is_empty() {
            let count = self.exp_avg.len().min(TASK);
            tasks.push((self.split_front(count), coefficients));
        }
    }
}

/// Updates runs of a part in host memory, in ascending order. An average follows what has just been written,
/// before it leaves the cache, and goes on where no run is.
pub(super) fn update(part: Part<'_, Vec<f32>>, runs: &[Run], average: Option<Average<'_, Vec<f32>>>) {
    let Part { weights, weights_from, state: [exp_avg, exp_avg_sq], grads, grads_from } = part;
    let (weights, grads) = (&mut weights[weights_from..], &grads[grads_from..]);
    let (average, share): (&mut [f32], f32) =
        average.map_or((&mut [], 0.0), |average| (average.values, average.share));
    let averaged = !average.is_empty();
    let mut rest = Streams { weights, exp_avg, exp_avg_sq, grads, average };
    let (mut tasks, mut at) = (Vec::new(), 0);
    for Run { range, coefficients } in runs {
        let between = rest.split_front(range.start - at);
        if averaged {
            between.cut(None, &mut tasks);
        }
        rest.split_front(range.len()).cut(Some(*coefficients), &mut tasks);
        at = range.end;
    }
    if averaged {
        let behind = rest.exp_avg.len();
        rest.split_front(behind).cut(None, &mut tasks);
    }
    tasks.into_par_iter().with_min_len(4).for_each(|(streams, coefficients)| {
        let Streams { weights, exp_avg, exp_avg_sq, grads, average } = streams;
        if let Some(coefficients) = coefficients {
            coefficients.update(weights, grads, [exp_avg, exp_avg_sq]);
        }
        approach_here(average, weights, share);
    });
}

/// Updates one run of a part in a device's memory, operation by operation.
pub fn update_tensors<B: Backend>(
    before: Updates<B>,
    grads: &Tensor<B, 1>,
    from: Origins,
    run: &Run,
) -> Updates<B> {
    let c = &run.coefficients;
    pieces(&run.range, PIECE).fold(before, |Updates { weights, state: [first, second] }, at| {
        let shifted = |origin: usize| origin + at.start..origin + at.end;
        let g = part(grads, &shifted(from.grads)) * c.factor;
        let m = part(&first, &at);
        let m = m.clone() + (g.clone() - m) * c.one_minus_beta1;
        let v = part(&second, &at) * c.beta2 + g.clone() * g * c.one_minus_beta2;
        let step = m.clone() / (v.clone().sqrt() * c.root_factor + c.eps) * c.step_size;
        let w = part(&weights, &shifted(from.weights)) * c.keep - step;
        Updates {
            weights: put(weights, shifted(from.weights), w),
            state: [put(first, at.clone(), m), put(second, at, v)],
        }
    })
}

/// [`Flat::approach`](super::Flat::approach) on one thread.
pub(super) fn approach_here(values: &mut [f32], towards: &[f32], share: f32) {
    vectorised(
        #[inline(always)]
        || values.iter_mut().zip(towards).for_each(|(value, to)| *value += share * (*to - *value)),
    );
}
