//! Attention of T5: no scaling of scores, a bias by relative position, and heads that together need not be as
//! wide as the stream.
//!
//! Scores of a layer are held as `[b, heads, queries, keys]`, for as long as its half of a block runs.

use burn::tensor::Tensor;
use coxswain_nn::{
    kernels::{ModelBackend, Tape},
    lora::LoraLinear,
};

use super::config::T5Config;
use crate::pretrained::{error::ModelError, loader::Loader};

/// Queries, keys, values and output of one attention.
pub struct Attention<B: ModelBackend> {
    /// To queries.
    pub q: LoraLinear<B>,
    /// To keys.
    pub k: LoraLinear<B>,
    /// To values.
    pub v: LoraLinear<B>,
    /// From heads.
    pub o: LoraLinear<B>,
    heads: usize,
    width: usize,
}

impl<B: ModelBackend> Attention<B> {
    /// Loads `{at}.q` to `{at}.o`.
    pub fn load(loader: &mut Loader<'_, B>, config: &T5Config, at: &str) -> Result<Self, ModelError> {
        let (d, inner) = (config.d_model, config.inner());
        let mut linear = |name: &str, shape| loader.linear(&format!("{at}.{name}"), shape, false);
        Ok(Self {
            q: linear("q", [d, inner])?,
            k: linear("k", [d, inner])?,
            v: linear("v", [d, inner])?,
            o: linear("o", [inner, d])?,
            heads: config.heads,
            width: config.d_kv,
        })
    }

    /// Whether anything of it trains.
    pub fn trains(&self) -> bool {
        [&self.q, &self.k, &self.v, &self.o].into_iter().any(LoraLinear::trains)
    }

    /// What the heads of `batch` rows see: queries, keys and values `[n, heads * width]`; returns `[n,
    /// heads * width]` of the queries. Each of `added` is added to the scores, `[b or 1, heads or 1, queries
    /// or 1, keys]`.
    pub fn attend<T: Tape<Base = B>>(
        &self,
        batch: usize,
        inputs_nd: [Tensor<T, 2>; 3],
        added: [Option<Tensor<T, 4>>; 2],
    ) -> Tensor<T, 2> {
        let (heads, width) = (self.heads, self.width);
        let n = inputs_nd[0].dims()[0];
        let inputs_bshk = inputs_nd.map(|x_nd| {
            let len = x_nd.dims()[0] / batch.max(1);
            x_nd.reshape([batch, len, heads, width])
        });
        let added: Vec<_> = added.into_iter().flatten().collect();
        T::biased_attention(inputs_bshk, &added).reshape([n, heads * width])
    }
}
