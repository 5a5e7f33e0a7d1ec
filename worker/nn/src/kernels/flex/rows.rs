//! New buffers filled by rows on all threads.
//!
//! Every fused operation makes its outputs here. A buffer is cut into blocks of whole rows whose size does
//! not depend on the number of threads, and each block is written by one task: same bits on one thread and on
//! many. A block is zeroed by the task that fills it, when it is about to be in that core's cache anyway, so
//! a large buffer is never swept twice.
//!
//! What it does not do: blocks that are not whole rows (see [`matrix`](super::matrix)).

use std::mem::MaybeUninit;

use half::bf16;

use super::parallel::{self, Work};

/// Values in a block: 32 KiB, which stays in the first-level cache, and some microseconds of work.
pub(super) const BLOCK: usize = 8192;

/// A float of some width, whose default is zero.
pub trait Element: Copy + Default + Send {}
impl Element for f32 {}
impl Element for bf16 {}

/// A buffer of `rows * width` values. `fill(first_row, block)` gets every block of whole rows once, zeroed.
pub fn build<E: Element>(rows: usize, width: usize, fill: impl Fn(usize, &mut [E]) + Sync) -> Vec<E> {
    let step = step(width);
    let mut buffer = reserve(rows * width);
    if width > 0 {
        let blocks = buffer.chunks_mut(step * width).enumerate().collect();
        parallel::for_each(blocks, Work::values(rows * width), |(i, block)| fill(i * step, zeroed(block)));
    }
    finish(buffer)
}

/// Two buffers of `rows * width` values, filled side by side as in [`build`].
pub fn build2(
    rows: usize,
    width: usize,
    fill: impl Fn(usize, &mut [f32], &mut [f32]) + Sync,
) -> (Vec<f32>, Vec<f32>) {
    let step = step(width);
    let (mut first, mut second) = (reserve(rows * width), reserve(rows * width));
    if width > 0 {
        let pairs = first.chunks_mut(step * width).zip(second.chunks_mut(step * width));
        let work = Work::values(2 * rows * width);
        parallel::for_each(pairs.enumerate().collect(), work, |(i, (a, b))| {
            fill(i * step, zeroed(a), zeroed(b));
        });
    }
    (finish(first), finish(second))
}

/// Rows per block.
fn step(width: usize) -> usize {
    (BLOCK / width.max(1)).max(1)
}

fn reserve<E: Element>(len: usize) -> Vec<MaybeUninit<E>> {
    let mut buffer = Vec::with_capacity(len);
    // SAFETY: the capacity is `len`, and `MaybeUninit` needs no initialisation.
    unsafe { buffer.set_len(len) };
    buffer
}

fn zeroed<E: Element>(block: &mut [MaybeUninit<E>]) -> &mut [E] {
    block.fill(MaybeUninit::new(E::default()));
    // SAFETY: every element has just been written.
    unsafe { block.assume_init_mut() }
}

/// Only called when every block of `buffer` went through [`zeroed`].
fn finish<E: Element>(buffer: Vec<MaybeUninit<E>>) -> Vec<E> {
    let mut buffer = std::mem::ManuallyDrop::new(buffer);
    let (pointer, len, capacity) = (buffer.as_mut_ptr(), buffer.len(), buffer.capacity());
    // SAFETY: the parts of a vector of the same layout, given up above; the chunks cover the buffer and each
    // was zeroed.
    unsafe { Vec::from_raw_parts(pointer.cast::<E>(), len, capacity) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_row_is_filled_once_whatever_the_width() {
        for (rows, width) in [(0, 5), (1, 1), (7, 3), (50, 1000), (3, 20_000), (4, 0)] {
            let values = build(rows, width, |first, block: &mut [f32]| {
                for (i, row) in block.chunks_mut(width).enumerate() {
                    row.iter_mut().for_each(|x| *x += (first + i) as f32);
                }
            });
            let expected: Vec<f32> =
                (0..rows).flat_map(|row| std::iter::repeat_n(row as f32, width)).collect();
            assert_eq!(values, expected);
        }
    }
}
