//! How values are held between the forward and the backward pass (`model.activations_dtype`).
//!
//! ```text
//!             where it is made           what recompute keeps     run again
//! float32     as computed                the value itself         the value itself
//! bfloat16    `rounded`, `residual`      2 bytes: `packed`        widened: `unpacked`
//! ```
//!
//! Whatever recompute may keep is rounded where it is made: in every mode, also where nothing is kept, and in
//! every pass, also where nothing is differentiated. Packing is then lossless, a block that runs again begins
//! with the bits it began with, and gradients do not depend on what was kept. They pass through the rounding
//! as if it were not there, in float32.
//!
//! What this file does not do: say what is kept (`notes`, `model::recompute`).

use crate::dtypes::ActivationsDtype;
use burn::tensor::{DType, Tensor};

use crate::kernels::{ModelBackend, Residual};

/// Bytes of a value that is kept.
pub fn bytes(dtype: ActivationsDtype) -> usize {
    match dtype {
        ActivationsDtype::Float32 => 4,
        ActivationsDtype::Bfloat16 => 2,
    }
}

/// A value that may be kept.
pub fn rounded<B: ModelBackend>(dtype: ActivationsDtype, x_nd: Tensor<B, 2>) -> Tensor<B, 2> {
    match dtype {
        ActivationsDtype::Float32 => x_nd,
        ActivationsDtype::Bfloat16 => B::rounded(x_nd),
    }
}

/// `x` plus something, which may be kept.
pub fn residual<B: ModelBackend>(dtype: ActivationsDtype, x_no: Tensor<B, 2>) -> Residual<B> {
    Residual { x_no, rounded: dtype == ActivationsDtype::Bfloat16 }
}

/// What [`rounded`] or [`residual`] has made, as it is kept.
pub fn packed<B: ModelBackend>(dtype: ActivationsDtype, x_nd: Tensor<B, 2>) -> Tensor<B, 2> {
    match dtype {
        ActivationsDtype::Float32 => x_nd,
        ActivationsDtype::Bfloat16 => B::narrowed(x_nd),
    }
}

/// The value of [`packed`] as it was.
pub fn unpacked<B: ModelBackend>(x_nd: Tensor<B, 2>) -> Tensor<B, 2> {
    if x_nd.dtype() == DType::BF16 { B::widened(x_nd) } else { x_nd }
}
