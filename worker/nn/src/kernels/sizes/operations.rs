//! The fused operations by size: what each makes, how much it multiplies and adds for that, and what it
//! needs meanwhile on the CPU (`kernels::flex`).

use burn::tensor::{DType, Int, Tensor};

use super::{
    fused::{Fusion, next, raw},
    on_gpu::{self, is_on_gpu},
    products,
    router::{Client, Sizes, SizesDevice},
};
use crate::kernels::{
    AttentionMask, AttentionOps, AttentionOutput, AttentionSaved, CrossEntropy, FlatOps, ModelBackend,
    QUERY_BLOCK, RowOps, Tape,
};

fn most_keys(mask: &AttentionMask, keys: usize) -> usize {
    match mask {
        AttentionMask::Segments(ends) | AttentionMask::CausalSegments(ends) => {
            ends.windows(2).map(|pair| (pair[1] - pair[0]) as usize).max().unwrap_or(0)
        }
        _ => keys,
    }
}

impl RowOps for Sizes {
    fn rms_norm(x_nd: Tensor<Self, 2>, gain_d: Tensor<Self, 1>, _eps: f64) -> Tensor<Self, 2> {
        let shape = x_nd.dims();
        Fusion::new([raw(x_nd), raw(gain_d)]).makes(shape).one()
    }

    fn rms_norm_for_rounding(
        x_nd: Tensor<Self, 2>,
        gain_d: Tensor<Self, 1>,
        _eps: f64,
        to: DType,
    ) -> Tensor<Self, 2> {
        let (shape, to) = (x_nd.dims(), if is_on_gpu(&x_nd) { to } else { DType::F32 });
        Fusion::new([raw(x_nd), raw(gain_d)]).makes_in(shape, to).one()
    }

    fn rms_norm_backward(
        x_nd: Tensor<Self, 2>,
        gain_d: Tensor<Self, 1>,
        dy_nd: Tensor<Self, 2>,
        _eps: f64,
    ) -> Tensor<Self, 2> {
        let shape = x_nd.dims();
        Fusion::new([raw(x_nd), raw(gain_d), raw(dy_nd)]).makes(shape).one()
    }

    fn swiglu(gate_nf: Tensor<Self, 2>, up_nf: Tensor<Self, 2>) -> Tensor<Self, 2> {
        let shape = gate_nf.dims();
        Fusion::new([raw(gate_nf), raw(up_nf)]).makes(shape).one()
    }

    fn swiglu_for_rounding(gate_nf: Tensor<Self, 2>, up_nf: Tensor<Self, 2>, to: DType) -> Tensor<Self, 2> {
        let (shape, to) = (gate_nf.dims(), if is_on_gpu(&gate_nf) { to } else { DType::F32 });
        Fusion::new([raw(gate_nf), raw(up_nf)]).makes_in(shape, to).one()
    }

    fn swiglu_joined(gate_up_ne: Tensor<Self, 2>, to: Option<DType>) -> Tensor<Self, 2> {
        let [rows, both] = gate_up_ne.dims();
        Fusion::new([raw(gate_up_ne)]).makes_in([rows, both / 2], to.unwrap_or(DType::F32)).one()
    }

    fn swiglu_joined_backward(
        gate_up_ne: Tensor<Self, 2>,
        dy_nf: Tensor<Self, 2>,
        to: Option<DType>,
    ) -> Tensor<Self, 2> {
        let shape = gate_up_ne.dims();
        let fused = Fusion::new([raw(gate_up_ne), raw(dy_nf)]);
        fused.makes_in(shape, to.unwrap_or(DType::F32)).one()
    }

    fn swiglu_backward(
        gate_nf: Tensor<Self, 2>,
        up_nf: Tensor<Self, 2>,
        dy_nf: Tensor<Self, 2>,
    ) -> (Tensor<Self, 2>, Tensor<Self, 2>) {
        let shape = gate_nf.dims();
        let mut made = Fusion::new([gate_nf, up_nf, dy_nf].map(raw)).makes(shape).makes(shape).run();
        (next(&mut made), next(&mut made))
    }

    fn linear_bias_gradient(dy_no: Tensor<Self, 2>) -> Tensor<Self, 1> {
        let [_, outputs] = dy_no.dims();
        Fusion::new([raw(dy_no)]).makes([outputs]).one()
    }

