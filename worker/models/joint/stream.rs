//! A pre-norm decoder layer as what one stream of tokens goes through; attention, which may read several
//! streams, stands between its halves and is its caller's:
//!
//! ```text
//! y = rms_norm(x)     q = W_q y     k, v = W_k c, W_v c     c = y, or keys and values of another stream
//! x = x + W_o attention
//! x = x + W_down (silu(W_gate z) * W_up z)                   z = rms_norm(x)
//! ```
//!
//! Gemma's have another norm and another gate ([`LayerKind`]). A stream whose norms are its own, such as one
//! that is told the time by them, has the linears alone ([`StreamLinears`]).

use burn::tensor::Tensor;
use coxswain_nn::{
    kernels::{ModelBackend, Tape},
    lora::LoraLinear,
    params::{BaseWeight, ParamScope},
};

use crate::pretrained::{error::ModelError, loader::Loader};

/// Sizes of a layer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StreamShape {
    /// Values of its tokens.
    pub width: usize,
    /// Query heads.
    pub heads: usize,
    /// Key and value heads; divides `heads`.
    pub kv_heads: usize,
    /// Values of a head.
    pub head_dim: usize,
    /// Width of the MLP.
    pub inner: usize,
    /// Values that keys and values are made of: `width`, where they are its own tokens'.
    pub kv_inputs: usize,
    /// Added to the mean square in norms.
    pub eps: f64,
}

impl StreamShape {
    /// Values of a token's keys, or of its values.
    pub fn kv_width(&self) -> usize {
        self.kv_heads * self.head_dim
    }

    /// A layer's tensors at this path, with their shapes, in Transformers' order.
    pub fn tensors(&self, at: &str) -> Vec<(String, Vec<usize>)> {
        let (queries, kv) = (self.heads * self.head_dim, self.kv_width());
        let linears = [
            ("self_attn.q_proj", [queries, self.width]),
            ("self_attn.k_proj", [kv, self.kv_inputs]),
            ("self_attn.v_proj", [kv, self.kv_inputs]),
            ("self_attn.o_proj", [self.width, queries]),
            ("mlp.gate_proj", [self.inner, self.width]),
            ("mlp.up_proj", [self.inner, self.width]),
            ("mlp.down_proj", [self.width, self.inner]),
        ];
        let linears = linears.into_iter().map(|(name, shape)| (name, shape.to_vec()));
        let norms = ["input_layernorm", "post_attention_layernorm"].map(|name| (name, vec![self.width]));
        linears.chain(norms).map(|(name, shape)| (format!("{at}.{name}.weight"), shape)).collect()
    }
}

/// Where the weights of layers come from, frozen or trained.
pub trait LayerSource<B: ModelBackend> {
    /// `module.weight` `[out, in]`, and `module.bias` if asked for.
    fn linear(&mut self, module: &str, features: [usize; 2], bias: bool)
    -> Result<LoraLinear<B>, ModelError>;

    /// A gain, by its full name.
    fn gain(&mut self, name: &str, len: usize) -> Result<BaseWeight<B, 1>, ModelError>;
}

impl<B: ModelBackend> LayerSource<B> for Loader<'_, B> {
    fn linear(
        &mut self,
        module: &str,
        features: [usize; 2],
        bias: bool,
    ) -> Result<LoraLinear<B>, ModelError> {
        Loader::linear(self, module, features, bias)
    }

    fn gain(&mut self, name: &str, len: usize) -> Result<BaseWeight<B, 1>, ModelError> {
        Loader::gain(self, name, len)
    }
}

/// What layers of one make have in common beyond their sizes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LayerKind {
    /// `rms_norm(x) w`, and `silu(gate) * up` in the MLP.
    Llama,
    /// `rms_norm(x) (1 + w)`, and `gelu_tanh(gate) * up` (Gemma, arXiv 2403.08295).
    Gemma,
}

