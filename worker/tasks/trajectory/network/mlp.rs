//! Linear layers with GELU (arXiv 1606.08415, by its tanh approximation) between them.

use burn::tensor::Tensor;
use coxswain_nn::{
    dense::{Dense, DenseShape},
    kernels::Tape,
    params::ParamScope,
    recompute::segment::Segment,
};

use super::registrar::NetworkRegistrar;

/// `network.{half}.0`, `.1`, ..
#[derive(Clone, Debug)]
pub struct MlpHalf(Vec<Dense>);

impl MlpHalf {
    /// Registers a layer between each two of these widths.
    pub(super) fn register(registrar: &mut NetworkRegistrar<'_>, half: &str, widths: &[usize]) -> Self {
        let layers = widths.windows(2).enumerate();
        let layers = layers.map(|(number, pair)| {
            registrar.dense(&format!("{half}.{number}"), DenseShape::xavier(pair[0], pair[1]))
        });
        Self(layers.collect())
    }

    /// Whether anything of it trains.
    pub fn trains(&self) -> bool {
        self.0.iter().any(Dense::trains)
    }
}

impl<B: Tape<Base = B>> Segment<B> for MlpHalf {
    fn run<T: Tape<Base = B>>(&self, params: &ParamScope<'_, T>, inputs: &[Tensor<T, 2>]) -> Tensor<T, 2> {
        let mut layers = self.0.iter();
        let first = layers.next().map(|layer| layer.apply(params, inputs[0].clone()));
        let x_nd = first.expect("a half has at least one layer");
        layers.fold(x_nd, |x_nd, layer| layer.apply(params, T::gelu_tanh(x_nd)))
    }
}
