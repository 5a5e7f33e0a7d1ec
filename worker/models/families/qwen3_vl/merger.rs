//! Layer norms, and the mergers: squares of patches to tokens of the language model's width.

use burn::tensor::Tensor;
use coxswain_nn::{
    kernels::{ModelBackend, Tape},
    lora::LoraLinear,
    params::{BaseWeight, ParamScope},
};

use super::config::DeepStackConfig;
use crate::pretrained::{error::ModelError, loader::Loader, stack::Norms};

/// Epsilon of every norm of the tower; not configurable in Transformers either.
const NORM_EPS: f64 = 1e-6;

/// `(x - mean) / deviation * gain + bias`.
pub struct LayerNorm<B: ModelBackend> {
    gain_d: BaseWeight<B, 1>,
    bias_d: BaseWeight<B, 1>,
}

impl<B: ModelBackend> LayerNorm<B> {
    /// The full names of its tensors and their lengths.
    pub fn tensors(at: &str, width: usize) -> [(String, usize); 2] {
        ["weight", "bias"].map(|tensor| (format!("{at}.{tensor}"), width))
    }

    /// Takes gain and bias, the next two.
    pub fn assemble(norms: &mut Norms<B>) -> Self {
        Self { gain_d: norms.take(), bias_d: norms.take() }
    }

    fn load(loader: &mut Loader<'_, B>, at: &str, width: usize) -> Result<Self, ModelError> {
        let [gain, bias] = Self::tensors(at, width);
        Ok(Self { gain_d: loader.gain(&gain.0, gain.1)?, bias_d: loader.gain(&bias.0, bias.1)? })
    }

    /// Normalises rows, `[n, d]`.
    pub fn forward<T: Tape<Base = B>>(&self, params: &ParamScope<'_, T>, x_nd: Tensor<T, 2>) -> Tensor<T, 2> {
        let [gain_d, bias_d] = [&self.gain_d, &self.bias_d].map(|weight_d| weight_d.on_tape(params));
        let d = x_nd.dims()[1];
        // One batch row: a scale of one less than the gain.
        T::modulated_layer_norm(x_nd, gain_d.reshape([1, d]) - 1.0, bias_d.reshape([1, d]), NORM_EPS)
    }

    /// Whether anything of it trains.
    pub fn trains(&self) -> bool {
        self.gain_d.trains() || self.bias_d.trains()
    }
}

/// A merger.
pub struct Merger<B: ModelBackend> {
    norm: LayerNorm<B>,
    /// Whether patches are normed by themselves, or those of a token side by side.
    norms_patches: bool,
    fc1: LoraLinear<B>,
    fc2: LoraLinear<B>,
    merged: usize,
}

impl<B: ModelBackend> Merger<B> {
    /// Loads the one at `at`: the tower's own, which norms patches, or that of a stream, which norms tokens.
    pub fn load(
        loader: &mut Loader<'_, B>,
        config: &DeepStackConfig,
        at: &str,
        norms_patches: bool,
    ) -> Result<Self, ModelError> {
        let merged = config.merged_size();
        let normed = if norms_patches { config.hidden_size } else { merged };
        Ok(Self {
            norm: LayerNorm::load(loader, &format!("{at}.norm"), normed)?,
            norms_patches,
            fc1: loader.linear(&format!("{at}.linear_fc1"), [merged, merged], true)?,
            fc2: loader.linear(&format!("{at}.linear_fc2"), [merged, config.out_hidden_size], true)?,
            merged,
        })
    }

    /// Patches `[patches, d]`, those of a token next to each other, to tokens `[tokens, out]`.
    pub fn forward<T: Tape<Base = B>>(&self, params: &ParamScope<'_, T>, x_pd: Tensor<T, 2>) -> Tensor<T, 2> {
        let [patches, d] = x_pd.dims();
        let shape = [patches * d / self.merged, self.merged];
        let y_ni = match self.norms_patches {
            true => self.norm.forward(params, x_pd).reshape(shape),
            false => self.norm.forward(params, x_pd.reshape(shape)),
        };
        let y_ni = T::gelu_erf(self.fc1.forward(params, y_ni));
        self.fc2.forward(params, y_ni)
    }

    /// Whether anything of it trains.
    pub fn trains(&self) -> bool {
        self.norm.trains() || self.fc1.trains() || self.fc2.trains()
    }
}