impl LayerKind {
    /// Tokens, normed with this gain.
    pub fn normed<T: Tape>(self, x_nd: Tensor<T, 2>, w_d: Tensor<T, 1>, eps: f64) -> Tensor<T, 2> {
        T::rms_norm(x_nd, if self == Self::Gemma { w_d + 1.0 } else { w_d }, eps)
    }

    fn gated<T: Tape>(self, gate_nf: Tensor<T, 2>, up_nf: Tensor<T, 2>) -> Tensor<T, 2> {
        match self {
            Self::Llama => T::swiglu(gate_nf, up_nf),
            Self::Gemma => T::gelu_tanh(gate_nf) * up_nf,
        }
    }
}

/// The linears of a layer: all of it but its norms.
pub struct StreamLinears<B: ModelBackend> {
    shape: StreamShape,
    kind: LayerKind,
    query: LoraLinear<B>,
    key: LoraLinear<B>,
    value: LoraLinear<B>,
    output: LoraLinear<B>,
    gate: LoraLinear<B>,
    up: LoraLinear<B>,
    down: LoraLinear<B>,
}

impl<B: ModelBackend> StreamLinears<B> {
    /// Loads those of the layer at this path.
    pub fn load(
        source: &mut dyn LayerSource<B>,
        at: &str,
        shape: StreamShape,
        kind: LayerKind,
    ) -> Result<Self, ModelError> {
        let StreamShape { width, inner, kv_inputs, .. } = shape;
        let (queries, kv) = (shape.heads * shape.head_dim, shape.kv_width());
        let mut linear = |name: &str, features| source.linear(&format!("{at}.{name}"), features, false);
        let query = linear("self_attn.q_proj", [width, queries])?;
        let key = linear("self_attn.k_proj", [kv_inputs, kv])?;
        let value = linear("self_attn.v_proj", [kv_inputs, kv])?;
        let output = linear("self_attn.o_proj", [queries, width])?;
        let gate = linear("mlp.gate_proj", [width, inner])?;
        let up = linear("mlp.up_proj", [width, inner])?;
        let down = linear("mlp.down_proj", [inner, width])?;
        Ok(Self { shape, kind, query, key, value, output, gate, up, down })
    }

    fn trains(&self) -> bool {
        let Self { query, key, value, output, gate, up, down, .. } = self;
        [query, key, value, output, gate, up, down].into_iter().any(LoraLinear::trains)
    }

    /// Queries of normed tokens, `[b, s, heads, k]`.
    pub fn queries<T: Tape<Base = B>>(
        &self,
        params: &ParamScope<'_, T>,
        y_nd: Tensor<T, 2>,
        batch: usize,
    ) -> Tensor<T, 4> {
        self.by_head(self.query.forward(params, y_nd), batch, self.shape.heads)
    }

    /// Keys and values, `[b, s, kv_heads, k]` each, of what they are made of.
    pub fn keys_values<T: Tape<Base = B>>(
        &self,
        params: &ParamScope<'_, T>,
        [keys_of, values_of]: [Tensor<T, 2>; 2],
        batch: usize,
    ) -> [Tensor<T, 4>; 2] {
        let keys_no = self.key.forward(params, keys_of);
        let values_no = self.value.forward(params, values_of);
        [keys_no, values_no].map(|x_no| self.by_head(x_no, batch, self.shape.kv_heads))
    }

    /// `W_o` of the heads of attention, `[b, s, heads, k]` to `[b * s, d]`.
    pub fn attended<T: Tape<Base = B>>(
        &self,
        params: &ParamScope<'_, T>,
        heads_bshk: Tensor<T, 4>,
    ) -> Tensor<T, 2> {
        self.output.forward(params, self.in_rows(heads_bshk))
    }

    /// The MLP of normed tokens.
    pub fn mlp<T: Tape<Base = B>>(&self, params: &ParamScope<'_, T>, z_nd: Tensor<T, 2>) -> Tensor<T, 2> {
        self.down.forward(params, self.gated(params, z_nd))
    }

