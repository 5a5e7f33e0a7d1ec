//! The operations a transformer spends its time in, on burn tensors.
//!
//! [`ModelBackend`] is burn's `Backend` plus those operations, forward and backward: on rows ([`RowOps`]),
//! attention ([`AttentionOps`]), linear layers ([`LinearOps`]), the flat parameter buffer ([`FlatOps`]). Each
//! has a reference written with burn's own tensor operations ([`reference`], and its derivatives in
//! [`backward`]), which any backend gets for nothing, and which its fused version is tested against; `flex`
//! has the fused versions for the CPU, `cube` those for accelerators. Under autodiff every operation is one
//! node (`autodiff`) whose backward pass calls the backward method of the backend underneath.
//!
//! What this module does not do: know any model. Shapes are in the docs; frozen arguments (gains, rotary
//! tables) get no gradient.

mod attention_ops;
mod autodiff;
mod backend;
pub mod backward;
pub mod blockwise;
#[cfg(feature = "cuda")]
mod cube;
pub mod dropout;
pub mod flat;
mod flat_ops;
mod flex;
mod linear_ops;
mod operands;
mod packed;
pub mod pool;
pub mod precision;
pub mod quantized;
pub mod reference;
mod row_ops;
pub mod segments;
pub mod sizes;
mod tape;
#[cfg(test)]
mod tests;
mod upload;
mod weight;

#[cfg(feature = "cuda")]
pub use self::cube::{flash::fuses as attends_in_one_kernel, library as matrix_library, watermark};
pub use self::{
    attention_ops::AttentionOps,
    autodiff::free_broken_off,
    backend::ModelBackend,
    dropout::{Dropout, DropoutRows},
    flat_ops::FlatOps,
    flex::{DROPOUT_BLOCK, FEW_TOKENS, PANEL_COLUMNS, QUERY_BLOCK, vectorised},
    linear_ops::LinearOps,
    operands::{
        AdaNorm, AttentionMask, AttentionOutput, AttentionSaved, CrossEntropy, GradientSlot, JoinedGradients,
        JoinedHeads, JoinedLayers, JoinedSaved, LinearLayer, LowRank, LowRankGradients, LowRankSaved,
        Residual, RopeMask,
    },
    packed::PackedMatrix,
    row_ops::RowOps,
    tape::Tape,
    upload::{VECTOR, upload},
    weight::{Weight, WeightOps},
};