    fn layer_norm(x_nd: Tensor<Self, 2>, _eps: f64) -> Tensor<Self, 2> {
        let shape = x_nd.dims();
        Fusion::new([raw(x_nd)]).makes(shape).one()
    }

    fn layer_norm_backward(x_nd: Tensor<Self, 2>, dy_nd: Tensor<Self, 2>, _eps: f64) -> Tensor<Self, 2> {
        let shape = x_nd.dims();
        Fusion::new([raw(x_nd), raw(dy_nd)]).makes(shape).one()
    }

    fn modulated_layer_norm(
        x_nd: Tensor<Self, 2>,
        scale_bd: Tensor<Self, 2>,
        shift_bd: Tensor<Self, 2>,
        _eps: f64,
    ) -> Tensor<Self, 2> {
        let shape = x_nd.dims();
        Fusion::new([raw(x_nd), raw(scale_bd), raw(shift_bd)]).makes(shape).one()
    }

    fn modulated_layer_norm_backward(
        x_nd: Tensor<Self, 2>,
        scale_bd: Tensor<Self, 2>,
        dy_nd: Tensor<Self, 2>,
        _eps: f64,
    ) -> [Tensor<Self, 2>; 3] {
        let (shape, modulation) = (x_nd.dims(), scale_bd.dims());
        let fused = Fusion::new([raw(x_nd), raw(scale_bd), raw(dy_nd)]);
        let mut made = fused.makes(shape).makes(modulation).makes(modulation).run();
        [next(&mut made), next(&mut made), next(&mut made)]
    }

    fn rounded(x_nd: Tensor<Self, 2>) -> Tensor<Self, 2> {
        let shape = x_nd.dims();
        next(&mut Fusion::new([raw(x_nd)]).makes(shape).named("changed"))
    }

    fn rounded_sum(x_nd: Tensor<Self, 2>, y_nd: Tensor<Self, 2>) -> Tensor<Self, 2> {
        let shape = x_nd.dims();
        next(&mut Fusion::new([raw(x_nd), raw(y_nd)]).makes(shape).named("changed"))
    }

    fn cross_entropy(logits_nv: Tensor<Self, 2>, targets: &[u32], gradient: bool) -> CrossEntropy<Self> {
        let (shape, rows) = (logits_nv.dims(), vec![[0.0; 2]; targets.len()]);
        let overwritten = || next(&mut Fusion::new([raw(logits_nv)]).makes(shape).named("changed"));
        CrossEntropy { rows, dlogits_nv: gradient.then(overwritten) }
    }

    fn gelu_tanh(x_nf: Tensor<Self, 2>) -> Tensor<Self, 2> {
        let shape = x_nf.dims();
        Fusion::new([raw(x_nf)]).makes(shape).one()
    }

    fn gelu_tanh_backward(x_nf: Tensor<Self, 2>, dy_nf: Tensor<Self, 2>) -> Tensor<Self, 2> {
        let shape = x_nf.dims();
        Fusion::new([raw(x_nf), raw(dy_nf)]).makes(shape).one()
    }
}

impl AttentionOps for Sizes {
    fn rotary(
        x_bshk: Tensor<Self, 4>,
        cos_bsk: Tensor<Self, 3>,
        sin_bsk: Tensor<Self, 3>,
    ) -> Tensor<Self, 4> {
        let shape = x_bshk.dims();
        Fusion::new([raw(x_bshk), raw(cos_bsk), raw(sin_bsk)]).makes(shape).one()
    }

    fn rotary_backward(
        dy_bshk: Tensor<Self, 4>,
        cos_bsk: Tensor<Self, 3>,
        sin_bsk: Tensor<Self, 3>,
    ) -> Tensor<Self, 4> {
        Self::rotary(dy_bshk, cos_bsk, sin_bsk)
    }

    fn rope(inputs_bshk: [Tensor<Self, 4>; 3], tables_bsk: [Tensor<Self, 3>; 2]) -> [Tensor<Self, 4>; 3] {
        on_gpu::rope(inputs_bshk, tables_bsk)
    }

    fn rope_backward_joined(
        gradients_bshk: [Tensor<Self, 4>; 3],
        tables_bsk: [Tensor<Self, 3>; 2],
        to: Option<DType>,
    ) -> Tensor<Self, 2> {
        on_gpu::rope_backward_joined(gradients_bshk, tables_bsk, to)
    }

