//! Buffers in a device's memory.
//!
//! A buffer is the only holder of its tensor between two operations, so a backend changes it in place; a
//! clone makes the next change a copy, and nothing else. It is 400 kB longer than the flat parameter buffer
//! ([`SLACK`]): NCCL's chunks are equal, and with room for the last one no collective needs another buffer.
//! What lies there is reduced and passed around with the rest, and never read.
//!
//! What stays on the device is allocated to stay: an allocator that divides large pages gives each exactly
//! what it takes, and not the next larger page.

use std::{any::Any, fmt, ops::Range};

use burn::tensor::{DType, Tensor, TensorData};
use coxswain_proto::limits::MAX_WORLD;
use half::bf16;

use super::{DeviceBuffer, DeviceElement, Flat, Halves, HostCopy, LentBuffer};
use crate::kernels::{ModelBackend, upload};

/// Elements behind the last one: equal chunks for any world end before it.
pub const SLACK: usize = MAX_WORLD;

/// A buffer in the memory of `device`, or on its way there.
#[derive(Clone)]
pub struct OnDevice<B: ModelBackend> {
    pub(super) values: DeviceValues<B>,
    pub(super) len: usize,
    pub(super) device: B::Device,
}

/// Where the elements are.
#[derive(Clone)]
pub(super) enum DeviceValues<B: ModelBackend> {
    /// With an operation; for good if that was unwound out of (a device without memory). Then there are zeros
    /// again.
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
    fn there(&self, values: DeviceValues<B>) -> Tensor<B, 1> {
        match values {
            DeviceValues::Lost => B::memory_persistent_allocations(&self.device, self.len + SLACK, |len| {
                Tensor::zeros([len], (&self.device, DType::F32))
            }),
            DeviceValues::There(tensor) => tensor,
            DeviceValues::Offloaded(values) => uploaded(values, SLACK, &self.device),
        }
    }

    /// The tensor, shared.
    pub(super) fn tensor(&self) -> Tensor<B, 1> {
        self.there(self.values.clone())
    }

    /// The tensor, not shared; [`OnDevice::give_back`] is due.
    pub(super) fn taken(&mut self) -> Tensor<B, 1> {
        let values = std::mem::replace(&mut self.values, DeviceValues::Lost);
        self.there(values)
    }

    pub(super) fn give_back(&mut self, tensor: Tensor<B, 1>) {
        self.values = DeviceValues::There(tensor);
    }

    pub(super) fn change(&mut self, change: impl FnOnce(Tensor<B, 1>) -> Tensor<B, 1>) {
        let values = self.taken();
        self.give_back(change(values));
    }

    /// Takes over `values`; the old ones are let go first, so that the device holds one of them.
    pub(super) fn replace(&mut self, values: Vec<f32>) {
        self.values = DeviceValues::Lost;
        *self = Self::of(&self.device, values);
    }

    /// Whether the elements are in host memory between uses.
    pub(super) fn is_offloaded(&self) -> bool {
        matches!(self.values, DeviceValues::Offloaded(_))
    }

    /// Some elements, brought to the device.
    pub(super) fn upload(&self, range: Range<usize>) -> Tensor<B, 1> {
        let values = self.read(range).into_owned();
        let len = values.len();
        upload(TensorData::new(values, [len]), &self.device)
    }
}

/// `values` and as many zeros as `slack` on the device.
pub(super) fn uploaded<B: ModelBackend>(
    mut values: Vec<f32>,
    slack: usize,
    device: &B::Device,
) -> Tensor<B, 1> {
    let len = values.len() + slack;
    values.resize(len, 0.0);
    Tensor::from_data(TensorData::new(values, [len]), (device, DType::F32))
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
            DeviceValues::There(tensor) => Some(tensor),
            DeviceValues::Lost | DeviceValues::Offloaded(_) => None,
        }
    }
}

/// The elements of an [`OnDevice`], rounded to bfloat16.
pub struct HalvesOnDevice<B: ModelBackend> {
    /// None before the first use.
    pub(super) values: Option<Tensor<B, 1>>,
    pub(super) len: usize,
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
    fn lend(&mut self) -> LentBuffer<'_, bf16> {
        LentBuffer::Device(self)
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
