//! The operations that the model needs of a backend: [`ModelBackend`].

use std::ops::Range;

use burn::tensor::{DType, Tensor, TensorPrimitive, activation, backend::Backend};

use super::{
    backward,
    flat::{
        FlatOn, Gradient, Run,
        tensors::{self, Origins, Updated},
    },
    operands::{
        AdaNorm, AttentionMask, AttentionOutput, AttentionSaved, CrossEntropy, GradientSlot, LinearLayer,
        LowRank, LowRankGradients, LowRankSaved, Residual,
    },
    reference,
};

/// A backend that the model runs on. The methods named `_backward`, `_gradient` and `_saving` are for the
/// autodiff nodes.
pub trait ModelBackend: Backend {
    /// Whether its tensors lie in host memory: one made of a mapped file's bytes is those bytes then.
    const ON_HOST: bool = false;

    /// Whether its tensors have values: false where sizes are all there is ([`sizes`](super::sizes)), and
    /// then nothing is read or drawn for them.
    const VALUES: bool = true;

    /// The elements of `flat` from `start` on as a matrix, without a copy where the backend allows it.
    fn matrix_view(flat: Tensor<Self, 1>, start: usize, shape: [usize; 2]) -> Tensor<Self, 2> {
        flat.narrow(0, start, shape[0] * shape[1]).reshape(shape)
    }

    /// `x y` of each pair of matrices in a batch, `[.., n, k]` and `[.., k, o]`, of one type; in float32 or
    /// the type of both.
    fn product<const D: usize>(x: Tensor<Self, D>, y: Tensor<Self, D>) -> Tensor<Self, D> {
        x.matmul(y)
    }

    /// `x * rsqrt(mean(x^2, last) + eps) * gain` (arXiv 1910.07467). `x_nd`, `gain_d`; returns `[n, d]`.
    fn rms_norm(x_nd: Tensor<Self, 2>, gain_d: Tensor<Self, 1>, eps: f64) -> Tensor<Self, 2> {
        reference::rms_norm(x_nd, gain_d, eps)
    }

    /// [`rms_norm`](Self::rms_norm) for products that round their inputs to bfloat16: rounded already, where
    /// that saves a pass.
    fn rms_norm_for_rounding(x_nd: Tensor<Self, 2>, gain_d: Tensor<Self, 1>, eps: f64) -> Tensor<Self, 2> {
        Self::rms_norm(x_nd, gain_d, eps)
    }

    /// The gradient of `x` under [`rms_norm`](Self::rms_norm).
    fn rms_norm_backward(
        x_nd: Tensor<Self, 2>,
        gain_d: Tensor<Self, 1>,
        dy_nd: Tensor<Self, 2>,
        eps: f64,
    ) -> Tensor<Self, 2> {
        backward::rms_norm(x_nd, gain_d, dy_nd, eps)
    }

    /// [`rms_norm_backward`](Self::rms_norm_backward) added to `sum`, the gradient of `x` by way of its other
    /// readers.
    fn rms_norm_backward_residual(
        sum_nd: Tensor<Self, 2>,
        x_nd: Tensor<Self, 2>,
        gain_d: Tensor<Self, 1>,
        dy_nd: Tensor<Self, 2>,
        eps: f64,
    ) -> Tensor<Self, 2> {
        Self::rms_norm_backward(x_nd, gain_d, dy_nd, eps) + sum_nd
    }

    /// The gradient of the gain under [`rms_norm`](Self::rms_norm): the rows' sum of `dy * x *
    /// rsqrt(mean(x^2) + eps)`.
    fn rms_norm_gain_gradient(x_nd: Tensor<Self, 2>, dy_nd: Tensor<Self, 2>, eps: f64) -> Tensor<Self, 1> {
        let ones_d = Tensor::ones([x_nd.dims()[1]], &x_nd.device());
        Self::linear_bias_gradient(dy_nd * Self::rms_norm(x_nd, ones_d, eps))
    }

    /// `silu(gate) * up` (arXiv 2002.05202). Both `[n, f]`.
    fn swiglu(gate_nf: Tensor<Self, 2>, up_nf: Tensor<Self, 2>) -> Tensor<Self, 2> {
        reference::swiglu(gate_nf, up_nf)
    }

    /// [`swiglu`](Self::swiglu) for products that round their inputs, likewise.
    fn swiglu_for_rounding(gate_nf: Tensor<Self, 2>, up_nf: Tensor<Self, 2>) -> Tensor<Self, 2> {
        Self::swiglu(gate_nf, up_nf)
    }

