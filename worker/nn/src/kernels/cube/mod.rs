//! The operations on accelerators: any of burn's cubecl backends, which is what its CUDA backend is without
//! fusion.
//!
//! Each operation is one kernel, forward and backward; what is between them is burn's own. A step of a 3B
//! model is thousands of small kernels, and what the host spends on each counts as much as what the GPU does,
//! so fewer and plainer ones win over a compiler that looks for what can be joined.
//!
//! ```text
//! launch      tensors as kernels see them: contiguous float32, in vectors where the width allows it
//! rows        norms, and their gradients: one cube a row
//! pointwise   SwiGLU, GELU, sums that are rounded, what follows a product
//! product     matrix products: which of cubek's kernels multiplies what
//! low_rank    what a low-rank update adds to one
//! dropout     what a low-rank update does not read
//! linear      linear layers, made of these four
//! rotary      rotary embedding and the order by heads, and back
//! flat        the flat parameter buffer: sums of gradients, their norm, AdamW
//! scores      a tile of attention's scores: softmax under a mask, and back (`blockwise` has the products
//!             around it)
//! ```
//!
//! | operation | on an accelerator |
//! |---|---|
//! | products with a bfloat16 weight | bfloat16 inputs, float32 sums and results; no copy of the weight |
//! | LoRA beside a product | usual ranks: float32 on plain cores, in the passes around it |
//! | products of float32 alone | exact under a float32 model, else as [`precision`](super::precision) says |
//! | attention | [`blockwise`](super::blockwise): tile by tile, segment by segment |
//!
//! Activations, gradients and everything that trains are float32, as `torch.autocast` keeps its master
//! weights; what a product rounds is what PyTorch rounds there.
//!
//! What this module does not do: name a runtime. Nothing is instantiated here; the crate that names one pays
//! for it once.

mod dropout;
mod flat;
mod launch;
mod linear;
mod low_rank;
mod pointwise;
mod product;
mod rotary;
mod rows;
mod scores;

use std::ops::Range;

use burn::tensor::Tensor;
use burn_cubecl::{
    BoolElement, CubeBackend, CubeRuntime, FloatElement, IntElement, kernel::into_contiguous,
    tensor::CubeTensor,
};
use half::bf16;

use self::{
    launch::{floats, primitive, strided_floats, wrapped},
    pointwise::Finish,
};
use super::{
    AdaNorm, AttentionMask, AttentionOutput, AttentionSaved, DropoutRows, LinearLayer, LowRank,
    LowRankGradients, LowRankSaved, ModelBackend, Residual, Tape, blockwise,
    flat::{
        Gradient, OnDevice, Run,
        tensors::{Origins, Updated},
    },
};

