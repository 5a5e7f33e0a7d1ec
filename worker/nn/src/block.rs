//! What a transformer block is to the rest of the worker: two residual halves that run on any tape.

use std::ops::Deref;

use burn::tensor::Tensor;

use crate::{
    kernels::{ModelBackend, Tape},
    params::ParamScope,
};

/// One transformer block, of the vision tower or of the language model.
///
/// A block is a function of its input, its parameters and a context; it keeps nothing between calls. That is
/// what lets layer recompute (`model::recompute`) run it once without autodiff and again, bit for bit alike,
/// with it.
pub trait Block<B: ModelBackend> {
    /// Whatever all blocks of a tower share within one micro-batch: rotary tables, masks.
    type Context;

    /// `x + attention(norm(x))`. `x_nd`: all tokens of the micro-batch, `[n, d]`.
    fn attention_half<T: Tape<Base = B>>(
        &self,
        params: &ParamScope<'_, T>,
        x_nd: Tensor<T, 2>,
        context: &Self::Context,
    ) -> Tensor<T, 2>;

    /// `x + mlp(norm(x))`.
    fn mlp_half<T: Tape<Base = B>>(
        &self,
        params: &ParamScope<'_, T>,
        x_nd: Tensor<T, 2>,
        context: &Self::Context,
    ) -> Tensor<T, 2>;

    /// Whether anything in this block trains.
    fn trains(&self) -> bool;
}

/// A block for as long as it runs: one that is held, or one that was fetched for this run and is gone after
/// it.
pub enum BlockRef<'a, K> {
    /// Held by the stack.
    Held(&'a K),
    /// Fetched for this run alone.
    Fetched(Box<K>),
}

impl<K> Deref for BlockRef<'_, K> {
    type Target = K;

    fn deref(&self) -> &K {
        match self {
            Self::Held(block) => block,
            Self::Fetched(block) => block,
        }
    }
}