    /// The gradients of gate and up under [`swiglu`](Self::swiglu).
    fn swiglu_backward(
        gate_nf: Tensor<Self, 2>,
        up_nf: Tensor<Self, 2>,
        dy_nf: Tensor<Self, 2>,
    ) -> (Tensor<Self, 2>, Tensor<Self, 2>) {
        backward::swiglu(gate_nf, up_nf, dy_nf)
    }

    /// Rotary embedding in the rotate-half convention: `x * cos + rotate_half(x) * sin`, with
    /// `rotate_half([a | b]) = [-b | a]`. `x_bshk`; tables `[b, s, k]` (or `[1, s, k]`, shared by the batch),
    /// frozen.
    fn rotary(
        x_bshk: Tensor<Self, 4>,
        cos_bsk: Tensor<Self, 3>,
        sin_bsk: Tensor<Self, 3>,
    ) -> Tensor<Self, 4> {
        reference::rotary(x_bshk, cos_bsk, sin_bsk)
    }

    /// The gradient of `x` under [`rotary`](Self::rotary).
    fn rotary_backward(
        dy_bshk: Tensor<Self, 4>,
        cos_bsk: Tensor<Self, 3>,
        sin_bsk: Tensor<Self, 3>,
    ) -> Tensor<Self, 4> {
        backward::rotary(dy_bshk, cos_bsk, sin_bsk)
    }

    /// `softmax(q k^T * scale, masked) v` with grouped queries: query head `h` reads key/value head `h /
    /// (heads / kv_heads)`. `q [b, sq, heads, k]`, `k` and `v` `[b, sk, kv_heads, k]`; returns `[b, sq,
    /// heads, k]`. A query with no admissible key (left padding) gets zeros.
    fn attention(
        q_bshk: Tensor<Self, 4>,
        k_bshk: Tensor<Self, 4>,
        v_bshk: Tensor<Self, 4>,
        mask: &AttentionMask,
        scale: f64,
    ) -> Tensor<Self, 4> {
        Self::attention_saving(q_bshk, k_bshk, v_bshk, mask, scale).out_bshk
    }

    /// [`attention`](Self::attention) of queries and keys under [`rotary`](Self::rotary), by tables of
    /// cosines and sines. Queries, keys, values.
    fn rope_attention(
        inputs_bshk: [Tensor<Self, 4>; 3],
        tables_bsk: [Tensor<Self, 3>; 2],
        mask: &AttentionMask,
        scale: f64,
    ) -> Tensor<Self, 4> {
        let [q_bshk, k_bshk, v_bshk] = Self::rope(inputs_bshk, tables_bsk);
        <Self as ModelBackend>::attention(q_bshk, k_bshk, v_bshk, mask, scale)
    }

    /// What [`rope_attention`](Self::rope_attention) attends with.
    fn rope(inputs_bshk: [Tensor<Self, 4>; 3], tables_bsk: [Tensor<Self, 3>; 2]) -> [Tensor<Self, 4>; 3] {
        let ([q_bshk, k_bshk, v_bshk], [cos_bsk, sin_bsk]) = (inputs_bshk, tables_bsk);
        let q_bshk = Self::rotary(q_bshk, cos_bsk.clone(), sin_bsk.clone());
        [q_bshk, Self::rotary(k_bshk, cos_bsk, sin_bsk), v_bshk]
    }

    /// The gradients under [`rope`](Self::rope).
    fn rope_backward(
        gradients_bshk: [Tensor<Self, 4>; 3],
        tables_bsk: [Tensor<Self, 3>; 2],
    ) -> [Tensor<Self, 4>; 3] {
        let ([dq_bshk, dk_bshk, dv_bshk], [cos_bsk, sin_bsk]) = (gradients_bshk, tables_bsk);
        let dq_bshk = Self::rotary_backward(dq_bshk, cos_bsk.clone(), sin_bsk.clone());
        [dq_bshk, Self::rotary_backward(dk_bshk, cos_bsk, sin_bsk), dv_bshk]
    }

    /// Inputs of [`attention`](Self::attention) as it reads them: what a pass on a tape keeps, so that its
    /// backward pass need not arrange them again.
    fn attention_inputs(inputs_bshk: [Tensor<Self, 4>; 3], _mask: &AttentionMask) -> [Tensor<Self, 4>; 3] {
        inputs_bshk
    }

