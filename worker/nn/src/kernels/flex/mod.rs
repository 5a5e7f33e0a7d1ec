//! The fused operations on the CPU backend, in f32.
//!
//! The files that are named after a part of [`ModelBackend`] take slices out of tensors ([`border`]), check
//! that shapes agree, and wrap results. Anything that is not f32 goes to the
//! [`reference`](super::reference), except a bf16 weight of a linear layer.
//!
//! The result of an operation depends on its inputs alone, bit for bit: not on the number of threads, nor on
//! their order. What a forward pass makes of a token depends on that token and those it attends to alone: not
//! on who else is in the batch, nor on how far a row is padded on the left. The cache of features rests on it
//! (`model::policy::features`).

mod attention;
mod attention_ops;
mod bfloat16_product;
mod border;
mod cross_entropy;
mod linear;
mod linear_ops;
mod matrix;
mod norm;
mod parallel;
mod pointwise;
mod rounding;
mod row_ops;
mod rows;
mod scratch;
mod simd;
mod softmax;
mod spans;

use burn::{
    backend::Flex,
    tensor::{Shape, Tensor, TensorPrimitive},
};
use burn_flex::Layout;

use self::border::primitive;
pub use self::{
    bfloat16_product::{is_available as has_bfloat16_products, scratch as bfloat16_scratch},
    linear::{DROPOUT_BLOCK, FEW as FEW_TOKENS, PANEL as PANEL_COLUMNS},
    simd::vectorised,
    spans::QUERY_BLOCK,
};
use super::{FlatOps, ModelBackend};

impl FlatOps for Flex {
    type Flat = Vec<f32>;

    /// burn's own `reshape` copies whatever does not start at its buffer's first element.
    fn matrix_view(flat: Tensor<Self, 1>, start: usize, [rows, cols]: [usize; 2]) -> Tensor<Self, 2> {
        let flat = primitive(flat.narrow(0, start, rows * cols));
        let layout =
            Layout::new(Shape::new([rows, cols]), vec![cols as isize, 1], flat.layout().start_offset());
        Tensor::from_primitive(TensorPrimitive::Float(flat.with_layout(layout)))
    }
}

impl ModelBackend for Flex {
    const ON_HOST: bool = true;
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::{LinearOps, RowOps};

    #[test]
    fn a_shape_of_no_elements_passes_through() {
        let device = Default::default();
        let x = Tensor::<Flex, 2>::zeros([0, 8], &device);
        assert_eq!(<Flex as RowOps>::layer_norm(x.clone(), 1e-5).dims(), [0, 8]);
        assert_eq!(<Flex as LinearOps>::linear(x, Tensor::zeros([3, 8], &device), None).dims(), [0, 3]);
    }
}
