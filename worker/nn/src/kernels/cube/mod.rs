//! The operations on accelerators: any of burn's cubecl backends, which is what its CUDA backend is without
//! fusion.
//!
//! Each operation is one kernel, forward and backward; what is between them is burn's own. A step of a 3B
//! model is thousands of small kernels, and what the host spends on each counts as much as what the GPU does,
//! so fewer and plainer ones win over a compiler that looks for what can be joined.
//!
//! ```text
//! watermark   the most memory in use, while somebody watches
//! bring       values for a tensor, copied from where they lie
//! launch      tensors as kernels see them: contiguous float32, in vectors where the width allows it
//! rows        norms, and their gradients: one cube a row
//! pointwise   SwiGLU, GELU, sums that are rounded, what follows a product
//! product     matrix products: who multiplies what
//! library     a vendor's library of products, if one is registered
//! trial       kernels that fail when they are first used
//! low_rank    what a low-rank update adds to one
//! dropout     what a low-rank update does not read
//! quantized   weights of few bits, widened for one product
//! linear      linear layers, made of these five
//! joined      those of one input whose weights lie together
//! rotary      rotary embedding and the order by heads, and back
//! flat        the flat parameter buffer: sums of gradients, their norm, AdamW
//! flash       attention in bfloat16, one kernel forward and two backward
//! scores      a tile of attention's scores: softmax under a mask, and back (`blockwise` has the products
//!             around it)
//! ```
//!
//! | operation | on an accelerator |
//! |---|---|
//! | products with a bfloat16 weight | bfloat16 inputs, float32 sums and results; no copy of the weight |
//! | products with a weight of few bits | the same with a copy in bfloat16, which is gone after the product |
//! | LoRA beside a product | of half precision: the library; else sums in float32 on plain cores |
//! | products of float32 alone | exact under a float32 model, else as [`precision`](super::precision) says |
//! | attention | bfloat16 models: `flash`, where it can; else [`blockwise`](super::blockwise), in tiles |
//!
//! Activations, gradients and everything that trains are float32, as `torch.autocast` keeps its master
//! weights; what a product rounds is what PyTorch rounds there.
//!
//! What this module does not do: name a runtime. Nothing is instantiated here; the crate that names one pays
//! for it once.

mod attention_ops;
mod bring;
mod dropout;
pub mod flash;
mod flat;
mod flat_ops;
mod joined;
mod launch;
pub mod library;
mod linear;
mod linear_ops;
mod low_rank;
mod pointwise;
mod product;
mod quantized;
mod rotary;
mod row_ops;
mod rows;
mod scores;
mod trial;
pub mod watermark;

use std::iter;

use burn::tensor::{
    Int, Tensor, TensorData,
    backend::{Backend, ExecutionError},
};
use burn_cubecl::{BoolElement, CubeBackend, CubeRuntime, FloatElement, IntElement};

use super::{ModelBackend, Tape};

impl<R, F, I, BT> ModelBackend for CubeBackend<R, F, I, BT>
where
    R: CubeRuntime,
    F: FloatElement,
    I: IntElement,
    BT: BoolElement,
{
    fn joins(_device: &Self::Device) -> bool {
        true
    }

    fn rounds(_device: &Self::Device) -> bool {
        true
    }

    fn unpacks(_device: &Self::Device) -> bool {
        true
    }

    fn bring(mut data: TensorData, device: &Self::Device) -> Tensor<Self, 1> {
        Self::staging(iter::once(&mut data), device);
        launch::wrapped(bring::brought::<R>(data, device))
    }

    fn flush(device: &Self::Device) -> Result<(), ExecutionError> {
        let flushed = R::client(device).flush();
        flushed.map_err(|error| ExecutionError::WithContext { reason: error.to_string() })
    }
}

impl<R, F, I, BT> Tape for CubeBackend<R, F, I, BT>
where
    R: CubeRuntime,
    F: FloatElement,
    I: IntElement,
    BT: BoolElement,
{
    type Base = Self;

    fn lift<const D: usize>(tensor: Tensor<Self, D>) -> Tensor<Self, D> {
        tensor
    }

    fn lift_words(words: Tensor<Self, 1, Int>) -> Tensor<Self, 1, Int> {
        words
    }

    fn lower<const D: usize>(tensor: Tensor<Self, D>) -> Tensor<Self, D> {
        tensor
    }
}
