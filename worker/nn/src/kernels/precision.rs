//! Whether products may round what they multiply, as `torch.set_float32_matmul_precision` says for PyTorch.
//!
//! A run whose frozen weights are bfloat16 or float16 rounds its activations for every product with them; it
//! gains nothing from products of its float32 trainables that are more exact, and on a GPU those would be
//! many times slower: only rounded inputs (tf32, 10 bits of mantissa) go to tensor cores. With weights of
//! bfloat16 attention rounds its inputs to bfloat16. On a CPU only products with frozen bfloat16 weights
//! round, if the processor has an instruction for them and `launch.bfloat16_matmul` lets it. A thread is told
//! of both once, before it computes.

use std::cell::Cell;

pub use super::flex::has_bfloat16_products;
use crate::dtypes::WeightsDtype;

thread_local! {
    static WEIGHTS: Cell<WeightsDtype> = const { Cell::new(WeightsDtype::Float32) };
    static ALLOWED: Cell<bool> = const { Cell::new(true) };
}

/// Whether the products that this thread starts from here on may multiply bfloat16 weights as they are.
pub fn allow_bfloat16_matmul(allowed: bool) {
    ALLOWED.set(allowed);
}

/// Whether a CPU multiplies bfloat16 weights as they are, over an inner dimension of this length.
pub(super) fn multiplies_bfloat16(depth: usize) -> bool {
    depth.is_multiple_of(2) && ALLOWED.get() && has_bfloat16_products()
}

/// Whether products with this thread's frozen weights have other bits here than on a processor without the
/// instruction.
pub fn rounds_on_host() -> bool {
    WEIGHTS.get() == WeightsDtype::Bfloat16 && ALLOWED.get() && has_bfloat16_products()
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