impl<R, F, I, BT> ModelBackend for CubeBackend<R, F, I, BT>
where
    R: CubeRuntime,
    F: FloatElement,
    I: IntElement,
    BT: BoolElement,
{
    type Flat = OnDevice<Self>;

    fn matrix_view(flat: Tensor<Self, 1>, start: usize, shape: [usize; 2]) -> Tensor<Self, 2> {
        wrapped(launch::view(primitive(flat), start, shape))
    }

    fn rms_norm(x_nd: Tensor<Self, 2>, gain_d: Tensor<Self, 1>, eps: f64) -> Tensor<Self, 2> {
        wrapped(rows::rms_norm::<R, f32>(floats(x_nd), floats(gain_d), eps))
    }

    fn rms_norm_for_rounding(x_nd: Tensor<Self, 2>, gain_d: Tensor<Self, 1>, eps: f64) -> Tensor<Self, 2> {
        wrapped(rows::rms_norm::<R, bf16>(floats(x_nd), floats(gain_d), eps))
    }

    fn rms_norm_backward(
        x_nd: Tensor<Self, 2>,
        gain_d: Tensor<Self, 1>,
        dy_nd: Tensor<Self, 2>,
        eps: f64,
    ) -> Tensor<Self, 2> {
        wrapped(rows::rms_norm_backward(floats(x_nd), floats(gain_d), floats(dy_nd), None, eps))
    }

    fn rms_norm_backward_residual(
        sum_nd: Tensor<Self, 2>,
        x_nd: Tensor<Self, 2>,
        gain_d: Tensor<Self, 1>,
        dy_nd: Tensor<Self, 2>,
        eps: f64,
    ) -> Tensor<Self, 2> {
        let (x, gain, dy, sum) = (floats(x_nd), floats(gain_d), floats(dy_nd), floats(sum_nd));
        wrapped(rows::rms_norm_backward(x, gain, dy, Some(sum), eps))
    }

    fn layer_norm(x_nd: Tensor<Self, 2>, eps: f64) -> Tensor<Self, 2> {
        wrapped(rows::layer_norm(floats(x_nd), None, eps))
    }

    fn layer_norm_backward(x_nd: Tensor<Self, 2>, dy_nd: Tensor<Self, 2>, eps: f64) -> Tensor<Self, 2> {
        let (dx_nd, _) = rows::layer_norm_backward(floats(x_nd), None, floats(dy_nd), None, eps);
        wrapped(dx_nd)
    }

    fn layer_norm_backward_residual(
        sum_nd: Tensor<Self, 2>,
        x_nd: Tensor<Self, 2>,
        dy_nd: Tensor<Self, 2>,
        eps: f64,
    ) -> Tensor<Self, 2> {
        let sum = Some(floats(sum_nd));
        let (dx_nd, _) = rows::layer_norm_backward(floats(x_nd), None, floats(dy_nd), sum, eps);
        wrapped(dx_nd)
    }

    fn modulated_layer_norm(
        x_nd: Tensor<Self, 2>,
        scale_bd: Tensor<Self, 2>,
        shift_bd: Tensor<Self, 2>,
        eps: f64,
    ) -> Tensor<Self, 2> {
        Self::ada_layer_norm(
            x_nd,
            Tensor::cat(vec![scale_bd, shift_bd], 1),
            AdaNorm { shift_first: false, eps },
        )
    }

    fn modulated_layer_norm_backward(
        x_nd: Tensor<Self, 2>,
        scale_bd: Tensor<Self, 2>,
        dy_nd: Tensor<Self, 2>,
        eps: f64,
    ) -> [Tensor<Self, 2>; 3] {
        let d = x_nd.dims()[1];
        // The shift is not read.
        let ada_be = Tensor::cat(vec![scale_bd.clone(), scale_bd], 1);
        let how = AdaNorm { shift_first: false, eps };
        let [dx_nd, dada_be] = Self::ada_layer_norm_backward(None, x_nd, ada_be, dy_nd, how);
        [dx_nd, dada_be.clone().narrow(1, 0, d), dada_be.narrow(1, d, d)]
    }

    fn ada_layer_norm(x_nd: Tensor<Self, 2>, ada_be: Tensor<Self, 2>, how: AdaNorm) -> Tensor<Self, 2> {
        wrapped(rows::layer_norm(floats(x_nd), Some((floats(ada_be), how.shift_first)), how.eps))
    }

    fn ada_layer_norm_backward(
        sum_nd: Option<Tensor<Self, 2>>,
        x_nd: Tensor<Self, 2>,
        ada_be: Tensor<Self, 2>,
        dy_nd: Tensor<Self, 2>,
        how: AdaNorm,
    ) -> [Tensor<Self, 2>; 2] {
        let (ada, dy) = (floats(ada_be), floats(dy_nd));
        let modulation = Some((ada.clone(), how.shift_first));
        let (dx, products) =
            rows::layer_norm_backward(floats(x_nd), modulation, dy.clone(), sum_nd.map(floats), how.eps);
        [wrapped(dx), wrapped(rows::ada_gradient(ada, how.shift_first, products, dy))]
    }

    fn swiglu(gate_nf: Tensor<Self, 2>, up_nf: Tensor<Self, 2>) -> Tensor<Self, 2> {
        wrapped(pointwise::swiglu::<R, f32>(floats(gate_nf), floats(up_nf)))
    }

    fn swiglu_for_rounding(gate_nf: Tensor<Self, 2>, up_nf: Tensor<Self, 2>) -> Tensor<Self, 2> {
        wrapped(pointwise::swiglu::<R, bf16>(floats(gate_nf), floats(up_nf)))
    }

    fn swiglu_backward(
        gate_nf: Tensor<Self, 2>,
        up_nf: Tensor<Self, 2>,
        dy_nf: Tensor<Self, 2>,
    ) -> (Tensor<Self, 2>, Tensor<Self, 2>) {
        let [dgate, dup] = pointwise::swiglu_backward(floats(gate_nf), floats(up_nf), floats(dy_nf));
        (wrapped(dgate), wrapped(dup))
    }

    fn gelu_tanh(x_nf: Tensor<Self, 2>) -> Tensor<Self, 2> {
        wrapped(pointwise::gelu_tanh(floats(x_nf)))
    }

    fn gelu_tanh_backward(x_nf: Tensor<Self, 2>, dy_nf: Tensor<Self, 2>) -> Tensor<Self, 2> {
        wrapped(pointwise::gelu_tanh_backward(floats(x_nf), floats(dy_nf)))
    }

    fn gelu_erf(x_nf: Tensor<Self, 2>) -> Tensor<Self, 2> {
        wrapped(pointwise::gelu_erf(floats(x_nf)))
    }

    fn gelu_erf_backward(x_nf: Tensor<Self, 2>, dy_nf: Tensor<Self, 2>) -> Tensor<Self, 2> {
        wrapped(pointwise::gelu_erf_backward(floats(x_nf), floats(dy_nf)))
    }

    fn rounded(x_nd: Tensor<Self, 2>) -> Tensor<Self, 2> {
        wrapped(pointwise::rounded(floats(x_nd)))
    }

    fn rounded_sum(x_nd: Tensor<Self, 2>, y_nd: Tensor<Self, 2>) -> Tensor<Self, 2> {
        wrapped(pointwise::rounded_sum(floats(x_nd), floats(y_nd)))
    }

    fn rotary(
        x_bshk: Tensor<Self, 4>,
        cos_bsk: Tensor<Self, 3>,
        sin_bsk: Tensor<Self, 3>,
    ) -> Tensor<Self, 4> {
        let [y] = rotary::rotary([strided_floats(x_bshk)], 1, Some([cos_bsk, sin_bsk].map(floats)));
        wrapped(y)
    }

    fn rotary_backward(
        dy_bshk: Tensor<Self, 4>,
        cos_bsk: Tensor<Self, 3>,
        sin_bsk: Tensor<Self, 3>,
    ) -> Tensor<Self, 4> {
        let [dx] =
            rotary::rotary_backward([strided_floats(dy_bshk)], 1, Some([cos_bsk, sin_bsk].map(floats)));
        wrapped(dx)
    }

    fn rope(inputs_bshk: [Tensor<Self, 4>; 3], tables_bsk: [Tensor<Self, 3>; 2]) -> [Tensor<Self, 4>; 3] {
        rotary::rotary(inputs_bshk.map(strided_floats), 2, Some(tables_bsk.map(floats))).map(wrapped)
    }

    fn rope_backward(
        gradients_bshk: [Tensor<Self, 4>; 3],
        tables_bsk: [Tensor<Self, 3>; 2],
    ) -> [Tensor<Self, 4>; 3] {
        rotary::rotary_backward(gradients_bshk.map(strided_floats), 2, Some(tables_bsk.map(floats)))
            .map(wrapped)
    }

    fn attention_inputs(inputs_bshk: [Tensor<Self, 4>; 3], mask: &AttentionMask) -> [Tensor<Self, 4>; 3] {
        let inputs = inputs_bshk.map(strided_floats);
        // The kernel works in pairs along a head: attention copies what is odd.
        let is_odd = !inputs.iter().all(rotary::has_pairs);
        if is_odd || matches!(mask, AttentionMask::Segments(_)) || inputs.iter().all(scores::lies_by_head) {
            return inputs.map(wrapped);
        }
        rotary::rotary(inputs, 0, None).map(wrapped)
    }

    fn attention_gradients(gradients_bshk: [Tensor<Self, 4>; 3]) -> [Tensor<Self, 4>; 3] {
        let gradients = gradients_bshk.map(strided_floats);
        if gradients.iter().all(CubeTensor::is_contiguous) {
            return gradients.map(wrapped);
        }
        if !gradients.iter().all(rotary::has_pairs) {
            return gradients.map(into_contiguous).map(wrapped);
        }
        rotary::rotary_backward(gradients, 0, None).map(wrapped)
    }

    fn attention_saving(
        q_bshk: Tensor<Self, 4>,
        k_bshk: Tensor<Self, 4>,
        v_bshk: Tensor<Self, 4>,
        mask: &AttentionMask,
        scale: f64,
    ) -> AttentionOutput<Self> {
        let [q_bshk, k_bshk, v_bshk] = Self::attention_inputs([q_bshk, k_bshk, v_bshk], mask);
        blockwise::attention(q_bshk, k_bshk, v_bshk, mask, scale)
    }

    fn attention_backward(
        saved: AttentionSaved<Self>,
        mask: &AttentionMask,
        scale: f64,
        dout_bshk: Tensor<Self, 4>,
    ) -> [Tensor<Self, 4>; 3] {
        blockwise::attention_backward(saved, mask, scale, dout_bshk)
    }

    fn flat_accumulate(flat: Tensor<Self, 1>, gradients: Vec<Gradient<Self>>) -> Tensor<Self, 1> {
        let addends = gradients.into_iter().filter(|gradient| !gradient.range.is_empty());
        let addends = addends.map(|Gradient { range, first, values }| flat::Addend {
            start: range.start,
            first,
            values: floats(values),
        });
        wrapped(flat::accumulate(primitive(flat), addends.collect()))
    }

    fn flat_squares(flat: &Tensor<Self, 1>, range: &Range<usize>) -> Vec<Tensor<Self, 1>> {
        let sums = (!range.is_empty()).then(|| wrapped(flat::squares(floats(flat.clone()), range)));
        sums.into_iter().collect()
    }

    fn flat_widen(flat: Tensor<Self, 1>, halves: &Tensor<Self, 1>, range: &Range<usize>) -> Tensor<Self, 1> {
        wrapped(flat::widen(primitive(flat), primitive(halves.clone()), range))
    }

    fn flat_adamw(
        state: Updated<Self>,
        grads: &Tensor<Self, 1>,
        from: Origins,
        runs: &[Run],
    ) -> Updated<Self> {
        flat::adamw(state, grads, from, runs)
    }

    fn product<const D: usize>(x: Tensor<Self, D>, y: Tensor<Self, D>) -> Tensor<Self, D> {
        wrapped(product::product(primitive(x), primitive(y)))
    }

    fn linear(
        x_ni: Tensor<Self, 2>,
        w_oi: Tensor<Self, 2>,
        bias_o: Option<Tensor<Self, 1>>,
    ) -> Tensor<Self, 2> {
        let y_no = linear::rounded_like(x_ni, w_oi.transpose());
        linear::finished(y_no, Finish { bias_o: bias_o.map(floats), ..Finish::default() })
    }

    fn linear_residual(
        residual: Residual<Self>,
        x_ni: Tensor<Self, 2>,
        w_oi: Tensor<Self, 2>,
        bias_o: Option<Tensor<Self, 1>>,
    ) -> Tensor<Self, 2> {
        linear::finished(linear::rounded_like(x_ni, w_oi.transpose()), linear::finish(Some(residual), bias_o))
    }

    fn linear_input_gradient(dy_no: Tensor<Self, 2>, w_oi: Tensor<Self, 2>) -> Tensor<Self, 2> {
        linear::rounded_like(dy_no, w_oi)
    }

    fn linear_weight_gradient(dy_no: Tensor<Self, 2>, x_ni: Tensor<Self, 2>) -> Tensor<Self, 2> {
        Self::product(dy_no.transpose(), x_ni)
    }

    fn lora_linear_saving(
        x_ni: Tensor<Self, 2>,
        w_oi: Tensor<Self, 2>,
        bias_o: Option<Tensor<Self, 1>>,
        update: &LowRank<Self>,
    ) -> (Tensor<Self, 2>, Tensor<Self, 2>) {
        linear::updated(x_ni, w_oi, update, linear::finish(None, bias_o))
    }

    fn linears_saving(
        x_ni: Tensor<Self, 2>,
        layers: Vec<LinearLayer<Self>>,
    ) -> Vec<(Tensor<Self, 2>, Option<Tensor<Self, 2>>)> {
        linear::together(x_ni, layers)
    }

    fn lora_linear_residual_saving(
        residual: Residual<Self>,
        x_ni: Tensor<Self, 2>,
        w_oi: Tensor<Self, 2>,
        bias_o: Option<Tensor<Self, 1>>,
        update: &LowRank<Self>,
    ) -> (Tensor<Self, 2>, Tensor<Self, 2>) {
        linear::updated(x_ni, w_oi, update, linear::finish(Some(residual), bias_o))
    }

    fn lora_linear_backward(
        saved: LowRankSaved<Self>,
        dy_no: Tensor<Self, 2>,
        wants_dx: bool,
    ) -> LowRankGradients<Self> {
        linear::pulled(saved, dy_no, wants_dx.then(Finish::default))
    }

    fn lora_linear_backward_residual(
        sum_ni: Tensor<Self, 2>,
        saved: LowRankSaved<Self>,
        dy_no: Tensor<Self, 2>,
    ) -> LowRankGradients<Self> {
        linear::pulled(saved, dy_no, Some(Finish { more_no: Some(floats(sum_ni)), ..Finish::default() }))
    }
}

impl<R, F, I, BT> Tape for CubeBackend<R, F, I, BT>
where
    R: CubeRuntime,
    F: FloatElement,
    I: IntElement,
    BT: BoolElement,
{
    type Base = Self;

    fn lift<const D: usize>(tensor: Tensor<Self, D>) -> Tensor<Self, D> {
        tensor
    }

    fn lift_rows(rows: DropoutRows<Self>) -> DropoutRows<Self> {
        rows
    }

    fn lower<const D: usize>(tensor: Tensor<Self, D>) -> Tensor<Self, D> {
        tensor
    }
}
