//! Values for a tensor, copied to the device from where they lie.
//!
//! cubecl's client copies what a tensor is made of twice before its server sees it
//! (`ComputeClient::do_create` in 0.10), out of page-locked memory into memory that is not: then the host
//! waits for the copy. The server itself takes what it is given, so it is asked as the client asks it, on its
//! own thread and in its turn.

use burn::tensor::TensorData;
use burn_cubecl::{CubeRuntime, ops::numeric::empty_device_contiguous_dtype, tensor::CubeTensor};
use cubecl::{
    device::Device, device_handle::DeviceHandle, server::ComputeServer, stream_id::StreamId, zspace::strides,
};

use super::watermark;

/// One row of these values. What they lie in is let go when it has been copied and the queue is told to.
pub fn brought<R: CubeRuntime>(data: TensorData, device: &R::Device) -> CubeTensor<R> {
    let (client, elements, dtype) = (R::client(device), data.num_elements(), data.dtype);
    let room = empty_device_contiguous_dtype(client.clone(), device.clone(), [elements].into(), dtype);
    watermark::look(&client);
    let place = room.handle.clone().copy_descriptor([elements].into(), strides![1], dtype.size());
    let (bytes, stream) = (data.bytes, StreamId::current());
    let server = DeviceHandle::<R::Server>::new(device.to_id());
    server.submit(move |server| server.write(vec![(place, bytes)], stream));
    room
}
