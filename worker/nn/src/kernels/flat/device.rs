//! Buffers in a device's memory.
//!
//! A buffer is the only holder of its tensor between two operations, so a backend changes it in place; whoever clones a buffer makes the next
//! change a copy, and nothing else. It is 40 kB longer than the flat space ([`SLACK`]): NCCL's chunks are equal, and with room for
//! the last one no collective needs another buffer. What lies there is reduced and passed around with the rest, and read by nobody.

use std::{any::Any, borrow::Cow, fmt, ops::Range};

use burn::tensor::{DType, Tensor, TensorData};
use coxswain_proto::limits::MAX_WORLD;
use half::bf16;

use super::{
    DeviceBuffer, DeviceElement, Flat, FlatOn, Gradient, Halves, HostCopy, Lent, Product,
    adamw::{Part, Run},
    offloaded,
    tensors::{Origins, Updated},
};
use crate::kernels::ModelBackend;

/// Elements behind the last one: equal chunks for any world end before it.
const SLACK: usize = MAX_WORLD;

/// Elements that leave the device at a time. A piece is cut out there first, and passes through host memory that stays pinned: both are 1 MiB,
/// which is free on a card that is full, and not as much as the whole buffer.
const PIECE: usize = 1 << 18;
/// Elements of weights' gradients that wait until they are added together, at most: 32 MiB of small ones, and a larger one alone.
#[cfg(not(test))]
const WAITING: usize = 8 << 20;
/// So that tests meet it.
#[cfg(test)]
const WAITING: usize = 6;

/// A buffer in the memory of `device`, or on its way there.
#[derive(Clone)]
pub struct OnDevice<B: ModelBackend> {
    values: Values<B>,
    len: usize,
    device: B::Device,
}

/// Where the elements are.
#[derive(Clone)]
enum Values<B: ModelBackend> {
    /// With an operation; for good if that was unwound out of (a device without memory). Then there are zeros again.
    Lost,
    /// On the device.
    There(Tensor<B, 1>),
    /// In host memory, between uses ([`Flat::offloaded`]).
    Offloaded(Vec<f32>),
}

impl<B: ModelBackend> fmt::Debug for OnDevice<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let offloaded = self.is_offloaded();
        let mut shown = f.debug_struct("OnDevice");
        shown.field("len", &self.len).field("device", &self.device).field("offloaded", &offloaded).finish()
    }
}

impl<B: ModelBackend> OnDevice<B> {
    /// On the device, whatever `values` was.
    fn there(&self, values: Values<B>) -> Tensor<B, 1> {
        match values {
            Values::Lost => Tensor::zeros([self.len + SLACK], (&self.device, DType::F32)),
            Values::There(tensor) => tensor,
            Values::Offloaded(values) => uploaded(values, SLACK, &self.device),
        }
    }

    /// The tensor, shared.
    pub(super) fn tensor(&self) -> Tensor<B, 1> {
        self.there(self.values.clone())
    }

    /// The tensor, not shared; [`OnDevice::give_back`] is due.
    pub(super) fn taken(&mut self) -> Tensor<B, 1> {
        let values = std::mem::replace(&mut self.values, Values::Lost);
        self.there(values)
    }

    pub(super) fn give_back(&mut self, tensor: Tensor<B, 1>) {
        self.values = Values::There(tensor);
    }

    fn change(&mut self, change: impl FnOnce(Tensor<B, 1>) -> Tensor<B, 1>) {
        let values = self.taken();
        self.give_back(change(values));
    }

    /// Takes over `values`; the old ones are let go first, so that the device holds one of them.
    fn replace(&mut self, values: Vec<f32>) {
        self.values = Values::Lost;
        *self = Self::of(&self.device, values);
    }

    /// Whether the elements are in host memory between uses.
    pub(super) fn is_offloaded(&self) -> bool {
        matches!(self.values, Values::Offloaded(_))
    }

    /// Some elements, brought to the device.
    pub(super) fn upload(&self, range: Range<usize>) -> Tensor<B, 1> {
        uploaded(self.read(range).into_owned(), 0, &self.device)
    }
}