    /// Gradients of [`attention`](Self::attention) as those read them that made its inputs.
    fn attention_gradients(gradients_bshk: [Tensor<Self, 4>; 3]) -> [Tensor<Self, 4>; 3] {
        gradients_bshk
    }

    /// [`attention`](Self::attention), and what its backward pass needs besides the inputs.
    fn attention_saving(
        q_bshk: Tensor<Self, 4>,
        k_bshk: Tensor<Self, 4>,
        v_bshk: Tensor<Self, 4>,
        mask: &AttentionMask,
        scale: f64,
    ) -> AttentionOutput<Self> {
        let out_bshk = reference::attention(q_bshk, k_bshk, v_bshk, mask, scale);
        AttentionOutput { out_bshk, lse_bsh: None }
    }

    /// The gradients of q, k and v under [`attention`](Self::attention).
    fn attention_backward(
        saved: AttentionSaved<Self>,
        mask: &AttentionMask,
        scale: f64,
        dout_bshk: Tensor<Self, 4>,
    ) -> [Tensor<Self, 4>; 3] {
        backward::attention(saved, mask, scale, dout_bshk)
    }

    /// `x w^T + bias` with a weight in the checkpoint's own layout: `x [n, i]`, `w [o, i]`, `bias [o]`;
    /// returns `[n, o]`. `w` may be bf16 under an f32 `x`; the product is f32. Gradients reach every argument
    /// that is tracked.
    fn linear(
        x_ni: Tensor<Self, 2>,
        w_oi: Tensor<Self, 2>,
        bias_o: Option<Tensor<Self, 1>>,
    ) -> Tensor<Self, 2> {
        reference::linear(x_ni, w_oi, bias_o)
    }

    /// `dy w`: the gradient of `x` under [`linear`](Self::linear), in the type of `dy`.
    fn linear_input_gradient(dy_no: Tensor<Self, 2>, w_oi: Tensor<Self, 2>) -> Tensor<Self, 2> {
        backward::linear_input(dy_no, w_oi)
    }

    /// `dy^T x`: the gradient of `w` under [`linear`](Self::linear).
    fn linear_weight_gradient(dy_no: Tensor<Self, 2>, x_ni: Tensor<Self, 2>) -> Tensor<Self, 2> {
        backward::linear_weight(dy_no, x_ni)
    }

    /// [`linear_weight_gradient`](Self::linear_weight_gradient) added to a sum in host memory.
    ///
    /// The weights of a trained head outnumber the values of its micro-batch by far: where memory is shared
    /// with the host, a gradient that is made where it is summed costs one pass over it instead of three.
    fn add_linear_weight_gradient(dy_no: Tensor<Self, 2>, x_ni: Tensor<Self, 2>, sum: GradientSlot<'_>) {
        let gradient = Self::linear_weight_gradient(dy_no, x_ni).into_data().convert::<f32>();
        sum.add(gradient.as_slice().expect("converted to f32"));
    }

    /// The sum of the rows of `dy`: the gradient of a bias.
    fn linear_bias_gradient(dy_no: Tensor<Self, 2>) -> Tensor<Self, 1> {
        backward::linear_bias(dy_no)
    }

    /// [`linear`](Self::linear) plus a low-rank update: `x w^T + bias + scale * (x a^T) b^T`. Returns `[n,
    /// o]`. Gradients reach `x`, `a` and `b`; `w` and `bias` as in `linear`.
    fn lora_linear(
        x_ni: Tensor<Self, 2>,
        w_oi: Tensor<Self, 2>,
        bias_o: Option<Tensor<Self, 1>>,
        update: LowRank<Self>,
    ) -> Tensor<Self, 2> {
        Self::lora_linear_saving(x_ni, w_oi, bias_o, &update).0
    }

    /// Linear layers of one input: each [`linear`](Self::linear), or [`lora_linear`](Self::lora_linear) where
    /// it has an update.
    fn linears(x_ni: Tensor<Self, 2>, layers: Vec<LinearLayer<Self>>) -> Vec<Tensor<Self, 2>> {
        Self::linears_saving(x_ni, layers).into_iter().map(|(y_no, _)| y_no).collect()
    }

