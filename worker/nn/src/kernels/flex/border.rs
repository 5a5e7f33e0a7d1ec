//! The border to burn: slices out of tensors, and tensors of new values.
//!
//! Tensors that are already contiguous (nearly all) are read in place; attention reads strided ones in place,
//! too.

use std::sync::Arc;

use burn::{
    backend::Flex,
    tensor::{DType, Element, Tensor, TensorData, TensorPrimitive},
};
use burn_flex::FlexTensor;
use half::bf16;

use super::{attention, linear};
use crate::kernels::{AttentionMask, Weight, WeightOps, quantized::QuantizedMatrix};

/// Whether these values are computed on here.
pub fn is_f32<const D: usize>(x: &Tensor<Flex, D>) -> bool {
    x.dtype() == DType::F32
}

/// Whether a linear layer of these types is computed here.
pub fn has_weight_path(x: &Tensor<Flex, 2>, w: &Weight<Flex>) -> bool {
    is_f32(x) && matches!(w.dtype(), None | Some(DType::F32 | DType::BF16))
}

/// What a tensor consists of.
pub fn primitive<const D: usize>(x: Tensor<Flex, D>) -> FlexTensor {
    x.into_primitive().tensor()
}

/// A tensor of new values.
pub fn tensor<E: Element, const D: usize>(values: Vec<E>, shape: [usize; D]) -> Tensor<Flex, D> {
    let primitive = FlexTensor::from_data(TensorData::new(values, shape));
    Tensor::from_primitive(TensorPrimitive::Float(primitive))
}

/// An f32 tensor after `change`: where it lies if it has no other owner, else in a copy.
pub fn changed<const D: usize>(x: Tensor<Flex, D>, change: impl FnOnce(&mut [f32])) -> Tensor<Flex, D> {
    let Values(mut x) = Values::from_tensor(x);
    let (start, end) = x.layout().contiguous_offsets().expect("the constructor made it contiguous");
    change(&mut x.storage_mut::<f32>()[start..end]);
    Tensor::from_primitive(TensorPrimitive::Float(x))
}

/// The values of a tensor as contiguous f32: in place where they are so already.
pub struct Values(FlexTensor);

impl Values {
    /// Converted and copied where it has to be.
    pub fn from_tensor<const D: usize>(x: Tensor<Flex, D>) -> Self {
        let x = if is_f32(&x) { x } else { x.cast(DType::F32) };
        let x = primitive(x);
        Self(if x.layout().contiguous_offsets().is_some() { x } else { x.to_contiguous() })
    }

    /// The values, row-major.
    pub fn get(&self) -> &[f32] {
        self.0.as_slice().expect("the constructor made it contiguous f32")
    }

    /// As a matrix.
    pub fn dense(&self, shape: [usize; 2]) -> linear::DenseView<'_> {
        linear::DenseView { data: self.get(), shape }
    }
}

/// The values of a weight.
pub enum WeightValues {
    /// Single precision.
    F32(Values),
    /// Half precision.
    Bf16(FlexTensor),
    /// Few bits.
    Quantized(Arc<QuantizedMatrix>),
}

impl WeightValues {
    /// Copied where it has to be, never converted.
    pub fn from_weight(w: Weight<Flex>) -> Self {
        let w = match w {
            Weight::Quantized(matrix) => return Self::Quantized(matrix),
            Weight::Dense(w) if is_f32(&w) => return Self::F32(Values::from_tensor(w)),
            Weight::Dense(w) => primitive(w),
            Weight::Packed(parts) => primitive(Flex::unpacked(&parts)),
        };
        Self::Bf16(if w.layout().contiguous_offsets().is_some() { w } else { w.to_contiguous() })
    }

    /// As a layer takes it.
    pub fn get(&self) -> linear::WeightView<'_> {
        match self {
            Self::F32(values) => linear::WeightView::F32(values.get()),
            Self::Bf16(w) => linear::WeightView::Bf16(
                w.as_slice::<bf16>().expect("the constructor made it contiguous bf16"),
            ),
            Self::Quantized(matrix) => linear::WeightView::Quantized(matrix),
        }
    }
}

/// A `[b, s, h, k]` tensor whose last axis is contiguous.
pub struct BshkView {
    tensor: FlexTensor,
    /// `[b, s, h, k]`.
    pub shape: [usize; 4],
}

impl BshkView {
    /// Converted and copied where it has to be.
    pub fn from_tensor(x: Tensor<Flex, 4>) -> Self {
        let shape = x.dims();
        let x = primitive(if is_f32(&x) { x } else { x.cast(DType::F32) });
        let in_place = x.layout().strides()[3] == 1 && x.layout().strides().iter().all(|&stride| stride >= 0);
        Self { tensor: if in_place { x } else { x.to_contiguous() }, shape }
    }

    /// As attention reads it.
    pub fn heads(&self) -> attention::Heads<'_> {
        let layout = self.tensor.layout();
        let strides = layout.strides();
        attention::Heads {
            data: &self.tensor.storage::<f32>()[layout.start_offset()..],
            shape: self.shape,
            strides: std::array::from_fn(|axis| strides[axis].unsigned_abs()),
        }
    }
}

/// What attention works on, once shapes agree.
pub fn attention_inputs<'a>(
    [q, k, v]: [&'a BshkView; 3],
    mask: &'a AttentionMask,
    scale: f64,
) -> attention::Inputs<'a> {
    let ([batch, _, heads, dim], [_, keys, kv_heads, _]) = (q.shape, k.shape);
    assert_eq!(k.shape, [batch, keys, kv_heads, dim], "attention: q and k differ in batch or head dimension");
    assert_eq!(v.shape, k.shape, "attention: k and v have one shape");
    assert!(
        kv_heads > 0 && heads.is_multiple_of(kv_heads),
        "attention: query heads are a multiple of key heads"
    );
    if let AttentionMask::Keys(ranges) | AttentionMask::Causal(ranges) = mask {
        assert_eq!(ranges.len(), batch, "attention: one range of keys per batch row");
    }
    attention::Inputs { q: q.heads(), k: k.heads(), v: v.heads(), mask, scale: scale as f32 }
}