/// `values` and as many zeros as `slack` on the device.
fn uploaded<B: ModelBackend>(mut values: Vec<f32>, slack: usize, device: &B::Device) -> Tensor<B, 1> {
    let len = values.len() + slack;
    values.resize(len, 0.0);
    Tensor::from_data(TensorData::new(values, [len]), (device, DType::F32))
}

impl<B: ModelBackend> Flat for OnDevice<B> {
    type Place = B::Device;
    type Halves = HalvesOnDevice<B>;

    fn of(device: &B::Device, values: Vec<f32>) -> Self {
        let len = values.len();
        Self { values: Values::There(uploaded(values, SLACK, device)), len, device: device.clone() }
    }

    fn zeros(device: &B::Device, len: usize) -> Self {
        let lost = Self { values: Values::Lost, len, device: device.clone() };
        Self { values: Values::There(lost.tensor()), ..lost }
    }

    fn offloaded(device: &B::Device, len: usize) -> Self {
        Self { values: Values::Offloaded(vec![0.0; len]), len, device: device.clone() }
    }

    fn len(&self) -> usize {
        self.len
    }

    fn read(&self, range: Range<usize>) -> Cow<'_, [f32]> {
        match &self.values {
            _ if range.is_empty() => Cow::Borrowed(&[]),
            Values::Offloaded(values) => Cow::Borrowed(&values[range]),
            Values::Lost | Values::There(_) => {
                let tensor = self.tensor();
                let mut values = Vec::with_capacity(range.len());
                for start in range.clone().step_by(PIECE) {
                    let piece = tensor.clone().slice([start..range.end.min(start + PIECE)]).into_data();
                    values
                        .extend_from_slice(piece.as_slice().expect("the flat space is fp32 by construction"));
                }
                Cow::Owned(values)
            }
        }
    }

    fn edit<R>(&mut self, edit: impl FnOnce(&mut [f32]) -> R) -> R {
        if let Values::Offloaded(values) = &mut self.values {
            return edit(values);
        }
        let mut values = self.read(0..self.len).into_owned();
        let result = edit(&mut values);
        self.replace(values);
        result
    }

    fn clear(&mut self, range: Range<usize>) {
        if !range.is_empty() {
            self.change(|values| values.slice_fill([range], 0.0));
        }
    }

    fn squares(&self, ranges: &[Range<usize>]) -> f64 {
        let values = self.tensor();
        let sums: Vec<_> = ranges.iter().flat_map(|range| B::flat_squares(&values, range)).collect();
        if sums.is_empty() {
            return 0.0;
        }
        let sums: Vec<f32> = Tensor::cat(sums, 0).into_data().into_vec().expect("sums of fp32 are fp32");
        sums.into_iter().map(f64::from).sum()
    }

    fn adamw(part: Part<'_, Self>, runs: &[Run]) {
        if part.exp_avg.is_offloaded() {
            return offloaded::adamw(part, runs);
        }
        let Part { weights, weights_from, exp_avg, exp_avg_sq, grads, grads_from } = part;
        let (grads, from) = (grads.tensor(), Origins { weights: weights_from, grads: grads_from });
        let state =
            Updated { weights: weights.taken(), exp_avg: exp_avg.taken(), exp_avg_sq: exp_avg_sq.taken() };
        let state = B::flat_adamw(state, &grads, from, runs);
        weights.give_back(state.weights);
        exp_avg.give_back(state.exp_avg);
        exp_avg_sq.give_back(state.exp_avg_sq);
    }

    fn lend(&mut self) -> Lent<'_, f32> {
        Lent::Device(self)
    }

    fn narrow(&self, halves: &mut HalvesOnDevice<B>) {
        // The last step's are let go first.
        halves.values = None;
        *halves = HalvesOnDevice { values: Some(self.tensor().cast(DType::BF16)), len: self.len };
    }

    fn widen(&mut self, halves: &HalvesOnDevice<B>, range: Range<usize>) {
        let Some(halves) = halves.values.as_ref().filter(|_| !range.is_empty()) else { return };
        self.change(|values| B::flat_widen(values, halves, &range));
    }
}

