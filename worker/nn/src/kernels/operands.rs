//! What operations take and keep beside tensors.

use std::{ops::Range, sync::Arc};

use burn::tensor::{DType, Tensor, backend::Backend};

use super::{Weight, dropout::Dropout};

/// Which keys a query may attend to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AttentionMask {
    /// Every key of the same batch row.
    Full,
    /// Keys of the given range of each batch row (`[b]` ranges): padding is left out.
    Keys(Arc<[Range<u32>]>),
    /// Keys at or before the query, within the given range of each batch row.
    Causal(Arc<[Range<u32>]>),
    /// One batch row cut into consecutive segments that do not see each other: `[0, e1, e2, .., s]`
    /// (`cu_seqlens`).
    Segments(Arc<[u32]>),
    /// One batch row cut into [`Segments`](Self::Segments), of which a query sees only the keys at or before
    /// it.
    CausalSegments(Arc<[u32]>),
}

impl AttentionMask {
    /// Where segments begin and end, if a batch row is cut into some.
    pub fn segments(&self) -> Option<&[u32]> {
        match self {
            Self::Segments(ends) | Self::CausalSegments(ends) => Some(ends),
            Self::Full | Self::Keys(_) | Self::Causal(_) => None,
        }
    }

    /// Whether a query of a batch row without segments sees no key after itself.
    pub(super) fn is_causal_batch(&self) -> bool {
        matches!(self, Self::Causal(_))
    }
}

/// A low-rank update `scale * b a` of a linear layer's weight, never composed (arXiv 2106.09685).
///
/// With dropout every `x a^T` below reads `x` without what is dropped.
#[derive(Clone, Debug)]
pub struct LowRank<B: Backend> {
    /// Down projection, `[r, i]` (`lora_A` of PEFT).
    pub a_ri: Tensor<B, 2>,
    /// Up projection, `[o, r]` (`lora_B` of PEFT).
    pub b_or: Tensor<B, 2>,
    /// `alpha / r`, or `alpha / sqrt(r)`.
    pub scale: f64,
    /// What is dropped of the input on its way to `a`: nothing without one.
    pub dropout: Option<Dropout<B>>,
}

impl<B: Backend> LowRank<B> {
    /// This update for so many rows of its input from `first` on.
    pub fn of_rows(&self, first: usize, count: usize) -> Self {
        let dropout = self
            .dropout
            .as_ref()
            .map(|dropout| Dropout { rows: dropout.rows.select(first..first + count), ..dropout.clone() });
        Self { dropout, ..self.clone() }
    }

    /// The input of `a`.
    pub fn input(&self, x_ni: Tensor<B, 2>) -> Tensor<B, 2> {
        match &self.dropout {
            Some(dropout) => dropout.apply(x_ni),
            None => x_ni,
        }
    }
}

/// What [`AttentionOps::attention_saving`](super::AttentionOps::attention_saving) returns.
#[derive(Clone, Debug)]
pub struct AttentionOutput<B: Backend> {
    /// The output, `[b, sq, heads, k]`.
    pub out_bshk: Tensor<B, 4>,
    /// Logarithm of each query's sum of exponentials, `[b, sq, heads]`, if the backend's backward pass wants
    /// it.
    pub lse_bsh: Option<Tensor<B, 3>>,
}

impl<B: Backend> AttentionOutput<B> {
    /// What such a backend's forward pass has left.
    pub(super) fn lse(&self) -> Tensor<B, 3> {
        self.lse_bsh.clone().expect("a backend that wants it leaves it")
    }
}

/// What attention keeps for its backward pass.
#[derive(Clone, Debug)]
pub struct AttentionSaved<B: Backend> {
    /// Queries.
    pub q_bshk: Tensor<B, 4>,
    /// Keys.
    pub k_bshk: Tensor<B, 4>,
    /// Values.
    pub v_bshk: Tensor<B, 4>,
    /// What the forward pass returned.
    pub output: AttentionOutput<B>,
}

/// One of several linear layers that read the same input.
#[derive(Clone, Debug)]
pub struct LinearLayer<B: Backend> {
    /// Weight, `[o, i]`.
    pub w_oi: Weight<B>,
    /// Bias, `[o]`.
    pub bias_o: Option<Tensor<B, 1>>,
    /// Low-rank update.
    pub update: Option<LowRank<B>>,
}

/// Linear layers of one input whose frozen weights lie one below the other, and whose outputs lie side by
/// side. All of them have an update, of one rank and without dropout, or none has.
#[derive(Clone, Debug)]
pub struct JoinedLayers<B: Backend> {
    /// Weights, `[o, i]`: the outputs of all.
    pub w_oi: Weight<B>,
    /// Biases, `[o]`.
    pub bias_o: Option<Tensor<B, 1>>,
    /// Updates.
    pub updates: Vec<LowRank<B>>,
    /// Outputs of each layer.
    pub outputs: Vec<usize>,
    /// Whether outputs are rounded to the weights' type, where a backend rounds at all.
    pub rounded: bool,
}

impl<B: Backend> JoinedLayers<B> {
    /// Each by itself.
    pub(super) fn apart(&self) -> Vec<LinearLayer<B>> {
        let mut start = 0;
        let layer = |(number, &outputs): (usize, &usize)| {
            let from = start;
            start += outputs;
            LinearLayer {
                w_oi: self.w_oi.layer(number, |w_oi| w_oi.clone().narrow(0, from, outputs)),
                bias_o: self.bias_o.clone().map(|bias_o| bias_o.narrow(0, from, outputs)),
                update: self.updates.get(number).cloned(),
            }
        };
        self.outputs.iter().enumerate().map(layer).collect()
    }
}