    /// [`linears`](Self::linears), and `scale * x a^T` of each update.
    fn linears_saving(
        x_ni: Tensor<Self, 2>,
        layers: Vec<LinearLayer<Self>>,
    ) -> Vec<(Tensor<Self, 2>, Option<Tensor<Self, 2>>)> {
        let each = layers.into_iter().map(|LinearLayer { w_oi, bias_o, update }| match update {
            Some(update) => {
                let (y_no, down_nr) = Self::lora_linear_saving(x_ni.clone(), w_oi, bias_o, &update);
                (y_no, Some(down_nr))
            }
            None => (<Self as ModelBackend>::linear(x_ni.clone(), w_oi, bias_o), None),
        });
        each.collect()
    }

    /// `residual` plus [`linear`](Self::linear).
    fn linear_residual(
        residual: Residual<Self>,
        x_ni: Tensor<Self, 2>,
        w_oi: Tensor<Self, 2>,
        bias_o: Option<Tensor<Self, 1>>,
    ) -> Tensor<Self, 2> {
        residual.plus(<Self as ModelBackend>::linear(x_ni, w_oi, bias_o))
    }

    /// `residual` plus [`lora_linear`](Self::lora_linear).
    fn lora_linear_residual(
        residual: Residual<Self>,
        x_ni: Tensor<Self, 2>,
        w_oi: Tensor<Self, 2>,
        bias_o: Option<Tensor<Self, 1>>,
        update: LowRank<Self>,
    ) -> Tensor<Self, 2> {
        Self::lora_linear_residual_saving(residual, x_ni, w_oi, bias_o, &update).0
    }

    /// `x + y` whose value is never read: nothing is computed, and under autodiff the node is that of a sum.
    fn sum_unread(x_nd: Tensor<Self, 2>, _y_nd: Tensor<Self, 2>) -> Tensor<Self, 2> {
        x_nd
    }

    /// [`linear`](Self::linear) whose value is known already: nothing is computed, and under autodiff the
    /// node is the same.
    fn linear_cached(
        _x_ni: Tensor<Self, 2>,
        _w_oi: Tensor<Self, 2>,
        _bias_o: Option<Tensor<Self, 1>>,
        y_no: Tensor<Self, 2>,
    ) -> Tensor<Self, 2> {
        y_no
    }

    /// [`lora_linear`](Self::lora_linear) whose value is known already; `known` is what
    /// [`lora_linear_saving`](Self::lora_linear_saving) returned.
    fn lora_linear_cached(
        _x_ni: Tensor<Self, 2>,
        _w_oi: Tensor<Self, 2>,
        _update: LowRank<Self>,
        known: (Tensor<Self, 2>, Tensor<Self, 2>),
    ) -> Tensor<Self, 2> {
        known.0
    }

    /// [`lora_linear`](Self::lora_linear), and `scale * x a^T`.
    fn lora_linear_saving(
        x_ni: Tensor<Self, 2>,
        w_oi: Tensor<Self, 2>,
        bias_o: Option<Tensor<Self, 1>>,
        update: &LowRank<Self>,
    ) -> (Tensor<Self, 2>, Tensor<Self, 2>) {
        let (low_no, down_nr) = reference::low_rank(x_ni.clone(), update);
        (<Self as ModelBackend>::linear(x_ni, w_oi, bias_o) + low_no, down_nr)
    }

    /// [`lora_linear_residual`](Self::lora_linear_residual), and `scale * x a^T`.
    fn lora_linear_residual_saving(
        residual: Residual<Self>,
        x_ni: Tensor<Self, 2>,
        w_oi: Tensor<Self, 2>,
        bias_o: Option<Tensor<Self, 1>>,
        update: &LowRank<Self>,
    ) -> (Tensor<Self, 2>, Tensor<Self, 2>) {
        let (y_no, down_nr) = Self::lora_linear_saving(x_ni, w_oi, bias_o, update);
        (residual.plus(y_no), down_nr)
    }

    /// The gradients of `x` (if `wants_dx`), `a` and `b` under [`lora_linear`](Self::lora_linear).
    fn lora_linear_backward(
        saved: LowRankSaved<Self>,
        dy_no: Tensor<Self, 2>,
        wants_dx: bool,
    ) -> LowRankGradients<Self> {
        let dense_ni = wants_dx.then(|| Self::linear_input_gradient(dy_no.clone(), saved.w_oi.clone()));
        backward::low_rank(saved, dy_no, wants_dx).beside(dense_ni)
    }

