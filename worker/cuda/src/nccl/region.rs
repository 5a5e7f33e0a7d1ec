//! A tensor of burn's as memory that NCCL works on.
//!
//! cubecl hands out the address of a tensor's memory; `order` keeps a transfer behind what burn was told
//! before it. When the host has seen the end of the transfer (an event on NCCL's own stream) it tells burn to
//! go on, and what burn is told afterwards comes after.
//!
//! What it does not do: call NCCL (`library`), or wait for a transfer.

use burn::tensor::{DType, Tensor, TensorPrimitive, backend::Backend};
use burn_cuda::Cuda;
use coxswain_nn::kernels::flat::DeviceBuffer;
use coxswain_worker::collective::TransportError;

/// Elements of a tensor of one axis, one after the other, in memory that lives as long as this value.
#[derive(Debug)]
pub struct Region {
    /// Keeps the memory.
    tensor: Tensor<Cuda, 1>,
    address: u64,
    bytes: usize,
}

/// The tensor behind a buffer, if it is one of burn's on a GPU, lies there without gaps, and has room for so
/// many bytes.
fn tensor_of(buffer: &dyn DeviceBuffer, bytes: usize) -> Option<&Tensor<Cuda, 1>> {
    let tensor = buffer.tensor()?.downcast_ref::<Tensor<Cuda, 1>>()?;
    let TensorPrimitive::Float(primitive) = tensor.clone().into_primitive() else { return None };
    let width = match primitive.dtype {
        DType::BF16 => 2,
        DType::F32 => 4,
        _ => return None,
    };
    let dense = primitive.meta.strides()[..] == [1] && width == buffer.element().bytes();
    let room = (primitive.handle.size_in_used() as usize).min(width * tensor.dims()[0]);
    (dense && bytes <= room).then_some(tensor)
}

impl Region {
    /// Whether a transfer of so many bytes can be made on this buffer where it lies.
    pub fn reaches(buffer: &dyn DeviceBuffer, bytes: usize) -> bool {
        tensor_of(buffer, bytes).is_some()
    }

    /// The memory of a buffer that [`Region::reaches`], when the driver has been told everything that burn
    /// was told so far. What went wrong with that is said here.
    pub fn of(buffer: &dyn DeviceBuffer, bytes: usize) -> Result<Self, TransportError> {
        let unreachable = || TransportError("a buffer has moved in GPU memory".to_owned());
        let tensor = tensor_of(buffer, bytes).ok_or_else(unreachable)?.clone();
        let primitive = tensor.clone().into_primitive().tensor();
        primitive.client.flush().map_err(transport_error)?;
        let address =
            primitive.client.get_resource(primitive.handle.clone()).map_err(transport_error)?.resource().ptr;
        Ok(Self { tensor, address, bytes })
    }

    /// Waits until the GPU has done what it was told, where it cannot be left to it to keep the order.
    pub fn settle(&self) -> Result<(), TransportError> {
        <Cuda as Backend>::sync(&self.tensor.device()).map_err(transport_error)
    }

    /// Where its first element is on the GPU.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Bytes from there on that belong to it.
    pub fn bytes(&self) -> usize {
        self.bytes
    }
}

fn transport_error(error: impl std::fmt::Display) -> TransportError {
    TransportError(format!("CUDA: {error}"))
}
