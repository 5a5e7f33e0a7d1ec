//! A fused operation, as it is told to a ledger: what it reads, what it makes, what it needs meanwhile.

use burn::tensor::{DType, Shape, Tensor, TensorPrimitive};
use burn_ir::{CustomOpIr, OperationIr, TensorIr};
use burn_router::{RouterTensor, RunnerClient};

use super::{
    ledger::bytes_of,
    router::{Client, Sizes},
};
use crate::kernels::Weight;

pub(super) type Raw = RouterTensor<Client>;

pub(super) fn raw<const D: usize>(x: Tensor<Sizes, D>) -> Raw {
    x.into_primitive().tensor()
}

fn cooked<const D: usize>(x: Raw) -> Tensor<Sizes, D> {
    Tensor::from_primitive(TensorPrimitive::Float(x))
}

/// The tensor that a weight is, if it is one.
pub(super) fn held(weight: Weight<Sizes>) -> Option<Raw> {
    match weight {
        Weight::Dense(w_oi) => Some(raw(w_oi)),
        Weight::Quantized(_) | Weight::Packed(_) => None,
    }
}

/// A fused operation: what it reads, what it makes, what it needs meanwhile.
pub(super) struct Fusion {
    client: Client,
    inputs: Vec<Raw>,
    outputs: Vec<(Shape, DType)>,
}

impl Fusion {
    pub fn new<const N: usize>(inputs: [Raw; N]) -> Self {
        Self { client: inputs[0].client.clone(), inputs: inputs.into(), outputs: Vec::new() }
    }

    pub fn and(mut self, more: impl IntoIterator<Item = Raw>) -> Self {
        self.inputs.extend(more);
        self
    }

    pub fn makes<const D: usize>(self, shape: [usize; D]) -> Self {
        self.makes_in(shape, DType::F32)
    }

    pub fn makes_in<const D: usize>(mut self, shape: [usize; D], dtype: DType) -> Self {
        self.outputs.push((Shape::from(shape), dtype));
        self
    }

    pub fn computes(self, flops: u64) -> Self {
        self.client.ledger().flops += flops;
        self
    }

    pub fn needs(self, bytes: u64) -> Self {
        let mut ledger = self.client.ledger();
        ledger.scratch = ledger.scratch.max(bytes);
        drop(ledger);
        self
    }

    /// `values` more floats while it runs, besides its outputs.
    pub fn beside(self, values: usize) -> Self {
        let outputs: u64 = self.outputs.iter().map(|(shape, dtype)| bytes_of(shape, *dtype)).sum();
        self.client.ledger().transient(4 * values as u64 + outputs);
        self
    }

    pub fn named(self, id: &'static str) -> std::vec::IntoIter<Raw> {
        let Self { client, inputs, outputs } = self;
        let inputs: Vec<_> = inputs.into_iter().map(RouterTensor::into_ir).collect();
        let outputs: Vec<_> = outputs
            .into_iter()
            .map(|(shape, dtype)| TensorIr::uninit(client.create_empty_handle(), shape, dtype))
            .collect();
        let made = client.register(OperationIr::Custom(CustomOpIr::new(id, &inputs, &outputs)));
        made.into_iter()
    }

    pub fn run(self) -> std::vec::IntoIter<Raw> {
        self.named("fused")
    }

    pub fn one<const D: usize>(self) -> Tensor<Sizes, D> {
        next(&mut self.run())
    }
}

pub(super) fn next<const D: usize>(made: &mut std::vec::IntoIter<Raw>) -> Tensor<Sizes, D> {
    cooked(made.next().expect("as many as it makes"))
}
