//! The operations on accelerators: any of burn's cubecl backends, which is what its CUDA backend is without fusion.
//!
//! Each operation is one kernel, forward and backward; what is between them is burn's own. A step of a 3B model is thousands of small
//! kernels, and what the host spends on each counts as much as what the card does, so fewer and plainer ones win over a compiler that
//! looks for what can be joined.
//!
//! ```text
//! launch      tensors as kernels see them: contiguous float32, in vectors where the width allows it
//! rows        norms, and their gradients: one cube a row
//! pointwise   SwiGLU, GELU, sums that are rounded, what follows a product
//! product     matrix products: which of cubek's kernels multiplies what
//! low_rank    what a low-rank update adds to one
//! rotary      rotary embedding, and back
//! flat        the flat space: sums of gradients, their norm, AdamW
//! scores      a tile of attention's scores: softmax under a mask, and back (`blocked` has the products around it)
//! ```
//!
//! | operation | on an accelerator |
//! |---|---|
//! | products with a bfloat16 weight | the other side is rounded to bfloat16, tensor cores add up in float32, and that is what is written; the weight is never copied |
//! | LoRA beside a product | of usual ranks in float32 on plain cores, in the passes that round the input and add the bias; else as the next |
//! | products of float32 alone (expert, sensor, gradients of weights) | exact under a float32 model; under a bfloat16 one tensor cores may round the inputs ([`precision`](super::precision)) |
//! | attention | [`blocked`](super::blocked): tile by tile, segment by segment |
//!
//! Activations, gradients and everything that trains are float32, as `torch.autocast` keeps its master weights; what a product
//! rounds is what PyTorch rounds there.
//!
//! What this module does not do: name a runtime. Nothing is instantiated here; the crate that names one pays for it once.

mod flat;
mod launch;
mod low_rank;
mod pointwise;
mod product;
mod rotary;
mod rows;
mod scores;

use std::ops::Range;

use burn::tensor::{DType, Tensor, TensorPrimitive, backend::Backend};
use burn_cubecl::{BoolElement, CubeBackend, CubeRuntime, FloatElement, IntElement, tensor::CubeTensor};
use half::bf16;

