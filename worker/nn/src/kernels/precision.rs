//! Whether products of float32 may round what they multiply, as `torch.set_float32_matmul_precision` says for
//! PyTorch.
//!
//! A run whose frozen weights are bfloat16 or float16 rounds its activations for every product with them; it
//! gains nothing from products of its float32 trainables that are more exact, and on a GPU those would be
//! many times slower: only rounded inputs (tf32, 10 bits of mantissa) go to tensor cores. With weights of
//! bfloat16 attention rounds its inputs to bfloat16. A thread is told once, before it computes; a CPU ignores
//! it.

use std::cell::Cell;

use crate::dtypes::WeightsDtype;

thread_local! {
    static WEIGHTS: Cell<WeightsDtype> = const { Cell::new(WeightsDtype::Float32) };
}

/// What this thread computes from here on has frozen weights of this type.
pub fn follow(weights: WeightsDtype) {
    WEIGHTS.set(weights);
}

/// Whether products of float32 may round their inputs to tf32.
#[cfg(feature = "cuda")]
pub(super) fn may_round() -> bool {
    WEIGHTS.get() != WeightsDtype::Float32
}

/// Whether attention may round what it multiplies to bfloat16, as autocast does.
pub(super) fn may_halve() -> bool {
    WEIGHTS.get() == WeightsDtype::Bfloat16
}
