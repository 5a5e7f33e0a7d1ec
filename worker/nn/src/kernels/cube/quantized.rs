//! Weights of few bits, widened to bfloat16 for one product.
//!
//! One launch a matrix. A unit makes a vector of eight weights, of one word of NF4 and two of int8: all of a
//! row and of one block, where rows are whole vectors; else it makes one weight. Values are those of the
//! host, rounded, to the last bit.

use burn::tensor::{DType, Int, Tensor, backend::Backend};
use burn_cubecl::{CubeRuntime, kernel::into_contiguous, tensor::CubeTensor};
use cubecl::prelude::*;
use half::bf16;

use super::launch::{by_element, empty};
use crate::{
    dtypes::Packing,
    kernels::{
        packed::PackedMatrix,
        quantized::{BLOCK, GROUP, INVERSE, Nf4Places, int8_magnitudes},
        weight::packed_dims,
    },
};

/// Weights of a vector: as many as a unit stores at once.
const LANES: usize = 8;
/// Codes of NF4.
const CODES: u32 = 16;

/// See [`WeightOps::unpacked`](crate::kernels::WeightOps::unpacked).
pub fn unpacked<B, R>(parts: &[PackedMatrix<B>]) -> CubeTensor<R>
where
    B: Backend<IntTensorPrimitive = CubeTensor<R>>,
    R: CubeRuntime,
{
    let shape @ [_, inputs] = packed_dims(parts);
    let words = |part: &PackedMatrix<B>| -> CubeTensor<R> {
        let words: Tensor<B, 1, Int> = part.words();
        into_contiguous(words.into_primitive())
    };
    let out = empty(&words(&parts[0]), shape.into(), DType::BF16);
    let (client, lanes) = (out.client.clone(), if inputs.is_multiple_of(LANES) { LANES } else { 1 });
    let mut from = 0;
    for part in parts {
        let vectors = part.shape().iter().product::<usize>() / lanes;
        let (count, dim) = by_element(vectors);
        let (words, to, range) =
            (words(part), out.clone(), VectorRangeLaunch::new(from as u32, vectors as u32));
        match part.packing() {
            Packing::Nf4 => {
                let Nf4Places { scales, ranges, mean, dynamic, values, .. } =
                    Nf4Places::for_len(vectors * lanes);
                let [scales, ranges, mean, dynamic, values] =
                    [scales, ranges, mean, dynamic, values].map(|place| place as u32);
                let places = PlacesLaunch::new(scales, ranges, mean, dynamic, values);
                nf4_kernel::launch::<R>(
                    &client,
                    count,
                    dim,
                    lanes,
                    words.into_array_arg(),
                    to.into_array_arg(),
                    places,
                    range,
                );
            }
            Packing::Int8 => int8_kernel::launch::<R>(
                &client,
                count,
                dim,
                lanes,
                words.into_array_arg(),
                to.into_array_arg(),
                int8_magnitudes(part.shape()) as u32,
                inputs as u32,
                range,
            ),
        }
        from += vectors;
    }
    out
}

/// Vectors that a launch makes, from which on.
#[derive(CubeType, CubeLaunch)]
struct VectorRange {
    from: u32,
    count: u32,
}

/// [`Nf4Places`], as a kernel takes them.
#[derive(CubeType, CubeLaunch)]
struct Places {
    scales: u32,
    ranges: u32,
    mean: u32,
    dynamic: u32,
    values: u32,
}

#[cube(launch)]
fn nf4_kernel<N: Size>(
    words: &Array<u32>,
    to: &mut Array<Vector<bf16, N>>,
    places: &Places,
    range: &VectorRange,
) {
    let mut values = SharedMemory::<f32>::new(CODES as usize);
    if UNIT_POS < CODES {
        values[UNIT_POS as usize] = f32::reinterpret(words[(places.values + UNIT_POS) as usize]);
    }
    sync_cube();
    if ABSOLUTE_POS < range.count as usize {
        let first = ABSOLUTE_POS * N::value();
        let block = first / BLOCK;
        let scales = words[places.scales as usize + block / 4];
        let scale = (scales >> ((block % 4) as u32 * 8u32)) & 255u32;
        let dynamic = f32::reinterpret(words[(places.dynamic + scale) as usize]);
        let spread = f32::reinterpret(words[places.ranges as usize + block / GROUP]);
        // The product is rounded by itself, as on the host: a compiler would fuse one with the sum.
        let scale = fma(dynamic, spread, f32::new(0.0)) + f32::reinterpret(words[places.mean as usize]);
        let mut wide = Vector::<f32, N>::new(0.0);
        #[unroll]
        for lane in 0..N::value() {
            let at = first + lane;
            // The first of two codes is in the high half of its byte.
            let code = (words[at / 8] >> (((at % 8) as u32 ^ 1u32) * 4u32)) & 15u32;
            wide[lane] = values[code as usize] * scale;
        }
        to[range.from as usize + ABSOLUTE_POS] = Vector::cast_from(wide);
    }
}

#[cube(launch)]
fn int8_kernel<N: Size>(
    words: &Array<u32>,
    to: &mut Array<Vector<bf16, N>>,
    magnitudes: u32,
    inputs: u32,
    range: &VectorRange,
) {
    if ABSOLUTE_POS < range.count as usize {
        let first = ABSOLUTE_POS * N::value();
        let magnitude = f32::reinterpret(words[magnitudes as usize + first / inputs as usize]);
        let mut wide = Vector::<f32, N>::new(0.0);
        #[unroll]
        for lane in 0..N::value() {
            let at = first + lane;
            let byte = (words[at / 4] >> ((at % 4) as u32 * 8u32)) & 255u32;
            let code = i32::cast_from(byte ^ 128u32) - 128i32;
            wide[lane] = f32::cast_from(code) * magnitude * INVERSE;
        }
        to[range.from as usize + ABSOLUTE_POS] = Vector::cast_from(wide);
    }
}
