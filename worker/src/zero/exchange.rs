//! How gradients travel between ranks: as they are, or rounded to bfloat16 for the way.
//!
//! ```text
//! float32    reduce-scatter and shift in the gradient buffer itself                    4 bytes an element
//! bfloat16   narrow -> reduce-scatter, shift in a buffer of halves -> widen the parts  2 bytes an element
//! ```
//!
//! Rounded sums are rounded again at every rank on the way (8 bits of mantissa; the range is float32's, so
//! nothing overflows that did not before). Everything after the exchange is float32: norm, clipping, the
//! update rule, weights. A replica gets the owner's rounded part, so it repeats its arithmetic on the same
//! numbers.

use coxswain_proto::run_spec::ReduceDtype;

use super::partition::Partition;
use crate::collective::{Collective, CollectiveError, Reduce};
use coxswain_nn::kernels::flat::{Flat, Halves};

/// What gradients travel in.
#[derive(Debug)]
pub(super) struct Exchange<F: Flat> {
    dtype: ReduceDtype,
    /// Empty until the first step, and where nothing is rounded.
    halves: F::Halves,
}

impl<F: Flat> Clone for Exchange<F> {
    /// Without the buffer: what it holds between two steps means nothing.
    fn clone(&self) -> Self {
        Self::new(self.dtype)
    }
}

impl<F: Flat> Exchange<F> {
    /// For gradients that travel as `dtype`.
    pub fn new(dtype: ReduceDtype) -> Self {
        Self { dtype, halves: F::Halves::default() }
    }

    /// This rank's part of `grads` becomes the sum over ranks; the others are scratch.
    pub fn reduce_scatter(
        &mut self,
        grads: &mut F,
        partition: &Partition,
        comm: &mut dyn Collective,
    ) -> Result<(), CollectiveError> {
        if !self.rounds(comm) {
            return comm.reduce_scatter_parts(grads.lend().into(), partition.cuts(), Reduce::Sum);
        }
        grads.narrow(&mut self.halves);
        comm.reduce_scatter_parts(self.halves.lend().into(), partition.cuts(), Reduce::Sum)?;
        grads.widen(&self.halves, partition.own());
        Ok(())
    }

    /// After [`Self::reduce_scatter`]: the part of the rank `distance` before this one becomes the sum that
    /// it has.
    pub fn shift(
        &mut self,
        grads: &mut F,
        partition: &Partition,
        distance: usize,
        comm: &mut dyn Collective,
    ) -> Result<(), CollectiveError> {
        if !self.rounds(comm) {
            return comm.shift_parts(grads.lend().into(), partition.cuts(), distance);
        }
        comm.shift_parts(self.halves.lend().into(), partition.cuts(), distance)?;
        grads.widen(&self.halves, partition.before(distance).own());
        Ok(())
    }

    /// Bytes of the buffer.
    pub fn bytes(&self) -> u64 {
        self.halves.bytes()
    }

    /// In a world of one nothing travels.
    fn rounds(&self, comm: &dyn Collective) -> bool {
        self.dtype == ReduceDtype::Bfloat16 && comm.world() > 1
    }
}