    /// The same, with the gradient of `x` added to `sum`, that by way of others who read it.
    fn lora_linear_backward_residual(
        sum_ni: Tensor<Self, 2>,
        saved: LowRankSaved<Self>,
        dy_no: Tensor<Self, 2>,
    ) -> LowRankGradients<Self> {
        Self::lora_linear_backward(saved, dy_no, true).with_residual(sum_ni)
    }

    /// Layer norm without gain or bias, then `* (1 + scale) + shift` with one scale and shift per batch row
    /// (AdaLN). `x [b * s, d]` in batch order, `scale` and `shift` `[b, d]`; returns `[b * s, d]`.
    fn modulated_layer_norm(
        x_nd: Tensor<Self, 2>,
        scale_bd: Tensor<Self, 2>,
        shift_bd: Tensor<Self, 2>,
        eps: f64,
    ) -> Tensor<Self, 2> {
        reference::modulated_layer_norm(x_nd, scale_bd, shift_bd, eps)
    }

    /// The gradients of `x`, scale and shift under [`modulated_layer_norm`](Self::modulated_layer_norm).
    fn modulated_layer_norm_backward(
        x_nd: Tensor<Self, 2>,
        scale_bd: Tensor<Self, 2>,
        dy_nd: Tensor<Self, 2>,
        eps: f64,
    ) -> [Tensor<Self, 2>; 3] {
        backward::modulated_layer_norm(x_nd, scale_bd, dy_nd, eps)
    }

    /// [`modulated_layer_norm`](Self::modulated_layer_norm) by scale and shift side by side, `ada [b, 2 d]`.
    fn ada_layer_norm(x_nd: Tensor<Self, 2>, ada_be: Tensor<Self, 2>, how: AdaNorm) -> Tensor<Self, 2> {
        let d = x_nd.dims()[1];
        let [scale_bd, shift_bd] = how.halves([0, d].map(|start| ada_be.clone().narrow(1, start, d)));
        Self::modulated_layer_norm(x_nd, scale_bd, shift_bd, how.eps)
    }

    /// The gradients of `x` and of scale and shift under [`ada_layer_norm`](Self::ada_layer_norm); the first
    /// added to `sum`, the gradient of `x` by way of others who read it, if there is one.
    fn ada_layer_norm_backward(
        sum_nd: Option<Tensor<Self, 2>>,
        x_nd: Tensor<Self, 2>,
        ada_be: Tensor<Self, 2>,
        dy_nd: Tensor<Self, 2>,
        how: AdaNorm,
    ) -> [Tensor<Self, 2>; 2] {
        let d = x_nd.dims()[1];
        let [scale_bd, _] = how.halves([0, d].map(|start| ada_be.clone().narrow(1, start, d)));
        let [dx_nd, dscale_bd, dshift_bd] =
            Self::modulated_layer_norm_backward(x_nd, scale_bd, dy_nd, how.eps);
        let dada_be = Tensor::cat(how.halves([dscale_bd, dshift_bd]).into(), 1);
        [
            match sum_nd {
                Some(sum_nd) => dx_nd + sum_nd,
                None => dx_nd,
            },
            dada_be,
        ]
    }

    /// Layer norm without gain or bias. `[n, d]`.
    fn layer_norm(x_nd: Tensor<Self, 2>, eps: f64) -> Tensor<Self, 2> {
        reference::layer_norm(x_nd, eps)
    }

    /// The gradient of `x` under [`layer_norm`](Self::layer_norm).
    fn layer_norm_backward(x_nd: Tensor<Self, 2>, dy_nd: Tensor<Self, 2>, eps: f64) -> Tensor<Self, 2> {
        backward::layer_norm(x_nd, dy_nd, eps)
    }

    /// The same, added to `sum`, the gradient of `x` by way of others who read it.
    fn layer_norm_backward_residual(
        sum_nd: Tensor<Self, 2>,
        x_nd: Tensor<Self, 2>,
        dy_nd: Tensor<Self, 2>,
        eps: f64,
    ) -> Tensor<Self, 2> {
        Self::layer_norm_backward(x_nd, dy_nd, eps) + sum_nd
    }

    /// `x` rounded to bfloat16, in its own type. The gradient passes as it is, as under autocast: a
    /// rounding's own is zero almost everywhere.
    fn rounded(x_nd: Tensor<Self, 2>) -> Tensor<Self, 2> {
        reference::rounded(x_nd)
    }

