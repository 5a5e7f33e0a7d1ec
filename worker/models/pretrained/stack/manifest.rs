//! What a block is made of, and how it is put together.
//!
//! The blocks of a tower are norms and linears. A [`Manifest`] names them, so that their weights can be read,
//! checked, or merely found before there is a block; a block is then assembled from what was read, in the
//! manifest's order.

use std::ops::Range;

use super::super::{
    error::ModelError,
    loader::{LinearShape, Loader},
};
use coxswain_nn::{
    block::Block,
    kernels::ModelBackend,
    lora::{JoinedWeights, LinearGroup, LoraLinear},
    params::BaseWeight,
};

/// The tensors of one block.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Manifest {
    /// Gains and biases of norms, by their full names, and their lengths.
    pub norms: Vec<(String, usize)>,
    /// Linears, in the order in which their adapters are registered.
    pub linears: Vec<LinearShape>,
    /// Linears with the same input, one range after the other.
    pub groups: Vec<Range<usize>>,
}

/// What a manifest names, on a device.
pub struct Parts<B: ModelBackend> {
    /// Gains and biases of norms.
    pub norms: Norms<B>,
    /// Linears.
    pub linears: Linears<B>,
}

/// Gains and biases in their manifest's order.
pub struct Norms<B: ModelBackend>(std::vec::IntoIter<BaseWeight<B, 1>>);

impl<B: ModelBackend> Norms<B> {
    /// The next one.
    pub fn take(&mut self) -> BaseWeight<B, 1> {
        self.0.next().expect("a block is assembled from the norms that its own manifest names")
    }
}

impl<B: ModelBackend> From<Vec<BaseWeight<B, 1>>> for Norms<B> {
    fn from(norms: Vec<BaseWeight<B, 1>>) -> Self {
        Self(norms.into_iter())
    }
}

/// Linears in their manifest's order.
pub struct Linears<B: ModelBackend> {
    linears: std::vec::IntoIter<LoraLinear<B>>,
    /// Weights of its groups, in their order, that lie together; none of layers that are brought one by one.
    joined: std::vec::IntoIter<Option<JoinedWeights<B>>>,
}

impl<B: ModelBackend> Linears<B> {
    /// The next one.
    pub fn take(&mut self) -> LoraLinear<B> {
        self.linears.next().expect("a block is assembled from the linears that its own manifest names")
    }

    /// The next group.
    pub fn take_group<const N: usize>(&mut self) -> LinearGroup<B, N> {
        LinearGroup::new(std::array::from_fn(|_| self.take()), self.joined.next().flatten())
    }
}

impl<B: ModelBackend> From<Vec<LoraLinear<B>>> for Linears<B> {
    fn from(linears: Vec<LoraLinear<B>>) -> Self {
        Self { linears: linears.into_iter(), joined: Vec::new().into_iter() }
    }
}

impl Manifest {
    /// Reads everything it names and registers what trains of it.
    pub(super) fn load<B: ModelBackend>(&self, loader: &mut Loader<'_, B>) -> Result<Parts<B>, ModelError> {
        let norms = self.norms.iter().map(|(name, len)| loader.gain(name, *len));
        let norms = norms.collect::<Result<Vec<_>, _>>()?.into();
        let (mut linears, mut joined) = (Vec::new(), Vec::new());
        let mut at = 0;
        while let Some(shape) = self.linears.get(at) {
            match self.groups.iter().find(|group| group.start == at) {
                Some(group) => {
                    let (layers, weights) = loader.group(&self.linears[group.clone()])?;
                    linears.extend(layers);
                    joined.push(weights);
                    at = group.end;
                }
                None => {
                    linears.push(loader.linear(&shape.module, shape.features, shape.bias)?);
                    at += 1;
                }
            }
        }
        let linears = Linears { linears: linears.into_iter(), joined: joined.into_iter() };
        Ok(Parts { norms, linears })
    }
}

/// A block that is put together from what its manifest names.
pub trait Assemble<B: ModelBackend>: Block<B> + Sized {
    /// Sizes of all blocks of its tower.
    type Sizes: Clone;

    /// What block `index` is made of.
    fn manifest(sizes: &Self::Sizes, index: usize) -> Manifest;

    /// Block `index`, from what its manifest names.
    fn assemble(sizes: &Self::Sizes, index: usize, parts: Parts<B>) -> Self;
}
