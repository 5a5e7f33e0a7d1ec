//! From host memory to a device in the middle of a run: moments that are offloaded, layers that are streamed,
//! rows of a table that stays on the host.
//!
//! A GPU copies page-locked memory by itself, while the host goes on. Of any other memory its driver makes
//! such a copy first, and the host waits for that. So what is brought is put into page-locked memory here:
//! piece by piece, one on its way while the next one is filled, so that a run locks two pieces and not what
//! it brings.
//!
//! ```text
//! host     fill 0 ┐ fill 1 ┐ wait for 0, fill 2 ┐ wait for 1, fill 3 ..
//! device          └ copy 0 └ copy 1             └ copy 2
//! ```
//!
//! The other way there is nothing to do here: what is read from a GPU arrives in page-locked memory. What
//! this file does not do: load a model, which happens once (`models::loader`).

use burn::tensor::{Tensor, TensorData};

use super::ModelBackend;

/// Bytes of a piece: long enough that a copy takes longer than asking for it, short enough that two of them
/// are nothing beside what else a host holds.
const PIECE: usize = 4 << 20;

/// Bytes that a vectorised load takes at once, and at a multiple of which it begins.
pub const VECTOR: usize = 16;

/// These values on a device, in their own type.
pub fn upload<B: ModelBackend, const D: usize>(data: TensorData, device: &B::Device) -> Tensor<B, D> {
    if B::ON_HOST || !B::VALUES {
        let dtype = data.dtype;
        return Tensor::from_data(data, (device, dtype));
    }
    in_pieces(data, device, PIECE)
}

/// Uploads values in pieces of so many bytes, a multiple of the elements' size.
fn in_pieces<B: ModelBackend, const D: usize>(
    data: TensorData,
    device: &B::Device,
    piece: usize,
) -> Tensor<B, D> {
    let (shape, dtype): ([usize; D], _) = (data.shape.dims(), data.dtype);
    if data.bytes.len() <= piece {
        return locked(data, device);
    }
    let elements = |bytes: usize| bytes / dtype.size();
    let mut whole = Tensor::<B, 1>::empty([elements(data.bytes.len())], (device, dtype));
    for (number, bytes) in data.bytes.chunks(piece).enumerate() {
        let at = elements(number * piece)..elements(number * piece + bytes.len());
        let values = TensorData::from_bytes_vec(bytes.to_vec(), [at.len()], dtype);
        whole = whole.slice_assign([at], locked::<B, 1>(values, device));
    }
    whole.reshape(shape)
}

/// One piece, through page-locked memory.
fn locked<B: ModelBackend, const D: usize>(data: TensorData, device: &B::Device) -> Tensor<B, D> {
    let shape: [usize; D] = data.shape.dims();
    let row = B::bring(data, device);
    // What the device has to say of a failure it says again when what was brought is used.
    let _ = B::flush(device);
    row.reshape(shape)
}

#[cfg(test)]
mod tests {
    use burn::{backend::Flex, tensor::DType};
    use half::bf16;

    use super::*;

    #[test]
    fn pieces_lie_where_the_whole_would() {
        let values: Vec<f32> = (0..21).map(|value| value as f32).collect();
        for piece in [4, 8, 20, 80, 84, 400] {
            let data = TensorData::new(values.clone(), [3, 7]);
            let found: Tensor<Flex, 2> = in_pieces(data, &Default::default(), piece);
            let found: Vec<f32> = found.into_data().into_vec().expect("float32 as it was given");
            assert_eq!(found, values, "in pieces of {piece} bytes");
        }
    }

    #[test]
    fn half_precision_stays_so() {
        let values: Vec<bf16> = (0..15).map(|value| bf16::from_f32(value as f32 * 0.1)).collect();
        for piece in [2, 6, 30] {
            let data = TensorData::new(values.clone(), [5, 3]);
            let found: Tensor<Flex, 2> = in_pieces(data, &Default::default(), piece);
            assert_eq!(found.dtype(), DType::BF16);
            let found: Vec<bf16> = found.into_data().into_vec().expect("bfloat16 as it was given");
            assert_eq!(found, values, "in pieces of {piece} bytes");
        }
    }
}
