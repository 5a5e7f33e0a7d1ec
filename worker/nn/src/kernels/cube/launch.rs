//! Tensors as kernels see them.
//!
//! Every kernel here reads and writes contiguous float32, element `[.., i]` of a row beside `[.., i + 1]`, in
//! vectors of as many elements as its width and the device's loads allow. What arrives otherwise (a slice, a
//! pitched row, another type) is made so first; rotary embedding and attention in one kernel go by strides.

use burn::tensor::{DType, Shape, Tensor, TensorPrimitive, backend::Backend};
use burn_cubecl::{
    CubeRuntime,
    kernel::{cast, into_contiguous, slice},
    ops::numeric::empty_device_contiguous_dtype,
    tensor::CubeTensor,
};
use cubecl::{prelude::*, zspace::metadata::Metadata};

use super::watermark;
use crate::kernels::VECTOR;

/// Units of a cube that shares a row.
const ROW_UNITS: u32 = 256;
/// Units of a cube whose units have nothing to do with each other.
pub const UNITS: usize = 256;

/// A burn tensor as its buffer.
pub fn primitive<B, R, const D: usize>(x: Tensor<B, D>) -> CubeTensor<R>
where
    B: Backend<FloatTensorPrimitive = CubeTensor<R>>,
    R: CubeRuntime,
{
    x.into_primitive().tensor()
}

/// A buffer as a burn tensor.
pub fn wrapped<B, R, const D: usize>(x: CubeTensor<R>) -> Tensor<B, D>
where
    B: Backend<FloatTensorPrimitive = CubeTensor<R>>,
    R: CubeRuntime,
{
    Tensor::from_primitive(TensorPrimitive::Float(x))
}

/// A burn tensor as contiguous float32.
pub fn floats<B, R, const D: usize>(x: Tensor<B, D>) -> CubeTensor<R>
where
    B: Backend<FloatTensorPrimitive = CubeTensor<R>>,
    R: CubeRuntime,
{
    contiguous_as(primitive(x), DType::F32)
}

/// A buffer in this type, contiguous. burn's own cast pads the rows of a GPU's tensor to where the next one
/// loads best, and kernels that take one row to lie behind the other read what is between them: so what is
/// cast is one long row.
pub fn contiguous_as<R: CubeRuntime>(x: CubeTensor<R>, dtype: DType) -> CubeTensor<R> {
    let x = into_contiguous(x);
    if x.dtype == dtype {
        return x;
    }
    let (shape, count) = (x.meta.shape().clone(), len(&x));
    let row = CubeTensor::new_contiguous(x.client, x.device, [count].into(), x.handle, x.dtype);
    let row = cast(row, dtype);
    CubeTensor::new_contiguous(row.client, row.device, shape, row.handle, dtype)
}

/// A matrix as float32 whose rows lie whole, however far apart.
pub fn rows<B, R>(x: Tensor<B, 2>) -> CubeTensor<R>
where
    B: Backend<FloatTensorPrimitive = CubeTensor<R>>,
    R: CubeRuntime,
{
    let x = strided_floats(x);
    let strides = x.meta.strides();
    if strides[1] == 1 && strides[0] >= width(&x) { x } else { into_contiguous(x) }
}

/// A burn tensor as float32, however it lies.
pub fn strided_floats<B, R, const D: usize>(x: Tensor<B, D>) -> CubeTensor<R>
where
    B: Backend<FloatTensorPrimitive = CubeTensor<R>>,
    R: CubeRuntime,
{
    primitive(if x.dtype() == DType::F32 { x } else { x.cast(DType::F32) })
}

/// Room for a tensor on the device of another.
pub fn empty<R: CubeRuntime>(like: &CubeTensor<R>, shape: Shape, dtype: DType) -> CubeTensor<R> {
    let room = empty_device_contiguous_dtype(like.client.clone(), like.device.clone(), shape, dtype);
    watermark::look(&like.client);
    room
}

/// Room for float32 of the shape of another tensor.
pub fn empty_like<R: CubeRuntime>(like: &CubeTensor<R>) -> CubeTensor<R> {
    empty(like, like.meta.shape().clone(), DType::F32)
}

/// The elements of a tensor of one axis from `start` on, as a matrix: where they lie, if that is an address
/// from which whole vectors can be loaded, and else a copy. (burn's own slices want addresses of 512 bytes: a
/// copy for almost every parameter.)
pub fn view<R: CubeRuntime>(flat: CubeTensor<R>, start: usize, [rows, cols]: [usize; 2]) -> CubeTensor<R> {
    let (size, all, count) = (flat.dtype.size(), len(&flat), rows * cols);
    if !(start * size).is_multiple_of(VECTOR) || !flat.is_contiguous() {
        let copy = into_contiguous(slice(flat, &[start..start + count]));
        return CubeTensor::new_contiguous(
            copy.client,
            copy.device,
            [rows, cols].into(),
            copy.handle,
            copy.dtype,
        );
    }
    let behind = (all - start - count) * size;
    let handle = flat.handle.offset_start((start * size) as u64).offset_end(behind as u64);
    CubeTensor::new_contiguous(flat.client, flat.device, [rows, cols].into(), handle, flat.dtype)
}

