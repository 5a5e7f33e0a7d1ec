//! AdamW (Loshchilov and Hutter, arXiv 1711.05101), element by element; in host memory on as many threads as
//! there are.
//!
//! ```text
//! g = gradient * factor                              (1 / valid, times the clip coefficient)
//! m = m + (1 - b1) (g - m)        v = b2 v + (1 - b2) g^2
//! w = w (1 - lr * decay) - lr / (1 - b1^t) * m / (sqrt(v) / sqrt(1 - b2^t) + eps)
//! ```
//!
//! the order of operations of `torch.optim.AdamW`. Coefficients are computed in f64 and used in f32, as
//! there. Seven streams of memory and one square root and division per element: with the widest registers the
//! memory is the limit.

use std::ops::Range;

use rayon::prelude::*;

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

/// One part of the flat parameter buffer, and what it is updated with. Gradients and, for a rank's own part,
/// weights are buffers of full length.
#[derive(Debug)]
pub struct Part<'a, F> {
    /// Weights.
    pub weights: &'a mut F,
    /// Where the part begins in them.
    pub weights_from: usize,
    /// First moments of the part.
    pub exp_avg: &'a mut F,
    /// Second moments of the part.
    pub exp_avg_sq: &'a mut F,
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

/// The same elements of four buffers.
struct Streams<'a> {
    weights: &'a mut [f32],
    exp_avg: &'a mut [f32],
    exp_avg_sq: &'a mut [f32],
    grads: &'a [f32],
}

impl<'a> Streams<'a> {
    /// Takes the first `count` elements off.
    fn take(&mut self, count: usize) -> Streams<'a> {
        fn front<'a>(slice: &mut &'a mut [f32], count: usize) -> &'a mut [f32] {
            slice.split_off_mut(..count).expect("runs lie within the part")
        }
        Streams {
            weights: front(&mut self.weights, count),
            exp_avg: front(&mut self.exp_avg, count),
            exp_avg_sq: front(&mut self.exp_avg_sq, count),
            grads: self.grads.split_off(..count).expect("runs lie within the part"),
        }
    }
}

/// Updates runs of a part in host memory, in ascending order.
pub(super) fn update(part: Part<'_, Vec<f32>>, runs: &[Run]) {
    let Part { weights, weights_from, exp_avg, exp_avg_sq, grads, grads_from } = part;
    let (weights, grads) = (&mut weights[weights_from..], &grads[grads_from..]);
    let mut rest = Streams { weights, exp_avg, exp_avg_sq, grads };
    let (mut tasks, mut at) = (Vec::new(), 0);
    for Run { range, coefficients } in runs {
        rest.take(range.start - at);
        let mut streams = rest.take(range.len());
        at = range.end;
        while !streams.grads.is_empty() {
            let count = streams.grads.len().min(TASK);
            tasks.push((streams.take(count), *coefficients));
        }
    }
    tasks
        .into_par_iter()
        .with_min_len(4)
        .for_each(|(streams, coefficients)| update_run(streams, coefficients));
}

fn update_run(streams: Streams<'_>, c: Coefficients) {
    vectorised(
        #[inline(always)]
        || {
            let moments = streams.exp_avg.iter_mut().zip(streams.exp_avg_sq.iter_mut());
            for ((w, &g), (m, v)) in streams.weights.iter_mut().zip(streams.grads).zip(moments) {
                let g = g * c.factor;
                *m += c.one_minus_beta1 * (g - *m);
                *v = *v * c.beta2 + c.one_minus_beta2 * (g * g);
                let root = v.sqrt() * c.root_factor + c.eps;
                *w = *w * c.keep - c.step_size * (*m / root);
            }
        },
    );
}
