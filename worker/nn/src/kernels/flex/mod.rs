//! The fused operations on the CPU backend, in f32.
//!
//! This file takes slices out of tensors ([`border`]), checks that shapes agree, and wraps results. Anything
//! that is not f32 goes to the [`reference`](super::reference), except a bf16 weight of a linear layer.
//!
//! The result of an operation depends on its inputs alone, bit for bit: not on the number of threads, nor on
//! their order. What a forward pass makes of a token depends on that token and those it attends to alone: not
//! on who else is in the batch, nor on how far a row is padded on the left. The cache of features rests on it
//! (`model::policy::features`).

mod attention;
mod border;
mod cross_entropy;
mod linear;
mod matrix;
mod norm;
mod parallel;
mod pointwise;
mod rounding;
mod rows;
mod scratch;
mod simd;
mod spans;

use burn::{
    backend::Flex,
    tensor::{Shape, Tensor, TensorPrimitive},
};
use burn_flex::Layout;

use self::border::{
    Strided, Values, WeightValues, attention_inputs, changed, has_weight_path, is_f32, primitive, tensor,
};
pub use self::{
    linear::{DROPOUT_BLOCK, FEW as FEW_TOKENS, PANEL as PANEL_COLUMNS},
    simd::vectorised,
    spans::QUERY_BLOCK,
};
use super::{
    AttentionMask, AttentionOutput, AttentionSaved, CrossEntropy, Dropout, GradientSlot, LowRank,
    LowRankGradients, LowRankSaved, ModelBackend, backward, reference,
};

impl ModelBackend for Flex {
    type Flat = Vec<f32>;

    const ON_HOST: bool = true;

    /// burn's own `reshape` copies whatever does not start at its buffer's first element.
    fn matrix_view(flat: Tensor<Self, 1>, start: usize, [rows, cols]: [usize; 2]) -> Tensor<Self, 2> {
        let flat = primitive(flat.narrow(0, start, rows * cols));
        let layout =
            Layout::new(Shape::new([rows, cols]), vec![cols as isize, 1], flat.layout().start_offset());
        Tensor::from_primitive(TensorPrimitive::Float(flat.with_layout(layout)))
    }

    fn rms_norm(x_nd: Tensor<Self, 2>, gain_d: Tensor<Self, 1>, eps: f64) -> Tensor<Self, 2> {
        if !is_f32(&x_nd) {
            return reference::rms_norm(x_nd, gain_d, eps);
        }
        let (shape, x, gain) = (x_nd.dims(), Values::of(x_nd), Values::of(gain_d));
        assert_eq!(gain.get().len(), shape[1], "rms_norm: one gain per feature");
        tensor(norm::rms(x.get(), gain.get(), eps as f32), shape)
    }

    fn rms_norm_backward(
        x_nd: Tensor<Self, 2>,
        gain_d: Tensor<Self, 1>,
        dy_nd: Tensor<Self, 2>,
        eps: f64,
    ) -> Tensor<Self, 2> {
        if !is_f32(&x_nd) {
            return backward::rms_norm(x_nd, gain_d, dy_nd, eps);
        }
        let (shape, x, gain, dy) = (x_nd.dims(), Values::of(x_nd), Values::of(gain_d), Values::of(dy_nd));
        tensor(norm::rms_backward(x.get(), gain.get(), dy.get(), eps as f32), shape)
    }

    fn swiglu(gate_nf: Tensor<Self, 2>, up_nf: Tensor<Self, 2>) -> Tensor<Self, 2> {
        if !is_f32(&gate_nf) {
            return reference::swiglu(gate_nf, up_nf);
        }
        let shape = gate_nf.dims();
        assert_eq!(shape, up_nf.dims(), "swiglu: gate and up have one shape");
        tensor(pointwise::swiglu(Values::of(gate_nf).get(), Values::of(up_nf).get()), shape)
    }

    fn swiglu_backward(
        gate_nf: Tensor<Self, 2>,
        up_nf: Tensor<Self, 2>,
        dy_nf: Tensor<Self, 2>,
    ) -> (Tensor<Self, 2>, Tensor<Self, 2>) {
        if !is_f32(&gate_nf) {
            return backward::swiglu(gate_nf, up_nf, dy_nf);
        }
        let shape = gate_nf.dims();
        let (gate, up, dy) = (Values::of(gate_nf), Values::of(up_nf), Values::of(dy_nf));
        let (dgate, dup) = pointwise::swiglu_backward(gate.get(), up.get(), dy.get());
        (tensor(dgate, shape), tensor(dup, shape))
    }

