//! What a buffer of the flat parameter buffer is: one float32 buffer, what tensors exchange with it, and how
//! it is lent.

use std::{any::Any, borrow::Cow, fmt, ops::Range};

use burn::tensor::{Tensor, backend::Backend};
use half::bf16;

use super::{
    adamw::{Average, Part, Run},
    rows::RowGradients,
};

/// One buffer of float32 elements.
pub trait Flat: Clone + fmt::Debug {
    /// Names where buffers of this kind lie.
    type Place: Clone + fmt::Debug;
    /// This buffer's elements as bfloat16, for their way between ranks.
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

    /// Lets the host change elements of several buffers together.
    fn edit_all<const N: usize>(buffers: [&mut Self; N], edit: impl FnOnce([&mut [f32]; N])) {
        let mut values = buffers.each_ref().map(|buffer| buffer.read(0..buffer.len()).into_owned());
        edit(values.each_mut().map(Vec::as_mut_slice));
        for (buffer, values) in buffers.into_iter().zip(values) {
            buffer.edit(|buffer| buffer.copy_from_slice(&values));
        }
    }

    /// Zeroes some elements.
    fn clear(&mut self, range: Range<usize>);

    /// Sum of squares over these ranges; not finite if any of their elements is not.
    fn squares(&self, ranges: &[Range<usize>]) -> f64;

    /// The sum of squares of one range, bit for bit, and the sums of runs within it.
    fn squares_by_run(&self, range: Range<usize>, runs: &[Range<usize>]) -> (f64, Vec<f64>) {
        let of_runs = runs.iter().map(|run| self.squares(std::slice::from_ref(run))).collect();
        (self.squares(&[range]), of_runs)
    }

    /// AdamW ([`adamw`](super::adamw)) on runs of a part, in ascending order. Then the average, if there is
    /// one, follows the weights, also where no run is ([`Flat::approach`], bit for bit).
    fn adamw(part: Part<'_, Self>, runs: &[Run], average: Option<Average<'_, Self>>);

    /// Every element goes `share` of its way to that of `towards`, where the first one's is at `from`.
    fn approach(&mut self, towards: &Self, from: usize, share: f32);

    /// Exchanges the elements from `from` on with those of `part`, which may be offloaded.
    fn exchange(&mut self, from: usize, part: &mut Self);

    /// The whole buffer, for a collective.
    fn lend(&mut self) -> LentBuffer<'_, f32>;

    /// All elements, rounded to bfloat16.
    fn narrow(&self, halves: &mut Self::Halves);

    /// Some elements taken from where [`Flat::narrow`] has put them.
    fn widen(&mut self, halves: &Self::Halves, range: Range<usize>);
}

/// A gradient on its way to its sum.
pub struct Gradient<B: Backend> {
    /// Where its parameter lies.
    pub range: Range<usize>,
    /// Whether it is the first one, which overwrites what is there.
    pub first: bool,
    /// Values, row-major.
    pub values: Tensor<B, 2>,
}

/// The makings of the gradient of a linear layer's weight, `dy^T x`.
pub struct Product<B: Backend> {
    /// Where the weight lies.
    pub range: Range<usize>,
    /// As [`Gradient::first`].
    pub first: bool,
    /// The gradient of its output.
    pub dy_no: Tensor<B, 2>,
    /// Input.
    pub x_ni: Tensor<B, 2>,
}

/// A [`Flat`] that takes gradients from, and gives values to, tensors of this backend.
pub trait FlatOn<B: Backend>: Flat {
    /// Where the flat parameter buffer of a model on this device lies.
    fn place(device: &B::Device) -> Self::Place;

    /// The first `len` elements of a tensor; without a copy, where they lie there and have no other owner.
    fn from_tensor(tensor: Tensor<B, 1>, len: usize) -> Self;

    /// As a tensor, which may be longer; likewise without a copy.
    fn into_tensor(self, device: &B::Device) -> Tensor<B, 1>;

    /// Adds gradients.
    fn add(&mut self, gradients: Vec<Gradient<B>>);

    /// Adds gradients of linear layers' weights.
    fn add_products(&mut self, products: Vec<Product<B>>);

    /// Adds gradients of a table's rows, each row's in the order of its lookups.
    fn add_rows(&mut self, gradients: RowGradients<'_, B>);
}

/// Elements on their way between ranks.
pub trait Halves: Default + fmt::Debug {
    /// All of them, for a collective.
    fn lend(&mut self) -> LentBuffer<'_, bf16>;

    /// Bytes of memory they take.
    fn bytes(&self) -> u64;
}

/// A buffer lent to a collective.
#[derive(Debug)]
pub enum LentBuffer<'a, T> {
    /// In host memory.
    Host(&'a mut [T]),
    /// In a device's.
    Device(&'a mut dyn DeviceBuffer),
}

/// A buffer in a device's memory, for code that carries buffers and knows no backend.
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

    /// The tensor of one axis that it is, of whatever backend, for code that can work on it where it lies;
    /// none if it holds nothing. It may be longer than [`DeviceBuffer::len`].
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