/// All of a tensor's memory from its first element on, as one axis: for a kernel that goes by strides, none
/// of which is negative.
pub fn elements<R: CubeRuntime>(x: CubeTensor<R>) -> CubeTensor<R> {
    let count = x.handle.size_in_used() as usize / x.dtype.size();
    CubeTensor::new_contiguous(x.client, x.device, [count].into(), x.handle, x.dtype)
}

/// Rows or columns of a matrix, where they lie if that is an address from which whole vectors can be loaded,
/// and else a copy.
pub fn narrowed<R: CubeRuntime>(x: CubeTensor<R>, axis: usize, [start, count]: [usize; 2]) -> CubeTensor<R> {
    let (mut shape, strides) = (x.meta.shape().clone(), x.meta.strides().clone());
    let mut ranges: Vec<_> = shape.iter().map(|&size| 0..size).collect();
    ranges[axis] = start..start + count;
    let from = start * strides[axis] * x.dtype.size();
    if !from.is_multiple_of(VECTOR) {
        return slice(x, &ranges);
    }
    let behind = (shape[axis] - start - count) * strides[axis] * x.dtype.size();
    shape[axis] = count;
    let handle = x.handle.offset_start(from as u64).offset_end(behind as u64);
    CubeTensor::new(x.client, handle, Metadata::new(shape, strides), x.device, x.dtype)
}

/// Elements of a tensor.
pub fn len<R: CubeRuntime>(x: &CubeTensor<R>) -> usize {
    x.meta.num_elements()
}

/// Elements of a tensor's last axis.
pub fn width<R: CubeRuntime>(x: &CubeTensor<R>) -> usize {
    x.meta.shape().last().copied().unwrap_or(1)
}

/// Elements of a vector in rows of this width.
pub fn vector(width: usize) -> usize {
    let widest = VECTOR / size_of::<f32>();
    if width.is_multiple_of(widest) { widest } else { 1 }
}

/// One cube for each of `rows` rows of `vectors` vectors, of whole planes of the device that `like` is on.
pub fn by_row<R: CubeRuntime>(like: &CubeTensor<R>, rows: usize, vectors: usize) -> (CubeCount, CubeDim) {
    let plane = like.client.properties().hardware.plane_size_max;
    let units = (vectors as u32).next_power_of_two().clamp(plane, ROW_UNITS.max(plane));
    (CubeCount::Static(rows as u32, 1, 1), CubeDim::new_1d(units))
}

/// One unit for each of `count` elements or vectors.
pub fn by_element(count: usize) -> (CubeCount, CubeDim) {
    let cubes = count.div_ceil(UNITS).max(1);
    // A grid's first axis takes 2^31 cubes: more elements than a tensor has.
    (CubeCount::Static(cubes as u32, 1, 1), CubeDim::new_1d(UNITS as u32))
}

/// Planes that a cube may have: those of [`ROW_UNITS`] where planes are smallest, 8 units.
const PLANES: usize = 32;

/// The sum of `value` over all units of a cube, on each of them, in an order that depends on nothing but the
/// cube's size.
#[cube]
pub fn cube_sum(value: f32) -> f32 {
    let mut parts = SharedMemory::<f32>::new(PLANES);
    let part = plane_sum(value);
    if UNIT_POS_PLANE == 0 {
        parts[(UNIT_POS / PLANE_DIM) as usize] = part;
    }
    sync_cube();
    let mut sum = f32::new(0.0);
    for plane in 0..CUBE_DIM / PLANE_DIM {
        sum += parts[plane as usize];
    }
    sum
}

/// The largest `value` of all units of a cube, on each of them.
#[cube]
pub fn cube_max(value: f32) -> f32 {
    let mut parts = SharedMemory::<f32>::new(PLANES);
    let part = plane_max(value);
    if UNIT_POS_PLANE == 0 {
        parts[(UNIT_POS / PLANE_DIM) as usize] = part;
    }
    sync_cube();
    let mut largest = parts[0];
    for plane in 0..CUBE_DIM / PLANE_DIM {
        largest = max(largest, parts[plane as usize]);
    }
    largest
}

/// The sum of a vector's elements.
#[cube]
pub fn lanes<N: Size>(vector: Vector<f32, N>) -> f32 {
    let mut sum = f32::new(0.0);
    #[unroll]
    for lane in 0..N::value() {
        sum += vector[lane];
    }
    sum
}