    fn rotary(
        x_bshk: Tensor<Self, 4>,
        cos_bsk: Tensor<Self, 3>,
        sin_bsk: Tensor<Self, 3>,
    ) -> Tensor<Self, 4> {
        if !is_f32(&x_bshk) {
            return reference::rotary(x_bshk, cos_bsk, sin_bsk);
        }
        rotate(x_bshk, cos_bsk, sin_bsk, false)
    }

    fn rotary_backward(
        dy_bshk: Tensor<Self, 4>,
        cos_bsk: Tensor<Self, 3>,
        sin_bsk: Tensor<Self, 3>,
    ) -> Tensor<Self, 4> {
        if !is_f32(&dy_bshk) {
            return backward::rotary(dy_bshk, cos_bsk, sin_bsk);
        }
        rotate(dy_bshk, cos_bsk, sin_bsk, true)
    }

    fn attention_saving(
        q_bshk: Tensor<Self, 4>,
        k_bshk: Tensor<Self, 4>,
        v_bshk: Tensor<Self, 4>,
        mask: &AttentionMask,
        scale: f64,
    ) -> AttentionOutput<Self> {
        if !is_f32(&q_bshk) {
            let out_bshk = reference::attention(q_bshk, k_bshk, v_bshk, mask, scale);
            return AttentionOutput { out_bshk, lse_bsh: None };
        }
        let shape @ [batch, queries, heads, _] = q_bshk.dims();
        let (q, k, v) = (Strided::of(q_bshk), Strided::of(k_bshk), Strided::of(v_bshk));
        let inputs = attention_inputs([&q, &k, &v], mask, scale);
        let (out, lse) = attention::forward(&inputs);
        AttentionOutput { out_bshk: tensor(out, shape), lse_bsh: Some(tensor(lse, [batch, queries, heads])) }
    }

    fn attention_backward(
        saved: AttentionSaved<Self>,
        mask: &AttentionMask,
        scale: f64,
        dout_bshk: Tensor<Self, 4>,
    ) -> [Tensor<Self, 4>; 3] {
        let Some(lse_bsh) = saved.output.lse_bsh.clone() else {
            return backward::attention(saved, mask, scale, dout_bshk);
        };
        let (q_shape, k_shape) = (saved.q_bshk.dims(), saved.k_bshk.dims());
        let (q, k, v) = (Strided::of(saved.q_bshk), Strided::of(saved.k_bshk), Strided::of(saved.v_bshk));
        let (out, dout) = (Strided::of(saved.output.out_bshk), Strided::of(dout_bshk));
        let lse = Values::of(lse_bsh);
        let inputs = attention_inputs([&q, &k, &v], mask, scale);
        let outputs = attention::Outputs { out: out.heads(), lse: lse.get(), dout: dout.heads() };
        let (dq, dk, dv) = attention::backward(&inputs, &outputs);
        [tensor(dq, q_shape), tensor(dk, k_shape), tensor(dv, k_shape)]
    }

    fn linear(
        x_ni: Tensor<Self, 2>,
        w_oi: Tensor<Self, 2>,
        bias_o: Option<Tensor<Self, 1>>,
    ) -> Tensor<Self, 2> {
        if !has_weight_path(&x_ni, &w_oi) {
            return reference::linear(x_ni, w_oi, bias_o);
        }
        let ([tokens, inputs], [outputs, w_inputs]) = (x_ni.dims(), w_oi.dims());
        assert_eq!(inputs, w_inputs, "linear: x and w differ in input features");
        let (x, w, bias) = (Values::of(x_ni), WeightValues::of(w_oi), bias_o.map(Values::of));
        let y = linear::forward(x.dense([tokens, inputs]), w.get(), bias.as_ref().map(Values::get), None);
        tensor(y, [tokens, outputs])
    }

