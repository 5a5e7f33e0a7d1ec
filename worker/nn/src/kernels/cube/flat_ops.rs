//! The flat parameter buffer on an accelerator.

use std::ops::Range;

use burn::tensor::{DType, Int, Tensor, TensorData};
use burn_cubecl::{BoolElement, CubeBackend, CubeRuntime, FloatElement, IntElement, kernel::into_contiguous};

use super::{
    flat,
    launch::{self, floats, primitive, wrapped},
};
use crate::kernels::{
    FlatOps,
    flat::{
        Gradient, OnDevice, RowGradients, Run,
        tensors::{Origins, Updates},
    },
};

impl<R, F, I, BT> FlatOps for CubeBackend<R, F, I, BT>
where
    R: CubeRuntime,
    F: FloatElement,
    I: IntElement,
    BT: BoolElement,
{
    type Flat = OnDevice<Self>;

    fn matrix_view(flat: Tensor<Self, 1>, start: usize, shape: [usize; 2]) -> Tensor<Self, 2> {
        wrapped(launch::view(primitive(flat), start, shape))
    }

    fn flat_accumulate(flat: Tensor<Self, 1>, gradients: Vec<Gradient<Self>>) -> Tensor<Self, 1> {
        let addends = gradients.into_iter().filter(|gradient| !gradient.range.is_empty());
        let addends = addends.map(|Gradient { range, first, values }| flat::Addend {
            start: range.start,
            first,
            values: launch::rows(values),
        });
        wrapped(flat::accumulate(primitive(flat), addends.collect()))
    }

    fn flat_add_rows(flat: Tensor<Self, 1>, gradients: RowGradients<'_, Self>) -> Tensor<Self, 1> {
        let RowGradients { range, lookups, values_nd, .. } = gradients;
        if lookups.rows().is_empty() {
            return flat;
        }
        let device = flat.device();
        let indices = [lookups.rows(), lookups.starts(), lookups.places()].map(|indices| {
            let (indices, len) = (indices.iter().map(|&index| index as i32), indices.len());
            let data = TensorData::new(indices.collect::<Vec<_>>(), [len]);
            into_contiguous(Tensor::<Self, 1, Int>::from_data(data, (&device, DType::I32)).into_primitive())
        });
        wrapped(flat::add_rows(primitive(flat), range.start, floats(values_nd), indices))
    }

    fn flat_squares(flat: &Tensor<Self, 1>, range: &Range<usize>) -> Vec<Tensor<Self, 1>> {
        let sums = (!range.is_empty()).then(|| wrapped(flat::squares(floats(flat.clone()), range)));
        sums.into_iter().collect()
    }

    fn flat_widen(flat: Tensor<Self, 1>, halves: &Tensor<Self, 1>, range: &Range<usize>) -> Tensor<Self, 1> {
        wrapped(flat::widen(primitive(flat), primitive(halves.clone()), range))
    }

    fn flat_adamw(
        state: Updates<Self>,
        grads: &Tensor<Self, 1>,
        from: Origins,
        runs: &[Run],
    ) -> Updates<Self> {
        flat::adamw(state, grads, from, runs)
    }
}