use self::{
    launch::{floats, primitive, strided_floats},
    low_rank::Factor,
    pointwise::Finish,
};
use super::{
    AttentionMask, AttentionOutput, AttentionSaved, LinearLayer, LowRank, LowRankGradients, LowRankSaved,
    ModelBackend, Onto, Tape, blocked,
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

    fn rms_norm_backward_onto(
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
        let [dx_nd, _] = rows::layer_norm_backward(floats(x_nd), None, floats(dy_nd), eps);
        wrapped(dx_nd)
    }

    fn modulated_layer_norm(
        x_nd: Tensor<Self, 2>,
        scale_bd: Tensor<Self, 2>,
        shift_bd: Tensor<Self, 2>,
        eps: f64,
    ) -> Tensor<Self, 2> {
        wrapped(rows::layer_norm(floats(x_nd), Some([floats(scale_bd), floats(shift_bd)]), eps))
    }

    fn modulated_layer_norm_backward(
        x_nd: Tensor<Self, 2>,
        scale_bd: Tensor<Self, 2>,
        dy_nd: Tensor<Self, 2>,
        eps: f64,
    ) -> [Tensor<Self, 2>; 3] {
        let ([n, d], batch) = (x_nd.dims(), scale_bd.dims()[0]);
        let over_rows =
            |x_nd: Tensor<Self, 2>| x_nd.reshape([batch, n / batch, d]).sum_dim(1).reshape([batch, d]);
        let [dx, products] =
            rows::layer_norm_backward(floats(x_nd), Some(floats(scale_bd)), floats(dy_nd.clone()), eps);
        [wrapped(dx), over_rows(wrapped(products)), over_rows(dy_nd)]
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

    fn turned(inputs_bshk: [Tensor<Self, 4>; 3], tables_bsk: [Tensor<Self, 3>; 2]) -> [Tensor<Self, 4>; 3] {
        rotary::rotary(inputs_bshk.map(strided_floats), 2, Some(tables_bsk.map(floats))).map(wrapped)
    }

    fn turned_backward(
        gradients_bshk: [Tensor<Self, 4>; 3],
        tables_bsk: [Tensor<Self, 3>; 2],
    ) -> [Tensor<Self, 4>; 3] {
        rotary::rotary_backward(gradients_bshk.map(strided_floats), 2, Some(tables_bsk.map(floats)))
            .map(wrapped)
    }

    fn attention_inputs(inputs_bshk: [Tensor<Self, 4>; 3], mask: &AttentionMask) -> [Tensor<Self, 4>; 3] {
        let inputs = inputs_bshk.map(strided_floats);
        if matches!(mask, AttentionMask::Segments(_)) || inputs.iter().all(scores::lies_by_head) {
            return inputs.map(wrapped);
        }
        rotary::rotary(inputs, 0, None).map(wrapped)
    }

    fn attention_gradients(gradients_bshk: [Tensor<Self, 4>; 3]) -> [Tensor<Self, 4>; 3] {
        let gradients = gradients_bshk.map(strided_floats);
        if gradients.iter().all(CubeTensor::is_contiguous) {
            return gradients.map(wrapped);
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
        blocked::attention(q_bshk, k_bshk, v_bshk, mask, scale)
    }

    fn attention_backward(
        saved: AttentionSaved<Self>,
        mask: &AttentionMask,
        scale: f64,
        dout_bshk: Tensor<Self, 4>,
    ) -> [Tensor<Self, 4>; 3] {
        blocked::attention_backward(saved, mask, scale, dout_bshk)
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
        let y_no = rounded_like(x_ni, w_oi.transpose());
        finished(y_no, Finish { bias_o: bias_o.map(floats), ..Finish::default() })
    }

    fn linear_onto(
        onto: Onto<Self>,
        x_ni: Tensor<Self, 2>,
        w_oi: Tensor<Self, 2>,
        bias_o: Option<Tensor<Self, 1>>,
    ) -> Tensor<Self, 2> {
        finished(rounded_like(x_ni, w_oi.transpose()), finish(Some(onto), bias_o))
    }

    fn linear_input_gradient(dy_no: Tensor<Self, 2>, w_oi: Tensor<Self, 2>) -> Tensor<Self, 2> {
        rounded_like(dy_no, w_oi)
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
        updated(x_ni, w_oi, update, finish(None, bias_o))
    }

    fn linears_saving(
        x_ni: Tensor<Self, 2>,
        layers: Vec<LinearLayer<Self>>,
    ) -> Vec<(Tensor<Self, 2>, Option<Tensor<Self, 2>>)> {
        let narrow = layers.iter().all(|layer| layer.w_oi.dtype() == DType::BF16);
        let updates: Option<Vec<_>> = layers.iter().map(|layer| layer.update.clone()).collect();
        let (downs, x_ni) = match updates {
            Some(updates) if !updates.is_empty() => {
                let ms =
                    updates.into_iter().map(|LowRank { a_ri, scale, .. }| (Factor::a(floats(a_ri)), scale));
                let x = floats(x_ni);
                let (downs, narrowed) = low_rank::reduced(x.clone(), ms.collect(), narrow);
                (downs.into_iter().map(Some).collect(), wrapped(narrowed.unwrap_or(x)))
            }
            // None with an update, or some without.
            _ => {
                let rounds = narrow && layers.iter().all(|layer| layer.update.is_none());
                let x_ni = if rounds && x_ni.dtype() != DType::BF16 { x_ni.cast(DType::BF16) } else { x_ni };
                (vec![None; layers.len()], x_ni)
            }
        };
        let each = layers.into_iter().zip(downs).map(|(layer, down)| {
            let LinearLayer { w_oi, bias_o, update } = layer;
            match (update, down) {
                (Some(update), Some(down)) => {
                    let y = primitive(rounded_like(x_ni.clone(), w_oi.transpose()));
                    let (b, finish) = (Factor::b(floats(update.b_or)), finish(None, bias_o));
                    (wrapped(low_rank::added(y, down.clone(), b, finish)), Some(wrapped(down)))
                }
                (Some(update), None) => {
                    let (y_no, down_nr) = Self::lora_linear_saving(x_ni.clone(), w_oi, bias_o, &update);
                    (y_no, Some(down_nr))
                }
                (None, _) => (<Self as ModelBackend>::linear(x_ni.clone(), w_oi, bias_o), None),
            }
        });
        each.collect()
    }

    fn lora_linear_onto_saving(
        onto: Onto<Self>,
        x_ni: Tensor<Self, 2>,
        w_oi: Tensor<Self, 2>,
        bias_o: Option<Tensor<Self, 1>>,
        update: &LowRank<Self>,
    ) -> (Tensor<Self, 2>, Tensor<Self, 2>) {
        updated(x_ni, w_oi, update, finish(Some(onto), bias_o))
    }

    fn lora_linear_backward(
        saved: LowRankSaved<Self>,
        dy_no: Tensor<Self, 2>,
        wants_dx: bool,
    ) -> LowRankGradients<Self> {
        pulled(saved, dy_no, wants_dx.then(Finish::default))
    }

    fn lora_linear_backward_onto(
        sum_ni: Tensor<Self, 2>,
        saved: LowRankSaved<Self>,
        dy_no: Tensor<Self, 2>,
    ) -> LowRankGradients<Self> {
        pulled(saved, dy_no, Some(Finish { more_no: Some(floats(sum_ni)), ..Finish::default() }))
    }
}

/// What becomes of a layer's product.
fn finish<B, R>(onto: Option<Onto<B>>, bias_o: Option<Tensor<B, 1>>) -> Finish<R>
where
    B: ModelBackend<FloatTensorPrimitive = CubeTensor<R>>,
    R: CubeRuntime,
{
    let rounded = onto.as_ref().is_some_and(|onto| onto.rounded);
    Finish { bias_o: bias_o.map(floats), more_no: onto.map(|onto| floats(onto.x_no)), rounded }
}

fn finished<B, R>(y_no: Tensor<B, 2>, finish: Finish<R>) -> Tensor<B, 2>
where
    B: ModelBackend<FloatTensorPrimitive = CubeTensor<R>>,
    R: CubeRuntime,
{
    if finish.is_nothing() { y_no } else { wrapped(pointwise::finished(primitive(y_no), finish)) }
}

/// A layer with its update, finished, and `scale * x a^T`.
fn updated<B, R>(
    x_ni: Tensor<B, 2>,
    w_oi: Tensor<B, 2>,
    update: &LowRank<B>,
    finish: Finish<R>,
) -> (Tensor<B, 2>, Tensor<B, 2>)
where
    B: ModelBackend<FloatTensorPrimitive = CubeTensor<R>>,
    R: CubeRuntime,
{
    let [a, b] = [&update.a_ri, &update.b_or].map(|factor| floats(factor.clone()));
    let (w, factors) = (primitive(w_oi.transpose()), [Factor::a(a), Factor::b(b)]);
    let [y, down] = low_rank::applied(floats(x_ni), w, factors, update.scale, finish);
    (wrapped(y), wrapped(down))
}

/// Gradients of a layer with an update; that of its input is made, and finished, if it says how.
fn pulled<B, R>(saved: LowRankSaved<B>, dy_no: Tensor<B, 2>, dx: Option<Finish<R>>) -> LowRankGradients<B>
where
    B: ModelBackend<FloatTensorPrimitive = CubeTensor<R>>,
    R: CubeRuntime,
{
    let LowRankSaved { x_ni, down_nr, w_oi, update } = saved;
    let (dy, a, b) = (floats(dy_no), floats(update.a_ri), floats(update.b_or));
    let (dx_ni, ddown_nr) = match dx {
        Some(finish) => {
            let factors = [Factor::b(b), Factor::a(a)];
            let [dx, ddown] = low_rank::applied(dy.clone(), primitive(w_oi), factors, update.scale, finish);
            (Some(wrapped(dx)), wrapped(ddown))
        }
        None => {
            let (mut ddowns, _) = low_rank::reduced(dy.clone(), vec![(Factor::b(b), update.scale)], false);
            (None, wrapped(ddowns.remove(0)))
        }
    };
    LowRankGradients {
        dx_ni,
        da_ri: B::linear_weight_gradient(ddown_nr, x_ni),
        db_or: B::linear_weight_gradient(wrapped(dy), down_nr),
    }
}

/// `x w`. Where `w` is narrower, `x` is rounded to its type: the weight of a layer is read once and copied never.
fn rounded_like<B: ModelBackend>(x_nk: Tensor<B, 2>, w_ko: Tensor<B, 2>) -> Tensor<B, 2> {
    let narrow = w_ko.dtype();
    B::product(if x_nk.dtype() == narrow { x_nk } else { x_nk.cast(narrow) }, w_ko)
}

fn wrapped<B, R, const D: usize>(x: CubeTensor<R>) -> Tensor<B, D>
where
    B: Backend<FloatTensorPrimitive = CubeTensor<R>>,
    R: CubeRuntime,
{
    Tensor::from_primitive(TensorPrimitive::Float(x))
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

    fn lower<const D: usize>(tensor: Tensor<Self, D>) -> Tensor<Self, D> {
        tensor
    }
}