    fn gated<T: Tape<Base = B>>(&self, params: &ParamScope<'_, T>, z_nd: Tensor<T, 2>) -> Tensor<T, 2> {
        let gate_nf = self.gate.forward(params, z_nd.clone());
        self.kind.gated(gate_nf, self.up.forward(params, z_nd))
    }

    fn in_rows<T: Tape<Base = B>>(&self, heads_bshk: Tensor<T, 4>) -> Tensor<T, 2> {
        let [batch, tokens, heads, head_dim] = heads_bshk.dims();
        heads_bshk.reshape([batch * tokens, heads * head_dim])
    }

    fn by_head<T: Tape<Base = B>>(&self, x_no: Tensor<T, 2>, batch: usize, heads: usize) -> Tensor<T, 4> {
        let tokens = x_no.dims()[0] / batch.max(1);
        x_no.reshape([batch, tokens, heads, self.shape.head_dim])
    }
}

/// One layer.
pub struct StreamLayer<B: ModelBackend> {
    /// The layer's sizes.
    pub shape: StreamShape,
    linears: StreamLinears<B>,
    norm_d: BaseWeight<B, 1>,
    mlp_norm_d: BaseWeight<B, 1>,
}

impl<B: ModelBackend> StreamLayer<B> {
    /// Loads the layer at this path.
    pub fn load(
        source: &mut dyn LayerSource<B>,
        at: &str,
        shape: StreamShape,
        kind: LayerKind,
    ) -> Result<Self, ModelError> {
        let linears = StreamLinears::load(source, at, shape, kind)?;
        let norm_d = source.gain(&format!("{at}.input_layernorm.weight"), shape.width)?;
        let mlp_norm_d = source.gain(&format!("{at}.post_attention_layernorm.weight"), shape.width)?;
        Ok(Self { shape, linears, norm_d, mlp_norm_d })
    }

    /// Whether anything of it trains.
    pub fn trains(&self) -> bool {
        self.linears.trains() || [&self.norm_d, &self.mlp_norm_d].into_iter().any(BaseWeight::trains)
    }

    /// The norm before attention.
    pub fn normed<T: Tape<Base = B>>(&self, params: &ParamScope<'_, T>, x_nd: Tensor<T, 2>) -> Tensor<T, 2> {
        self.linears.kind.normed(x_nd, self.norm_d.on_tape(params), self.shape.eps)
    }

    /// Queries of normed tokens, `[b, s, heads, k]`.
    pub fn queries<T: Tape<Base = B>>(
        &self,
        params: &ParamScope<'_, T>,
        y_nd: Tensor<T, 2>,
        batch: usize,
    ) -> Tensor<T, 4> {
        self.linears.queries(params, y_nd, batch)
    }

    /// Keys and values, `[b, s, kv_heads, k]` each, of what they are made of.
    pub fn keys_values<T: Tape<Base = B>>(
        &self,
        params: &ParamScope<'_, T>,
        of: [Tensor<T, 2>; 2],
        batch: usize,
    ) -> [Tensor<T, 4>; 2] {
        self.linears.keys_values(params, of, batch)
    }

    /// What follows attention, whose heads are `[b, s, heads, k]`.
    pub fn close<T: Tape<Base = B>>(
        &self,
        params: &ParamScope<'_, T>,
        x_nd: Tensor<T, 2>,
        heads_bshk: Tensor<T, 4>,
    ) -> Tensor<T, 2> {
        let Self { linears, mlp_norm_d, shape, .. } = self;
        let x_nd = linears.output.forward_residual(params, x_nd, linears.in_rows(heads_bshk));
        let z_nd = linears.kind.normed(x_nd.clone(), mlp_norm_d.on_tape(params), shape.eps);
        linears.down.forward_residual(params, x_nd, linears.gated(params, z_nd))
    }
}