/// What joined layers keep for their backward pass.
#[derive(Clone, Debug)]
pub struct JoinedSaved<B: Backend> {
    /// The input.
    pub x_ni: Tensor<B, 2>,
    /// `scale * x a^T` of each, side by side; none without updates.
    pub down_nr: Option<Tensor<B, 2>>,
    /// The layers.
    pub layers: JoinedLayers<B>,
}

/// Gradients of [`LinearOps::joined`](super::LinearOps::joined).
#[derive(Clone, Debug)]
pub struct JoinedGradients<B: Backend> {
    /// The gradient of the input, if asked for.
    pub dx_ni: Option<Tensor<B, 2>>,
    /// The gradients of the two matrices of each update.
    pub updates: Vec<[Tensor<B, 2>; 2]>,
}

/// Queries, keys and values of tokens, side by side in a row.
#[derive(Clone, Debug)]
pub struct JoinedHeads<B: Backend> {
    /// `[b s, (heads + kv_heads + kv_heads) k]`.
    pub qkv_no: Tensor<B, 2>,
    /// Batch rows, and tokens of each.
    pub rows: [usize; 2],
    /// Heads of queries, keys and values.
    pub heads: [usize; 3],
}

impl<B: Backend> JoinedHeads<B> {
    /// Queries, keys, values, `[b, s, h, k]`.
    pub fn parts(self) -> [Tensor<B, 4>; 3] {
        let Self { qkv_no, rows: [b, s], heads } = self;
        let k = qkv_no.dims()[1] / heads.iter().sum::<usize>();
        let mut start = 0;
        heads.map(|heads| {
            let from = start;
            start += heads * k;
            qkv_no.clone().narrow(1, from, heads * k).reshape([b, s, heads, k])
        })
    }
}

/// How what attends is turned, and what it sees.
pub struct RopeMask<'a, B: Backend> {
    /// Cosines and sines, `[b, s, k]`.
    pub tables_bsk: [Tensor<B, 3>; 2],
    /// Which keys a query sees.
    pub mask: &'a AttentionMask,
    /// Applied to scores.
    pub scale: f64,
    /// What gradients are rounded to.
    pub to: Option<DType>,
}

/// What a linear layer with a low-rank update keeps for its backward pass.
#[derive(Clone, Debug)]
pub struct LowRankSaved<B: Backend> {
    /// The input.
    pub x_ni: Tensor<B, 2>,
    /// `scale * x a^T`, of what was left of `x`.
    pub down_nr: Tensor<B, 2>,
    /// The weight.
    pub w_oi: Weight<B>,
    /// The update.
    pub update: LowRank<B>,
}

/// Gradients of [`LinearOps::lora_linear`](super::LinearOps::lora_linear).
#[derive(Clone, Debug)]
pub struct LowRankGradients<B: Backend> {
    /// The gradient of the input, if asked for.
    pub dx_ni: Option<Tensor<B, 2>>,
    /// The gradient of the down projection.
    pub da_ri: Tensor<B, 2>,
    /// The gradient of the up projection.
    pub db_or: Tensor<B, 2>,
}

impl<B: Backend> LowRankGradients<B> {
    /// With the weight's own part of the input's gradient.
    pub(super) fn beside(self, dense_ni: Option<Tensor<B, 2>>) -> Self {
        Self { dx_ni: dense_ni.zip(self.dx_ni).map(|(dense_ni, low_ni)| dense_ni + low_ni), ..self }
    }

    /// With the input's gradient added to a sum.
    pub(super) fn with_residual(self, sum_ni: Tensor<B, 2>) -> Self {
        Self { dx_ni: self.dx_ni.map(|dx_ni| dx_ni + sum_ni), ..self }
    }
}

/// How a layer norm is modulated by rows of scales and shifts side by side.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdaNorm {
    /// Whether a row begins with its shifts.
    pub shift_first: bool,
    /// Added to the variance.
    pub eps: f64,
}

impl AdaNorm {
    /// A row's first and second half as scales and shifts, or scales and shifts as its halves.
    pub(super) fn halves<T>(self, [first, second]: [T; 2]) -> [T; 2] {
        if self.shift_first { [second, first] } else { [first, second] }
    }
}

/// What the output of a linear layer is added to: the stream of residuals.
#[derive(Clone, Debug)]
pub struct Residual<B: Backend> {
    /// The stream so far, `[n, o]`.
    pub x_no: Tensor<B, 2>,
    /// Whether the sum is rounded to bfloat16.
    pub rounded: bool,
}

/// Where a gradient goes that is summed in host memory.
#[derive(Debug)]
pub struct GradientSlot<'a> {
    /// The sum so far, row-major.
    pub values: &'a mut [f32],
    /// Whether `values` still holds an old sum, to be overwritten.
    pub stale: bool,
}

impl GradientSlot<'_> {
    /// Adds one gradient.
    pub fn add(self, gradient: &[f32]) {
        assert_eq!(gradient.len(), self.values.len(), "a gradient has another size than its parameter");
        if self.stale {
            self.values.copy_from_slice(gradient);
        } else {
            self.values.iter_mut().zip(gradient).for_each(|(sum, g)| *sum += g);
        }
    }
}

/// What [`cross_entropy`](super::RowOps::cross_entropy) says of rows of logits.
#[derive(Clone, Debug)]
pub struct CrossEntropy<B: Backend> {
    /// Each row's loss and its target's margin, `[n, 2]`.
    pub rows: Vec<[f32; 2]>,
    /// The gradient of the losses' sum, `[n, v]`, if it was asked for.
    pub dlogits_nv: Option<Tensor<B, 2>>,
}
