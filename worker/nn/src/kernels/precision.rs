//! Whether products of float32 may round what they multiply, as `torch.set_float32_matmul_precision` says for
//! PyTorch.
//!
//! A run whose frozen weights are bfloat16 or float16 rounds its activations for every product with them; it
//! gains nothing from products of its float32 trainables that are more exact, and on a GPU those would be
//! many times slower: only rounded inputs (tf32, 10 bits of mantissa) go to tensor cores. Said once a thread,
//! before it computes; a CPU ignores it.

use std::cell::Cell;

use crate::dtypes::WeightsDtype;

thread_local! {
    static ROUNDED: Cell<bool> = const { Cell::new(false) };
}

/// What this thread computes from here on has frozen weights of this type.
pub fn follow(weights: WeightsDtype) {
    ROUNDED.set(weights != WeightsDtype::Float32);
}

/// Whether products of float32 may round their inputs to tf32.
#[cfg(feature = "cuda")]
pub(super) fn may_round() -> bool {
    ROUNDED.get()
}
