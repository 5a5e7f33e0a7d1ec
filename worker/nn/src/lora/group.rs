//! Linear layers that read one input: each by itself, or all of them as one product, where a backend is
//! better off so ([`ModelBackend::joins`]) and their weights came to lie together.

use burn::tensor::{DType, Tensor};

use super::{LoraLinear, forward_all};
use crate::{
    kernels::{JoinedLayers, ModelBackend, Tape, Weight},
    params::{Keep, ParamScope},
};

/// Frozen weights of some layers, one below the other: what the layers' own are parts of.
pub struct JoinedWeights<B: ModelBackend> {
    /// `[o, i]`: the outputs of all.
    pub w_oi: Weight<B>,
    /// Biases, `[o]`.
    pub bias_o: Option<Tensor<B, 1>>,
}

/// Layers of one input.
pub struct LinearGroup<B: ModelBackend, const N: usize> {
    layers: [LoraLinear<B>; N],
    joined: Option<JoinedWeights<B>>,
}

/// What they give.
pub enum GroupOutputs<T: Tape, const N: usize> {
    /// Each by itself, `[n, o]`.
    Apart([Tensor<T, 2>; N]),
    /// Side by side.
    Joined(Tensor<T, 2>),
}

impl<B: ModelBackend, const N: usize> LinearGroup<B, N> {
    /// These layers, whose weights are parts of `joined`, if they are. Then nothing of them trains but
    /// updates: of one rank, without dropout or magnitudes, in all of them or in none.
    pub fn new(layers: [LoraLinear<B>; N], joined: Option<JoinedWeights<B>>) -> Self {
        Self { layers, joined }
    }

    /// Each by itself.
    pub fn each(&self) -> &[LoraLinear<B>; N] {
        &self.layers
    }

    /// Whether anything of them trains.
    pub fn trains(&self) -> bool {
        self.layers.iter().any(LoraLinear::trains)
    }

    /// The type that all of them read their input in, on a backend that rounds at all.
    pub fn rounds_input(&self) -> Option<DType> {
        if let Some(joined) = &self.joined {
            return joined.w_oi.dtype().filter(|dtype| *dtype != DType::F32);
        }
        let [first, rest @ ..] = self.layers.as_slice() else { return None };
        first.rounds_input().filter(|dtype| rest.iter().all(|layer| layer.rounds_input() == Some(*dtype)))
    }

    /// The layers of `x [n, in]`, within a block that layer recompute runs; each [`Keep`] says what becomes
    /// of an output there. `rounded`: whether joined outputs are of half precision where the weights are
    /// bfloat16. (float16 would not hold all of them.)
    pub fn forward<T: Tape<Base = B>>(
        &self,
        params: &ParamScope<'_, T>,
        keeps: [Keep; N],
        x_ni: Tensor<T, 2>,
        rounded: bool,
    ) -> GroupOutputs<T, N> {
        let Some(JoinedWeights { w_oi, bias_o }) = &self.joined else {
            let mut keeps = keeps.into_iter();
            let layers = self.layers.each_ref().map(|layer| (layer, keeps.next().unwrap_or(Keep::Never)));
            return GroupOutputs::Apart(forward_all(params, layers, x_ni));
        };
        let adapters = self.layers.iter().filter_map(LoraLinear::adapter);
        let layers = JoinedLayers {
            w_oi: w_oi.lifted(),
            bias_o: bias_o.clone().map(T::lift),
            updates: adapters.map(|adapter| adapter.update(params)).collect(),
            outputs: self.layers.iter().map(LoraLinear::outputs).collect(),
            rounded: rounded && w_oi.dtype() == Some(DType::BF16),
        };
        GroupOutputs::Joined(params.noted_joined(x_ni, &keeps, layers))
    }
}
