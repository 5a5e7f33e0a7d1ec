//! What collectives work on: buffers, and how those of different ranks become one.

use std::ops::Range;

use half::bf16;

use super::CollectiveError;
use coxswain_nn::kernels::flat::{DeviceBuffer, DeviceElement, HostCopy, LentBuffer};

/// A read-only buffer.
#[derive(Clone, Copy, Debug)]
pub enum Buf<'a> {
    /// Host memory, 2 bytes an element. Sums are rounded at every rank on the way.
    Bf16(&'a [bf16]),
    /// Host memory, 4 bytes an element.
    F32(&'a [f32]),
    /// Host memory, 8 bytes an element: votes and scalars.
    F64(&'a [f64]),
    /// A device's memory.
    Device(&'a dyn DeviceBuffer),
}

/// A buffer that an operation writes to.
#[derive(Debug)]
pub enum BufMut<'a> {
    /// Host memory, 2 bytes an element. Sums are rounded at every rank on the way.
    Bf16(&'a mut [bf16]),
    /// Host memory, 4 bytes an element.
    F32(&'a mut [f32]),
    /// Host memory, 8 bytes an element.
    F64(&'a mut [f64]),
    /// A device's memory. Operations with two buffers refuse it.
    Device(&'a mut dyn DeviceBuffer),
}

impl<'a> From<LentBuffer<'a, f32>> for BufMut<'a> {
    fn from(lent: LentBuffer<'a, f32>) -> Self {
        match lent {
            LentBuffer::Host(values) => Self::F32(values),
            LentBuffer::Device(buffer) => Self::Device(buffer),
        }
    }
}

impl<'a> From<LentBuffer<'a, bf16>> for BufMut<'a> {
    fn from(lent: LentBuffer<'a, bf16>) -> Self {
        match lent {
            LentBuffer::Host(values) => Self::Bf16(values),
            LentBuffer::Device(buffer) => Self::Device(buffer),
        }
    }
}

/// How values of different ranks become one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reduce {
    /// Sum.
    Sum,
    /// Largest.
    Max,
}

/// Runs an operation on a copy of a device's buffer in host memory. What it leaves there goes back if it
/// succeeds.
pub(super) fn through_host(
    buffer: &mut dyn DeviceBuffer,
    mut operation: impl FnMut(BufMut<'_>) -> Result<(), CollectiveError>,
) -> Result<(), CollectiveError> {
    let mut outcome = Ok(());
    buffer.through_host(&mut |copy| {
        outcome = operation(match copy {
            HostCopy::Bf16(values) => BufMut::Bf16(values),
            HostCopy::F32(values) => BufMut::F32(values),
        });
        outcome.is_ok()
    });
    outcome
}

/// What went wrong with a pair of buffers.
fn size_error(operation: &'static str, input: Buf<'_>, output: Buf<'_>) -> CollectiveError {
    let detail = format!(
        "the input has {} elements of {}, the output has {} of {}",
        input.len(),
        input.element(),
        output.len(),
        output.element()
    );
    CollectiveError::Size { operation, detail }
}

impl<'a> Buf<'a> {
    pub(super) fn element(&self) -> &'static str {
        match self {
            Self::Bf16(_) => "bf16",
            Self::F32(_) => "f32",
            Self::F64(_) => "f64",
            Self::Device(x) => match x.element() {
                DeviceElement::Bf16 => "bf16 on a device",
                DeviceElement::F32 => "f32 on a device",
            },
        }
    }

    /// Bytes of all elements.
    pub(super) fn bytes(&self) -> usize {
        match self {
            Self::Bf16(x) => size_of_val(*x),
            Self::F32(x) => size_of_val(*x),
            Self::F64(x) => size_of_val(*x),
            Self::Device(x) => x.len() * x.element().bytes(),
        }
    }

    /// Elements.
    pub fn len(&self) -> usize {
        match self {
            Self::Bf16(x) => x.len(),
            Self::F32(x) => x.len(),
            Self::F64(x) => x.len(),
            Self::Device(x) => x.len(),
        }
    }

    /// True without elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

impl BufMut<'_> {
    /// This buffer, to read.
    pub fn as_buf(&self) -> Buf<'_> {
        match self {
            Self::Bf16(x) => Buf::Bf16(x),
            Self::F32(x) => Buf::F32(x),
            Self::F64(x) => Buf::F64(x),
            Self::Device(x) => Buf::Device(*x),
        }
    }

    /// Copies `from` to these elements; refuses other lengths, other elements, and a device's memory.
    pub(super) fn put(
        &mut self,
        operation: &'static str,
        at: Range<usize>,
        from: Buf<'_>,
    ) -> Result<(), CollectiveError> {
        match (&mut *self, from) {
            (Self::Bf16(to), Buf::Bf16(from)) if at.len() == from.len() => to[at].copy_from_slice(from),
            (Self::F32(to), Buf::F32(from)) if at.len() == from.len() => to[at].copy_from_slice(from),
            (Self::F64(to), Buf::F64(from)) if at.len() == from.len() => to[at].copy_from_slice(from),
            _ => return Err(size_error(operation, from, self.as_buf())),
        }
        Ok(())
    }

    /// Elements.
    pub fn len(&self) -> usize {
        self.as_buf().len()
    }

    /// True without elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}