    /// `x + y`, rounded likewise.
    fn rounded_sum(x_nd: Tensor<Self, 2>, y_nd: Tensor<Self, 2>) -> Tensor<Self, 2> {
        reference::rounded(x_nd + y_nd)
    }

    /// `x` as bfloat16, rounded where it has to be.
    fn narrowed(x_nd: Tensor<Self, 2>) -> Tensor<Self, 2> {
        x_nd.cast(DType::BF16)
    }

    /// A bfloat16 `x` as float32.
    fn widened(x_nd: Tensor<Self, 2>) -> Tensor<Self, 2> {
        x_nd.cast(DType::F32)
    }

    /// GELU by its tanh approximation, as `gelu(approximate="tanh")`.
    fn gelu_tanh(x_nf: Tensor<Self, 2>) -> Tensor<Self, 2> {
        reference::gelu_tanh(x_nf)
    }

    /// The gradient of `x` under [`gelu_tanh`](Self::gelu_tanh).
    fn gelu_tanh_backward(x_nf: Tensor<Self, 2>, dy_nf: Tensor<Self, 2>) -> Tensor<Self, 2> {
        backward::gelu_tanh(x_nf, dy_nf)
    }

    /// GELU by the error function, `x (1 + erf(x / sqrt 2)) / 2` (arXiv 1606.08415).
    fn gelu_erf(x_nf: Tensor<Self, 2>) -> Tensor<Self, 2> {
        activation::gelu(x_nf)
    }

    /// The gradient of `x` under [`gelu_erf`](Self::gelu_erf). burn's own is exact where a backend has it,
    /// and else that of the tanh approximation, which is off by a thousandth.
    fn gelu_erf_backward(x_nf: Tensor<Self, 2>, dy_nf: Tensor<Self, 2>) -> Tensor<Self, 2> {
        let [x, dy] = [x_nf, dy_nf].map(|tensor| tensor.into_primitive().tensor());
        Tensor::from_primitive(TensorPrimitive::Float(Self::gelu_backward(x, dy)))
    }

    /// Cross entropy of rows of logits `[n, v]`, each against one target below `v`.
    ///
    /// Of each row `log(sum exp(x)) - x_t`, and `x_t - max(x)`, which is zero where the target is what would
    /// be said: `[n, 2]` in host memory. With `gradient` the gradient of the losses' sum by the logits,
    /// `softmax(x) - onehot(t)`, where they lay if nobody else has them.
    fn cross_entropy(logits_nv: Tensor<Self, 2>, targets: &[u32], gradient: bool) -> CrossEntropy<Self> {
        reference::cross_entropy(logits_nv, targets, gradient)
    }

    /// Where the flat parameter buffer of what trains lies: where this backend's tensors do. (A tape has
    /// none: it is that of the backend underneath.)
    type Flat: FlatOn<Self>;

    /// Adds gradients to their sums in `flat`; in place where it has no other owner.
    fn flat_accumulate(flat: Tensor<Self, 1>, gradients: Vec<Gradient<Self>>) -> Tensor<Self, 1> {
        gradients.into_iter().fold(flat, |flat, Gradient { range, first, values }| {
            tensors::accumulate(flat, range.start, values.reshape([range.len()]), first)
        })
    }

    /// Sums of squares of parts of a range, a few thousand elements each, to be added up in float64.
    fn flat_squares(flat: &Tensor<Self, 1>, range: &Range<usize>) -> Vec<Tensor<Self, 1>> {
        tensors::squares(flat, range)
    }

    /// `flat[range] = halves[range]`, in float32; in place where `flat` has no other owner.
    fn flat_widen(flat: Tensor<Self, 1>, halves: &Tensor<Self, 1>, range: &Range<usize>) -> Tensor<Self, 1> {
        tensors::widen(flat, halves, range)
    }

    /// AdamW on runs of a part; in place where the buffers have no other owner.
    fn flat_adamw(
        state: Updated<Self>,
        grads: &Tensor<Self, 1>,
        from: Origins,
        runs: &[Run],
    ) -> Updated<Self> {
        runs.iter().fold(state, |state, run| tensors::adamw(state, grads, from, run))
    }
}

impl<B: ModelBackend> Residual<B> {
    /// The sum.
    pub fn plus(self, y_no: Tensor<B, 2>) -> Tensor<B, 2> {
        if self.rounded { B::rounded_sum(self.x_no, y_no) } else { self.x_no + y_no }
    }
}
