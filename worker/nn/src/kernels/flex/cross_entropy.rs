//! Cross entropy of rows of logits, and its gradient where the logits lay.
//!
//! A row of a large vocabulary is some hundred kilobytes: it is read for its maximum, then once more for the
//! sum of exponentials, which are written in its place; only the gradient needs the third pass. No row waits
//! for another, so rows are the tasks.

use super::{
    parallel::{self, Work},
    simd,
};

/// Loss and margin of each row of `v` logits; see
/// [`RowOps::cross_entropy`](crate::kernels::RowOps::cross_entropy).
pub fn forward(x_nv: &[f32], v: usize, targets: &[u32]) -> Vec<[f32; 2]> {
    let mut rows = vec![[0.0; 2]; targets.len()];
    let tasks = x_nv.chunks_exact(v).zip(targets).zip(&mut rows).collect();
    parallel::for_each(tasks, Work::values(x_nv.len()), |((x, &target), row): ((&[f32], _), _)| {
        let (max, sum) = simd::vectorised(
            #[inline(always)]
            || {
                let max = simd::max(x);
                (max, simd::sum(x, |x| simd::exp(x - max)))
            },
        );
        *row = loss_and_margin(x[target as usize], max, sum);
    });
    rows
}

/// Loss and margin of each row, and `softmax(x) - onehot(target)` in place of the logits.
pub fn backward(x_nv: &mut [f32], v: usize, targets: &[u32]) -> Vec<[f32; 2]> {
    let mut rows = vec![[0.0; 2]; targets.len()];
    let work = Work::values(2 * x_nv.len());
    let tasks = x_nv.chunks_exact_mut(v).zip(targets).zip(&mut rows).collect();
    parallel::for_each(tasks, work, |((x, &target), row): ((&mut [f32], _), _)| {
        let of_target = x[target as usize];
        let (max, sum) = simd::vectorised(
            #[inline(always)]
            || {
                let max = simd::max(x);
                for x in x.iter_mut() {
                    *x = simd::exp(*x - max);
                }
                let sum = simd::sum(x, |x| x);
                let scale = 1.0 / sum;
                for x in x.iter_mut() {
                    *x *= scale;
                }
                (max, sum)
            },
        );
        x[target as usize] -= 1.0;
        *row = loss_and_margin(of_target, max, sum);
    });
    rows
}

fn loss_and_margin(of_target: f32, max: f32, sum: f32) -> [f32; 2] {
    [sum.ln() - (of_target - max), of_target - max]
}