    fn linear_input_gradient(dy_no: Tensor<Self, 2>, w_oi: Tensor<Self, 2>) -> Tensor<Self, 2> {
        if !has_weight_path(&dy_no, &w_oi) {
            return backward::linear_input(dy_no, w_oi);
        }
        let ([tokens, outputs], [_, inputs]) = (dy_no.dims(), w_oi.dims());
        let (dy, w) = (Values::of(dy_no), WeightValues::of(w_oi));
        tensor(linear::input_gradient(dy.dense([tokens, outputs]), w.get(), None), [tokens, inputs])
    }

    fn linear_weight_gradient(dy_no: Tensor<Self, 2>, x_ni: Tensor<Self, 2>) -> Tensor<Self, 2> {
        if !is_f32(&x_ni) {
            return backward::linear_weight(dy_no, x_ni);
        }
        let ([tokens, outputs], [_, inputs]) = (dy_no.dims(), x_ni.dims());
        let (dy, x) = (Values::of(dy_no), Values::of(x_ni));
        let dw = linear::weight_gradient(dy.dense([tokens, outputs]), x.dense([tokens, inputs]));
        tensor(dw, [outputs, inputs])
    }

    fn add_linear_weight_gradient(dy_no: Tensor<Self, 2>, x_ni: Tensor<Self, 2>, sum: GradientSlot<'_>) {
        let ([tokens, outputs], [_, inputs]) = (dy_no.dims(), x_ni.dims());
        let (dy, x) = (Values::of(dy_no), Values::of(x_ni));
        linear::add_weight_gradient(dy.dense([tokens, outputs]), x.dense([tokens, inputs]), sum);
    }

    fn linear_bias_gradient(dy_no: Tensor<Self, 2>) -> Tensor<Self, 1> {
        if !is_f32(&dy_no) {
            return backward::linear_bias(dy_no);
        }
        let shape = dy_no.dims();
        tensor(linear::column_sums(Values::of(dy_no).dense(shape)), [shape[1]])
    }

    fn lora_linear_saving(
        x_ni: Tensor<Self, 2>,
        w_oi: Tensor<Self, 2>,
        bias_o: Option<Tensor<Self, 1>>,
        update: &LowRank<Self>,
    ) -> (Tensor<Self, 2>, Tensor<Self, 2>) {
        if !has_weight_path(&x_ni, &w_oi) {
            return reference::lora_linear_saving(x_ni, w_oi, bias_o, update);
        }
        let ([tokens, inputs], [outputs, _], [rank, _]) = (x_ni.dims(), w_oi.dims(), update.a_ri.dims());
        assert_eq!(
            [update.a_ri.dims()[1], w_oi.dims()[1]],
            [inputs; 2],
            "lora_linear: input features differ"
        );
        assert_eq!(update.b_or.dims(), [outputs, rank], "lora_linear: b must be [o, r]");
        let (x, w, bias) = (Values::of(x_ni), WeightValues::of(w_oi), bias_o.map(Values::of));
        let (a, b) = (Values::of(update.a_ri.clone()), Values::of(update.b_or.clone()));
        let x = x.dense([tokens, inputs]);
        let (a, scale) = (a.dense([rank, inputs]), update.scale as f32);
        let down = match &update.dropout {
            Some(dropout) => linear::masked_down(x, dropout.mask(), a, scale),
            None => linear::down(x, a, scale),
        };
        let low_rank = linear::Update {
            inner_nr: linear::DenseView { data: &down, shape: [tokens, rank] },
            outer_rc: b.dense([outputs, rank]).mat().t(),
            mask: None,
        };
        let y = linear::forward(x, w.get(), bias.as_ref().map(Values::get), Some(low_rank));
        (tensor(y, [tokens, outputs]), tensor(down, [tokens, rank]))
    }

