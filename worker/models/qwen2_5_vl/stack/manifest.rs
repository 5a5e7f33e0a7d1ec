//! What a block is made of, and how it is put together.
//!
//! The blocks of both towers are two norms and some linears. A [`Manifest`] names them, so that their weights
//! can be read, checked, or merely found before there is a block; a block is then assembled from what was
//! read, in the manifest's order.

use super::super::{error::ModelError, loader::Loader};
use coxswain_nn::{block::Block, kernels::ModelBackend, lora::LoraLinear, params::BaseWeight};

/// The tensors of one block.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Manifest {
    /// Gains before attention and before the MLP, by their full names.
    pub norms: [String; 2],
    /// Their length.
    pub width: usize,
    /// Linears, in the order in which their adapters are registered.
    pub linears: Vec<LinearShape>,
}

/// A frozen linear layer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LinearShape {
    /// Path of the module; its tensors are `module.weight` and `module.bias`.
    pub module: String,
    /// Input and output features.
    pub features: [usize; 2],
    /// Whether it has a bias.
    pub bias: bool,
}

impl LinearShape {
    /// `at.name`, a linear of `features`.
    pub fn new(at: &str, name: &str, features: [usize; 2], bias: bool) -> Self {
        Self { module: format!("{at}.{name}"), features, bias }
    }

    /// Gate, up and down of the gated MLP at `at`.
    pub fn gated_mlp(at: &str, [width, inner]: [usize; 2], bias: bool) -> [Self; 3] {
        [
            Self::new(at, "mlp.gate_proj", [width, inner], bias),
            Self::new(at, "mlp.up_proj", [width, inner], bias),
            Self::new(at, "mlp.down_proj", [inner, width], bias),
        ]
    }
}

/// What a manifest names, on a device.
pub struct Parts<B: ModelBackend> {
    /// Gains before attention and before the MLP.
    pub norms: [BaseWeight<B, 1>; 2],
    /// Linears.
    pub linears: Linears<B>,
}

/// Linears in their manifest's order.
pub struct Linears<B: ModelBackend>(std::vec::IntoIter<LoraLinear<B>>);

impl<B: ModelBackend> Linears<B> {
    /// The next one.
    pub fn take(&mut self) -> LoraLinear<B> {
        self.0.next().expect("a block is assembled from the linears that its own manifest names")
    }
}

impl<B: ModelBackend> From<Vec<LoraLinear<B>>> for Linears<B> {
    fn from(linears: Vec<LoraLinear<B>>) -> Self {
        Self(linears.into_iter())
    }
}

impl Manifest {
    /// Reads everything it names and registers what trains of it.
    pub(super) fn load<B: ModelBackend>(&self, loader: &mut Loader<'_, B>) -> Result<Parts<B>, ModelError> {
        let [attention, mlp] = &self.norms;
        let norms = [loader.gain(attention, self.width)?, loader.gain(mlp, self.width)?];
        let linear = |shape: &LinearShape| loader.linear(&shape.module, shape.features, shape.bias);
        let linears = self.linears.iter().map(linear).collect::<Result<Vec<_>, _>>()?;
        Ok(Parts { norms, linears: linears.into() })
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
