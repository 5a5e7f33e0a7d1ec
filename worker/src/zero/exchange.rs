//! How gradients travel between ranks: as they are, or rounded to bfloat16 for the way.
//!
//! ```text
//! float32    reduce-scatter and shift in the gradient buffer itself                    4 bytes an element
//! bfloat16   narrow -> reduce-scatter, shift in a buffer of halves -> widen the parts  2 bytes an element
//! ```
//!
//! Rounded sums are rounded again at every rank on the way (8 bits of mantissa; the range is float32's, so nothing overflows that did not
//! before). Everything after the exchange is float32: norm, clipping, moments, weights. A mirror gets the owner's rounded part, so it
//! repeats its arithmetic on the same numbers.

use std::ops::Range;

use coxswain_proto::run_spec::ReduceDtype;
use half::bf16;
use rayon::prelude::*;

use crate::{
    bfloat16::{narrow, widen},
    collective::{BufMut, Collective, CollectiveError, Reduce},
    kernels::vectorised,
};

/// Elements given to a thread at once.
const TASK: usize = 64 << 10;

/// What gradients travel in.
#[derive(Debug)]
pub(super) struct Exchange {
    dtype: ReduceDtype,
    /// Empty until the first step, and where nothing is rounded.
    halves: Vec<bf16>,
}

impl Clone for Exchange {
    /// Without the buffer: what it holds between two steps means nothing.
    fn clone(&self) -> Self {
        Self::new(self.dtype)
    }
}

impl Exchange {
    /// For gradients that travel as `dtype`.
    pub fn new(dtype: ReduceDtype) -> Self {
        Self { dtype, halves: Vec::new() }
    }

    /// The elements `own` of `grads` become the sum over ranks; the others are scratch.
    pub fn reduce_scatter(
        &mut self,
        grads: &mut [f32],
        own: Range<usize>,
        comm: &mut dyn Collective,
    ) -> Result<(), CollectiveError> {
        if !self.rounds(comm) {
            return comm.reduce_scatter_in_place(BufMut::F32(grads), Reduce::Sum);
        }
        self.halves.resize(grads.len(), bf16::ZERO);
        convert(grads, &mut self.halves, narrow);
        comm.reduce_scatter_in_place(BufMut::Bf16(&mut self.halves), Reduce::Sum)?;
        convert(&self.halves[own.clone()], &mut grads[own], widen);
        Ok(())
    }

    /// After [`Self::reduce_scatter`]: the elements `previous` of `grads` become the sum that the rank before this one has.
    pub fn shift(
        &mut self,
        grads: &mut [f32],
        previous: Range<usize>,
        comm: &mut dyn Collective,
    ) -> Result<(), CollectiveError> {
        if !self.rounds(comm) {
            return comm.shift_in_place(BufMut::F32(grads));
        }
        comm.shift_in_place(BufMut::Bf16(&mut self.halves))?;
        convert(&self.halves[previous.clone()], &mut grads[previous], widen);
        Ok(())
    }

    /// Bytes of the buffer.
    pub fn bytes(&self) -> u64 {
        size_of_val(self.halves.as_slice()) as u64
    }

    /// In a world of one nothing travels.
    fn rounds(&self, comm: &dyn Collective) -> bool {
        self.dtype == ReduceDtype::Bfloat16 && comm.world() > 1
    }
}

/// Converts on as many threads as there are.
#[inline(always)]
fn convert<T: Copy + Sync, U: Send>(from: &[T], to: &mut [U], one: impl Fn(T) -> U + Sync) {
    to.par_chunks_mut(TASK).zip(from.par_chunks(TASK)).for_each(|(to, from)| {
        vectorised(
            #[inline(always)]
            || to.iter_mut().zip(from).for_each(|(to, from)| *to = one(*from)),
        )
    });
}