    fn lora_linear_backward(
        saved: LowRankSaved<Self>,
        dy_no: Tensor<Self, 2>,
        wants_dx: bool,
    ) -> LowRankGradients<Self> {
        let LowRankSaved { x_ni, down_nr, w_oi, update } = saved;
        if !has_weight_path(&x_ni, &w_oi) {
            return backward::lora_linear(LowRankSaved { x_ni, down_nr, w_oi, update }, dy_no, wants_dx);
        }
        let ([tokens, inputs], [outputs, _], [rank, _]) = (x_ni.dims(), w_oi.dims(), update.a_ri.dims());
        let (x, dy, w, down) =
            (Values::of(x_ni), Values::of(dy_no), WeightValues::of(w_oi), Values::of(down_nr));
        let (a, b) = (Values::of(update.a_ri), Values::of(update.b_or));
        let dy = dy.dense([tokens, outputs]);
        let ddown = linear::up_transposed(dy, b.dense([outputs, rank]), update.scale as f32);
        let ddown = linear::DenseView { data: &ddown, shape: [tokens, rank] };
        let mask = update.dropout.as_ref().map(Dropout::mask);
        let dx = wants_dx.then(|| {
            let outer_rc = a.dense([rank, inputs]).mat();
            let low_rank = linear::Update { inner_nr: ddown, outer_rc, mask };
            tensor(linear::input_gradient(dy, w.get(), Some(low_rank)), [tokens, inputs])
        });
        let x = x.dense([tokens, inputs]);
        let da = match mask {
            Some(mask) => linear::masked_weight_gradient(ddown, x, mask),
            None => linear::weight_gradient(ddown, x),
        };
        LowRankGradients {
            dx_ni: dx,
            da_ri: tensor(da, [rank, inputs]),
            db_or: tensor(linear::weight_gradient(dy, down.dense([tokens, rank])), [outputs, rank]),
        }
    }

    fn layer_norm(x_nd: Tensor<Self, 2>, eps: f64) -> Tensor<Self, 2> {
        if !is_f32(&x_nd) {
            return reference::layer_norm(x_nd, eps);
        }
        let shape = x_nd.dims();
        tensor(norm::layer(Values::of(x_nd).get(), shape[1], None, eps as f32), shape)
    }

    fn layer_norm_backward(x_nd: Tensor<Self, 2>, dy_nd: Tensor<Self, 2>, eps: f64) -> Tensor<Self, 2> {
        if !is_f32(&x_nd) {
            return backward::layer_norm(x_nd, dy_nd, eps);
        }
        let shape = x_nd.dims();
        let (x, dy) = (Values::of(x_nd), Values::of(dy_nd));
        tensor(norm::layer_backward(x.get(), shape[1], None, dy.get(), eps as f32), shape)
    }

    fn modulated_layer_norm(
        x_nd: Tensor<Self, 2>,
        scale_bd: Tensor<Self, 2>,
        shift_bd: Tensor<Self, 2>,
        eps: f64,
    ) -> Tensor<Self, 2> {
        if !is_f32(&x_nd) {
            return reference::modulated_layer_norm(x_nd, scale_bd, shift_bd, eps);
        }
        let (shape, [batch, dim]) = (x_nd.dims(), scale_bd.dims());
        assert!(
            dim == shape[1] && shift_bd.dims() == [batch, dim],
            "modulated_layer_norm: scale and shift are [b, d]"
        );
        assert!(
            batch > 0 && shape[0].is_multiple_of(batch),
            "modulated_layer_norm: the rows are b runs of one length"
        );
        let (x, scale, shift) = (Values::of(x_nd), Values::of(scale_bd), Values::of(shift_bd));
        let modulation = norm::Modulation { scale_bd: scale.get(), shift_bd: shift.get() };
        tensor(norm::layer(x.get(), dim, Some(modulation), eps as f32), shape)
    }

    fn modulated_layer_norm_backward(
        x_nd: Tensor<Self, 2>,
        scale_bd: Tensor<Self, 2>,
        dy_nd: Tensor<Self, 2>,
        eps: f64,
    ) -> [Tensor<Self, 2>; 3] {
        if !is_f32(&x_nd) {
            return backward::modulated_layer_norm(x_nd, scale_bd, dy_nd, eps);
        }
        let (shape, modulation) = (x_nd.dims(), scale_bd.dims());
        let (x, scale, dy) = (Values::of(x_nd), Values::of(scale_bd), Values::of(dy_nd));
        let dx = norm::layer_backward(x.get(), shape[1], Some(scale.get()), dy.get(), eps as f32);
        let (dscale, dshift) = norm::modulation_backward(x.get(), modulation, dy.get(), eps as f32);
        [tensor(dx, shape), tensor(dscale, modulation), tensor(dshift, modulation)]
    }