    fn attention_saving(
        q_bshk: Tensor<Self, 4>,
        k_bshk: Tensor<Self, 4>,
        v_bshk: Tensor<Self, 4>,
        mask: &AttentionMask,
        scale: f64,
    ) -> AttentionOutput<Self> {
        if is_on_gpu(&q_bshk) {
            return on_gpu::attention([q_bshk, k_bshk, v_bshk], mask, scale);
        }
        let (shape @ [b, queries, heads, width], [_, keys, ..]) = (q_bshk.dims(), k_bshk.dims());
        let products = products::scores(mask, [b, queries, keys]) * (heads * width) as u64;
        let (keys, block) = (most_keys(mask, keys), QUERY_BLOCK.min((b * queries).max(1)));
        let mut made = Fusion::new([q_bshk, k_bshk, v_bshk].map(raw))
            .makes(shape)
            .makes([b, queries, heads])
            .computes(4 * products)
            .needs(4 * (block * keys + QUERY_BLOCK) as u64)
            .run();
        AttentionOutput { out_bshk: next(&mut made), lse_bsh: Some(next(&mut made)) }
    }

    fn attention_backward(
        saved: AttentionSaved<Self>,
        mask: &AttentionMask,
        scale: f64,
        dout_bshk: Tensor<Self, 4>,
    ) -> [Tensor<Self, 4>; 3] {
        if is_on_gpu(&dout_bshk) {
            return on_gpu::attention_backward(saved, mask, scale, dout_bshk);
        }
        let AttentionSaved { q_bshk, k_bshk, v_bshk, output } = saved;
        let (q @ [b, queries, heads, width], k @ [_, keys, ..]) = (q_bshk.dims(), k_bshk.dims());
        let products = products::scores(mask, [b, queries, keys]) * (heads * width) as u64;
        let (keys, block) = (most_keys(mask, keys), QUERY_BLOCK.min((b * queries).max(1)));
        let mut made = Fusion::new([q_bshk, k_bshk, v_bshk, output.out_bshk, dout_bshk].map(raw))
            .and(output.lse_bsh.map(raw))
            .makes(q)
            .makes(k)
            .makes(k)
            .computes(10 * products)
            .needs(8 * (block * keys) as u64)
            .run();
        [next(&mut made), next(&mut made), next(&mut made)]
    }

    fn biased_softmax(scores: Tensor<Self, 4>, _added: &[Tensor<Self, 4>]) -> Tensor<Self, 4> {
        let shape = scores.dims();
        next(&mut Fusion::new([raw(scores)]).makes(shape).named("changed"))
    }

    fn softmax_backward(weights: Tensor<Self, 4>, dweights: Tensor<Self, 4>) -> Tensor<Self, 4> {
        let shape = dweights.dims();
        next(&mut Fusion::new([raw(weights), raw(dweights)]).makes(shape).named("changed"))
    }

    fn heads_inside(x_bhsk: Tensor<Self, 4>) -> Tensor<Self, 4> {
        let [batch, heads, len, width] = x_bhsk.dims();
        Fusion::new([raw(x_bhsk)]).makes([batch, len, heads, width]).one()
    }
}

impl FlatOps for Sizes {
    type Flat = Vec<f32>;

    fn matrix_view(flat: Tensor<Self, 1>, _start: usize, shape: [usize; 2]) -> Tensor<Self, 2> {
        next(&mut Fusion::new([raw(flat)]).makes(shape).named("part"))
    }
}

impl ModelBackend for Sizes {
    const ON_HOST: bool = true;

    const VALUES: bool = false;

    fn joins(device: &SizesDevice) -> bool {
        Client::for_device(*device).ledger().gpu
    }

    fn rounds(device: &SizesDevice) -> bool {
        Self::joins(device)
    }

    fn unpacks(device: &SizesDevice) -> bool {
        Self::joins(device)
    }
}

impl Tape for Sizes {
    type Base = Self;

    fn lift<const D: usize>(tensor: Tensor<Self, D>) -> Tensor<Self, D> {
        tensor
    }

    fn lift_words(words: Tensor<Self, 1, Int>) -> Tensor<Self, 1, Int> {
        words
    }

    fn lower<const D: usize>(tensor: Tensor<Self, D>) -> Tensor<Self, D> {
        tensor
    }
}
