//! What is done with the flat parameter buffer in a device's memory.

use std::{borrow::Cow, ops::Range};

use burn::tensor::{DType, Tensor, TensorData};

use super::{
    Flat, FlatOn, Gradient, LentBuffer, Product, RowGradients,
    adamw::{Average, Part, Run},
    device::{DeviceValues, HalvesOnDevice, OnDevice, SLACK, uploaded},
    host, offloaded,
    tensors::{self, Origins, Updates},
};
use crate::kernels::{ModelBackend, upload};

/// Elements that leave the device at a time. A piece is cut out there first, and passes through host memory
/// that stays pinned: both are 1 MiB, which is free on a GPU that is full, and not as much as the whole
/// buffer.
const PIECE: usize = 1 << 18;
/// Elements of weights' gradients that wait until they are added together, at most: 32 MiB of small ones, and
/// a larger one alone.
#[cfg(not(test))]
pub const WAITING: usize = 8 << 20;
/// So that tests meet it.
#[cfg(test)]
pub const WAITING: usize = 6;

impl<B: ModelBackend> Flat for OnDevice<B> {
    type Place = B::Device;
    type Halves = HalvesOnDevice<B>;

    fn of(device: &B::Device, values: Vec<f32>) -> Self {
        let len = values.len();
        let values =
            B::memory_persistent_allocations(device, values, |values| uploaded(values, SLACK, device));
        Self { values: DeviceValues::There(values), len, device: device.clone() }
    }

    fn zeros(device: &B::Device, len: usize) -> Self {
        let lost = Self { values: DeviceValues::Lost, len, device: device.clone() };
        Self { values: DeviceValues::There(lost.tensor()), ..lost }
    }

    fn offloaded(device: &B::Device, len: usize) -> Self {
        Self { values: DeviceValues::Offloaded(vec![0.0; len]), len, device: device.clone() }
    }

    fn len(&self) -> usize {
        self.len
    }

    fn read(&self, range: Range<usize>) -> Cow<'_, [f32]> {
        match &self.values {
            _ if range.is_empty() => Cow::Borrowed(&[]),
            DeviceValues::Offloaded(values) => Cow::Borrowed(&values[range]),
            DeviceValues::Lost | DeviceValues::There(_) => {
                let tensor = self.tensor();
                let mut values = Vec::with_capacity(range.len());
                for start in range.clone().step_by(PIECE) {
                    let piece = tensor.clone().slice([start..range.end.min(start + PIECE)]).into_data();
                    values.extend_from_slice(
                        piece.as_slice().expect("the flat parameter buffer is fp32 by construction"),
                    );
                }
                Cow::Owned(values)
            }
        }
    }

    fn edit<R>(&mut self, edit: impl FnOnce(&mut [f32]) -> R) -> R {
        if let DeviceValues::Offloaded(values) = &mut self.values {
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

    fn adamw(part: Part<'_, Self>, runs: &[Run], average: Option<Average<'_, Self>>) {
        let Part { weights, weights_from, state: [m, v], grads, grads_from } = part;
        if m.is_offloaded() {
            let weights = &mut *weights;
            offloaded::adamw(Part { weights, weights_from, state: [m, v], grads, grads_from }, runs);
        } else {
            let from = Origins { weights: weights_from, grads: grads_from };
            let before = Updates { weights: weights.taken(), state: [m.taken(), v.taken()] };
            let after = B::flat_adamw(before, &grads.tensor(), from, runs);
            weights.give_back(after.weights);
            [m, v].into_iter().zip(after.state).for_each(|(buffer, values)| buffer.give_back(values));
        }
        if let Some(Average { values, share }) = average {
            values.approach(weights, weights_from, share);
        }
    }

    fn approach(&mut self, towards: &Self, from: usize, share: f32) {
        if let DeviceValues::Offloaded(values) = &mut self.values {
            for (piece, values) in values.chunks_mut(PIECE).enumerate() {
                let start = from + piece * PIECE;
                host::approach(values, &towards.read(start..start + values.len()), share);
            }
            return;
        }
        let (towards, len) = (towards.tensor(), self.len);
        self.change(|values| tensors::approach(values, &towards, from, len, share));
    }

    fn exchange(&mut self, from: usize, part: &mut Self) {
        if let DeviceValues::Offloaded(values) = &mut part.values {
            for (piece, values) in values.chunks_mut(PIECE).enumerate() {
                let start = from + piece * PIECE;
                let at = start..start + values.len();
                let ours = self.read(at.clone()).into_owned();
                let theirs = upload(TensorData::new(values.to_vec(), [at.len()]), &self.device);
                self.change(|whole| whole.slice_assign([at], theirs));
                values.copy_from_slice(&ours);
            }
            return;
        }
        let (ours, theirs) = tensors::exchange(self.taken(), part.taken(), from, part.len);
        self.give_back(ours);
        part.give_back(theirs);
    }

    fn lend(&mut self) -> LentBuffer<'_, f32> {
        LentBuffer::Device(self)
    }

    fn narrow(&self, halves: &mut HalvesOnDevice<B>) {
        // The last step's are let go first.
        halves.values = None;
        let narrowed =
            B::memory_persistent_allocations(&self.device, self.tensor(), |values| values.cast(DType::BF16));
        *halves = HalvesOnDevice { values: Some(narrowed), len: self.len };
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
        Self { values: DeviceValues::There(tensor), len, device }
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
            // Additions of one launch are in no order: a range that comes twice waits for its first addition.
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

    fn add_rows(&mut self, gradients: RowGradients<'_, B>) {
        if gradients.first {
            self.clear(gradients.range.clone());
        }
        self.change(|sums| B::flat_add_rows(sums, gradients));
    }
}