    fn rounded(x_nd: Tensor<Self, 2>) -> Tensor<Self, 2> {
        if !is_f32(&x_nd) {
            return reference::rounded(x_nd);
        }
        changed(x_nd, rounding::round)
    }

    fn rounded_sum(x_nd: Tensor<Self, 2>, y_nd: Tensor<Self, 2>) -> Tensor<Self, 2> {
        if !is_f32(&x_nd) || !is_f32(&y_nd) {
            return reference::rounded(x_nd + y_nd);
        }
        let x = Values::of(x_nd);
        changed(y_nd, |sum| rounding::add_rounding(x.get(), sum))
    }

    fn narrowed(x_nd: Tensor<Self, 2>) -> Tensor<Self, 2> {
        let shape = x_nd.dims();
        tensor(rounding::narrowed(Values::of(x_nd).get()), shape)
    }

    fn widened(x_nd: Tensor<Self, 2>) -> Tensor<Self, 2> {
        match WeightValues::of(x_nd.clone()).get() {
            linear::Weight::Bf16(values) => tensor(rounding::widened(values), x_nd.dims()),
            linear::Weight::F32(_) => x_nd,
        }
    }

    fn cross_entropy(logits_nv: Tensor<Self, 2>, targets: &[u32], gradient: bool) -> CrossEntropy<Self> {
        if !is_f32(&logits_nv) {
            return reference::cross_entropy(logits_nv, targets, gradient);
        }
        let [n, v] = logits_nv.dims();
        assert_eq!(n, targets.len(), "cross_entropy: a target for each row");
        if !gradient {
            let rows = cross_entropy::forward(Values::of(logits_nv).get(), v, targets);
            return CrossEntropy { rows, dlogits_nv: None };
        }
        let mut rows = Vec::new();
        let dlogits_nv = changed(logits_nv, |x| rows = cross_entropy::backward(x, v, targets));
        CrossEntropy { rows, dlogits_nv: Some(dlogits_nv) }
    }

    fn gelu_tanh(x_nf: Tensor<Self, 2>) -> Tensor<Self, 2> {
        if !is_f32(&x_nf) {
            return reference::gelu_tanh(x_nf);
        }
        let shape = x_nf.dims();
        tensor(pointwise::gelu_tanh(Values::of(x_nf).get()), shape)
    }

    fn gelu_tanh_backward(x_nf: Tensor<Self, 2>, dy_nf: Tensor<Self, 2>) -> Tensor<Self, 2> {
        if !is_f32(&x_nf) {
            return backward::gelu_tanh(x_nf, dy_nf);
        }
        let shape = x_nf.dims();
        tensor(pointwise::gelu_tanh_backward(Values::of(x_nf).get(), Values::of(dy_nf).get()), shape)
    }
}

fn rotate(
    x_bshk: Tensor<Flex, 4>,
    cos: Tensor<Flex, 3>,
    sin: Tensor<Flex, 3>,
    backward: bool,
) -> Tensor<Flex, 4> {
    let shape @ [batch, seq, heads, dim] = x_bshk.dims();
    let [tables, ..] = cos.dims();
    assert_eq!(cos.dims(), [tables, seq, dim], "rotary: tables are [b, s, k] or [1, s, k]");
    assert!(
        sin.dims() == cos.dims() && (tables == 1 || tables == batch),
        "rotary: tables are [b, s, k] or [1, s, k]"
    );
    assert!(dim.is_multiple_of(2), "rotary: an even head dimension");
    let (x, cos, sin) = (Values::of(x_bshk), Values::of(cos), Values::of(sin));
    let rotation =
        pointwise::Rotation { cos: cos.get(), sin: sin.get(), rows: (tables * seq).max(1), backward };
    tensor(pointwise::rotary(x.get(), [batch * seq, heads, dim], &rotation), shape)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shape_of_no_elements_passes_through() {
        let device = Default::default();
        let x = Tensor::<Flex, 2>::zeros([0, 8], &device);
        assert_eq!(<Flex as ModelBackend>::layer_norm(x.clone(), 1e-5).dims(), [0, 8]);
        assert_eq!(<Flex as ModelBackend>::linear(x, Tensor::zeros([3, 8], &device), None).dims(), [0, 3]);
    }
}
