//! Buffers of the flat space: where they lie, and what is done to them.
//!
//! ```text
//! here      Flat: one float32 buffer, and the operations that gradients, optimizer and recovery need of it
//! host      in host memory: a Vec<f32>, on as many threads as there are
//! device    in a device's memory: a tensor of a backend, whose elements the host sees only when somebody asks for them
//! offloaded AdamW for moments that are in host memory between uses (`memory.offload: optimizer`)
//! tensors   what `device` does, in burn's own operations, for backends that have nothing better (cards have kernels: `kernels::cube`)
//! adamw     the optimizer's arithmetic (host), and its coefficients
//! squares   the sum of squares (host)
//! ```
//!
//! Which of the two a run uses is its backend's to say ([`ModelBackend::Flat`](super::ModelBackend::Flat)): the flat space lies where the
//! tensors of the model lie, so gradients are summed where they are made and values change where they are read. On a device a step moves
//! the partial sums of the gradient's norm to the host (a float for 4096 trainables) and nothing else; what is rare reads and writes whole buffers:
//! checkpoints, recovery, the watch over the first gradients, a gradient that is not finite.
//!
//! What this module does not do: know parameters (`params`), ranks (`zero`), or how buffers travel (`collective`).

pub mod adamw;
mod device;
mod host;
mod offloaded;
mod squares;
pub mod tensors;
#[cfg(test)]
mod tests;

use std::{any::Any, borrow::Cow, fmt, ops::Range};

use burn::tensor::Tensor;
use half::bf16;

pub use self::{
    adamw::{Coefficients, Part, Run},
    device::{HalvesOnDevice, OnDevice},
};
use super::ModelBackend;

/// One buffer of float32 elements.
pub trait Flat: Clone + fmt::Debug {
    /// Names where buffers of this kind lie.
    type Place: Clone + fmt::Debug;
    /// The same elements as bfloat16, for their way between ranks.
    type Halves: Halves;

    /// Takes over `values`.
    fn of(place: &Self::Place, values: Vec<f32>) -> Self;

    /// All zero.
    fn zeros(place: &Self::Place, len: usize) -> Self;

    /// All zero, and in host memory between uses wherever that is: for moments, which are used once a step.
    fn offloaded(place: &Self::Place, len: usize) -> Self {
        Self::zeros(place, len)
    }

    /// Elements.
    fn len(&self) -> usize;

    /// True without elements.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Some elements, seen from the host.
    fn read(&self, range: Range<usize>) -> Cow<'_, [f32]>;

    /// Lets the host change elements.
    fn edit<R>(&mut self, edit: impl FnOnce(&mut [f32]) -> R) -> R;

    /// Zeroes some elements.
    fn clear(&mut self, range: Range<usize>);

    /// Sum of squares over these ranges; not finite if any of their elements is not.
    fn squares(&self, ranges: &[Range<usize>]) -> f64;

    /// AdamW ([`adamw`]) on runs of a part, in ascending order.
    fn adamw(part: Part<'_, Self>, runs: &[Run]);

    /// The whole buffer, for a collective.
    fn lend(&mut self) -> Lent<'_, f32>;

    /// All elements, rounded to bfloat16.
    fn narrow(&self, halves: &mut Self::Halves);

    /// Some elements taken from where [`Flat::narrow`] has put them.
    fn widen(&mut self, halves: &Self::Halves, range: Range<usize>);
}

/// A gradient on its way to its sum.
pub struct Gradient<B: ModelBackend> {
    /// Where its parameter lies.
    pub range: Range<usize>,
    /// Whether it is the first one, which overwrites what is there.
    pub first: bool,
    /// Its values, row-major.
    pub values: Tensor<B, 2>,
}

/// The makings of the gradient of a linear layer's weight, `dy^T x`.
pub struct Product<B: ModelBackend> {
    /// Where the weight lies.
    pub range: Range<usize>,
    /// As [`Gradient::first`].
    pub first: bool,
    /// The gradient of its output.
    pub dy_no: Tensor<B, 2>,
    /// Its input.
    pub x_ni: Tensor<B, 2>,
}

/// A [`Flat`] that takes gradients from, and gives values to, tensors of this backend.
pub trait FlatOn<B: ModelBackend>: Flat {
    /// Where the flat space of a model on this device lies.
    fn place(device: &B::Device) -> Self::Place;

    /// The first `len` elements of a tensor; without a copy, where they lie there and nobody else holds them.
    fn from_tensor(tensor: Tensor<B, 1>, len: usize) -> Self;

    /// As a tensor, which may be longer; likewise without a copy.
    fn into_tensor(self, device: &B::Device) -> Tensor<B, 1>;

    /// Adds gradients.
    fn add(&mut self, gradients: Vec<Gradient<B>>);

    /// Adds gradients of linear layers' weights.
    fn add_products(&mut self, products: Vec<Product<B>>);
}

/// Elements on their way between ranks.
pub trait Halves: Default + fmt::Debug {
    /// All of them, for a collective.
    fn lend(&mut self) -> Lent<'_, bf16>;

    /// Bytes of memory they take.
    fn bytes(&self) -> u64;
}

/// A buffer lent to a collective.
#[derive(Debug)]
pub enum Lent<'a, T> {
    /// In host memory.
    Host(&'a mut [T]),
    /// In a device's.
    Device(&'a mut dyn DeviceBuffer),
}

/// A buffer in a device's memory as those see it who carry buffers and know no backend.
pub trait DeviceBuffer: fmt::Debug {
    /// Elements.
    fn len(&self) -> usize;

    /// True without elements.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// What an element is.
    fn element(&self) -> DeviceElement;

    /// Shows `change` a copy in host memory, and takes it back if that returns true.
    fn through_host(&mut self, change: &mut dyn FnMut(HostCopy<'_>) -> bool);

    /// The tensor of one axis that it is, of whatever backend, for whoever can work on it where it lies; none if it holds nothing. It may be
    /// longer than [`DeviceBuffer::len`].
    fn tensor(&self) -> Option<&dyn Any>;
}

/// Element types of a [`DeviceBuffer`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeviceElement {
    /// 2 bytes.
    Bf16,
    /// 4 bytes.
    F32,
}

impl DeviceElement {
    /// Bytes of one.
    pub fn bytes(self) -> usize {
        match self {
            Self::Bf16 => 2,
            Self::F32 => 4,
        }
    }
}

/// The elements of a [`DeviceBuffer`] in host memory.
#[derive(Debug)]
pub enum HostCopy<'a> {
    /// 2 bytes an element.
    Bf16(&'a mut [bf16]),
    /// 4 bytes an element.
    F32(&'a mut [f32]),
}
