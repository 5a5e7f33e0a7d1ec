//! Independent tasks on the threads of rayon's pool ([`pool`](crate::kernels::pool)).

use rayon::prelude::*;

/// What tasks take together on one thread, roughly: it decides whether other threads are worth waking, never
/// a result.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Work {
    nanoseconds: usize,
}

impl Work {
    /// Waking a thread that sleeps takes some tens of microseconds of its time and several of the caller's.
    /// Tests share everything: their tensors are small, and what they are after is that sharing changes
    /// nothing.
    const WORTH_WAKING: Self = Self { nanoseconds: if cfg!(test) { 0 } else { 40_000 } };

    /// Multiplications and additions of matrix products, at two thirds of what a core with AVX-512 does.
    pub fn products(flops: usize) -> Self {
        Self { nanoseconds: flops / 64 }
    }

    /// Bytes that come from beyond the core's caches, or go there, at what one core moves.
    pub fn streamed(bytes: usize) -> Self {
        Self { nanoseconds: bytes / 12 }
    }

    /// Values that are read, computed and written.
    pub fn values(count: usize) -> Self {
        Self { nanoseconds: count / 2 }
    }
}

/// Runs `op` on every task, in any order. The calling thread does it all itself where there is one thread, or
/// one task, or less `work` than it costs to share.
pub fn for_each<T: Send>(tasks: Vec<T>, work: Work, op: impl Fn(T) + Sync + Send) {
    if tasks.len() < 2 || work < Work::WORTH_WAKING || rayon::current_num_threads() == 1 {
        tasks.into_iter().for_each(op);
    } else {
        tasks.into_par_iter().for_each(op);
    }
}