impl<B: ModelBackend> FlatOn<B> for OnDevice<B> {
    fn place(device: &B::Device) -> B::Device {
        device.clone()
    }

    fn from_tensor(tensor: Tensor<B, 1>, len: usize) -> Self {
        let device = tensor.device();
        Self { values: Values::There(tensor), len, device }
    }

    fn into_tensor(mut self, _device: &B::Device) -> Tensor<B, 1> {
        self.taken()
    }

    fn add(&mut self, gradients: Vec<Gradient<B>>) {
        if !gradients.is_empty() {
            self.change(|sums| B::flat_accumulate(sums, gradients));
        }
    }

    fn add_products(&mut self, products: Vec<Product<B>>) {
        let (mut waiting, mut elements) = (Vec::new(), 0);
        for Product { range, first, dy_no, x_ni } in products {
            // Additions of one launch are in no order: who comes twice waits for the first time.
            let comes_again = waiting.iter().any(|gradient: &Gradient<B>| gradient.range == range);
            if comes_again || elements + range.len() > WAITING {
                self.add(std::mem::take(&mut waiting));
                elements = 0;
            }
            let values = B::linear_weight_gradient(dy_no, x_ni);
            let values = if values.dtype() == DType::F32 { values } else { values.cast(DType::F32) };
            elements += range.len();
            waiting.push(Gradient { range, first, values });
        }
        self.add(waiting);
    }
}

impl<B: ModelBackend> DeviceBuffer for OnDevice<B> {
    fn len(&self) -> usize {
        self.len
    }

    fn element(&self) -> DeviceElement {
        DeviceElement::F32
    }

    fn through_host(&mut self, change: &mut dyn FnMut(HostCopy<'_>) -> bool) {
        let mut values = self.read(0..self.len).into_owned();
        if change(HostCopy::F32(&mut values)) {
            self.replace(values);
        }
    }

    fn tensor(&self) -> Option<&dyn Any> {
        match &self.values {
            Values::There(tensor) => Some(tensor),
            Values::Lost | Values::Offloaded(_) => None,
        }
    }
}

/// The elements of an [`OnDevice`], rounded to bfloat16.
pub struct HalvesOnDevice<B: ModelBackend> {
    /// None before the first use.
    values: Option<Tensor<B, 1>>,
    len: usize,
}

impl<B: ModelBackend> Default for HalvesOnDevice<B> {
    fn default() -> Self {
        Self { values: None, len: 0 }
    }
}

impl<B: ModelBackend> fmt::Debug for HalvesOnDevice<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HalvesOnDevice").field("len", &self.len).finish()
    }
}

impl<B: ModelBackend> Halves for HalvesOnDevice<B> {
    fn lend(&mut self) -> Lent<'_, bf16> {
        Lent::Device(self)
    }

    fn bytes(&self) -> u64 {
        size_of::<bf16>() as u64 * self.len as u64
    }
}

impl<B: ModelBackend> DeviceBuffer for HalvesOnDevice<B> {
    fn len(&self) -> usize {
        self.len
    }

    fn element(&self) -> DeviceElement {
        DeviceElement::Bf16
    }

    fn through_host(&mut self, change: &mut dyn FnMut(HostCopy<'_>) -> bool) {
        let Some(halves) = &self.values else {
            change(HostCopy::Bf16(&mut []));
            return;
        };
        let (device, shape) = (halves.device(), halves.dims());
        let mut values: Vec<bf16> =
            halves.clone().into_data().into_vec().expect("halves are bf16 by construction");
        if change(HostCopy::Bf16(&mut values[..self.len])) {
            let values = TensorData::new(values, shape);
            self.values = Some(Tensor::from_data(values, (&device, DType::BF16)));
        }
    }

    fn tensor(&self) -> Option<&dyn Any> {
        self.values.as_ref().map(|values| values as &dyn Any)
    }
}
