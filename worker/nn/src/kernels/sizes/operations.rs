//! The fused operations by size: what each makes, how much it multiplies and adds for that, and what it
//! needs meanwhile on the CPU (`kernels::flex`).

use burn::tensor::{DType, Shape, Tensor, TensorPrimitive};
use burn_ir::{CustomOpIr, OperationIr, TensorIr};
use burn_router::{RouterTensor, RunnerClient};

use super::{
    ledger::bytes_of,
    products,
    router::{Client, Sizes},
};
use crate::kernels::{
    AttentionMask, AttentionOps, AttentionOutput, AttentionSaved, CrossEntropy, DROPOUT_BLOCK, DropoutRows,
    FEW_TOKENS, FlatOps, GradientSlot, LinearOps, LowRank, LowRankGradients, LowRankSaved, ModelBackend,
    PANEL_COLUMNS, QUERY_BLOCK, RowOps, Tape, Weight,
};

type Raw = RouterTensor<Client>;

fn raw<const D: usize>(x: Tensor<Sizes, D>) -> Raw {
    x.into_primitive().tensor()
}

fn cooked<const D: usize>(x: Raw) -> Tensor<Sizes, D> {
    Tensor::from_primitive(TensorPrimitive::Float(x))
}

/// The tensor that a weight is, if it is one.
fn held(weight: Weight<Sizes>) -> Option<Raw> {
    match weight {
        Weight::Dense(w_oi) => Some(raw(w_oi)),
        Weight::Quantized(_) => None,
    }
}

/// A fused operation: what it reads, what it makes, what it needs meanwhile.
struct Fused {
    client: Client,
    inputs: Vec<Raw>,
    outputs: Vec<(Shape, DType)>,
}

impl Fused {
    fn new<const N: usize>(inputs: [Raw; N]) -> Self {
        Self { client: inputs[0].client.clone(), inputs: inputs.into(), outputs: Vec::new() }
    }

    fn and(mut self, more: impl IntoIterator<Item = Raw>) -> Self {
        self.inputs.extend(more);
        self
    }

    fn makes<const D: usize>(mut self, shape: [usize; D]) -> Self {
        self.outputs.push((Shape::from(shape), DType::F32));
        self
    }

    fn computes(self, flops: u64) -> Self {
        self.client.ledger().flops += flops;
        self
    }

    fn needs(self, bytes: u64) -> Self {
        let mut ledger = self.client.ledger();
        ledger.scratch = ledger.scratch.max(bytes);
        drop(ledger);
        self
    }

    /// `values` more floats while it runs, besides its outputs.
    fn beside(self, values: usize) -> Self {
        let outputs: u64 = self.outputs.iter().map(|(shape, dtype)| bytes_of(shape, *dtype)).sum();
        self.client.ledger().transient(4 * values as u64 + outputs);
        self
    }

    fn named(self, id: &'static str) -> std::vec::IntoIter<Raw> {
        let Self { client, inputs, outputs } = self;
        let inputs: Vec<_> = inputs.into_iter().map(RouterTensor::into_ir).collect();
        let outputs: Vec<_> = outputs
            .into_iter()
            .map(|(shape, dtype)| TensorIr::uninit(client.create_empty_handle(), shape, dtype))
            .collect();
        let made = client.register(OperationIr::Custom(CustomOpIr::new(id, &inputs, &outputs)));
        made.into_iter()
    }

    fn run(self) -> std::vec::IntoIter<Raw> {
        self.named("fused")
    }

    fn one<const D: usize>(self) -> Tensor<Sizes, D> {
        next(&mut self.run())
    }
}

fn next<const D: usize>(made: &mut std::vec::IntoIter<Raw>) -> Tensor<Sizes, D> {
    cooked(made.next().expect("as many as it makes"))
}

/// Panels of the weight that a thread transposes or converts.
fn panels(rows: usize, weight: &Weight<Sizes>) -> u64 {
    let [outputs, inputs] = weight.dims();
    let panel = PANEL_COLUMNS.min(outputs) * inputs;
    let buffer = if rows <= FEW_TOKENS { PANEL_COLUMNS.min(outputs) * rows } else { panel };
    4 * (buffer + if weight.dtype() == Some(DType::F32) { 0 } else { panel }) as u64
}

/// The same for the gradient of its input.
fn panels_back(weight: &Weight<Sizes>) -> u64 {
    let [outputs, inputs] = weight.dims();
    4 * (PANEL_COLUMNS.min(inputs) * outputs) as u64
}

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
        Fused::new([raw(x_nd), raw(gain_d)]).makes(shape).one()
    }

    fn rms_norm_backward(
        x_nd: Tensor<Self, 2>,
        gain_d: Tensor<Self, 1>,
        dy_nd: Tensor<Self, 2>,
        _eps: f64,
    ) -> Tensor<Self, 2> {
        let shape = x_nd.dims();
        Fused::new([raw(x_nd), raw(gain_d), raw(dy_nd)]).makes(shape).one()
    }

    fn swiglu(gate_nf: Tensor<Self, 2>, up_nf: Tensor<Self, 2>) -> Tensor<Self, 2> {
        let shape = gate_nf.dims();
        Fused::new([raw(gate_nf), raw(up_nf)]).makes(shape).one()
    }

    fn swiglu_backward(
        gate_nf: Tensor<Self, 2>,
        up_nf: Tensor<Self, 2>,
        dy_nf: Tensor<Self, 2>,
    ) -> (Tensor<Self, 2>, Tensor<Self, 2>) {
        let shape = gate_nf.dims();
        let mut made = Fused::new([gate_nf, up_nf, dy_nf].map(raw)).makes(shape).makes(shape).run();
        (next(&mut made), next(&mut made))
    }

    fn linear_bias_gradient(dy_no: Tensor<Self, 2>) -> Tensor<Self, 1> {
        let [_, outputs] = dy_no.dims();
        Fused::new([raw(dy_no)]).makes([outputs]).one()
    }

    fn layer_norm(x_nd: Tensor<Self, 2>, _eps: f64) -> Tensor<Self, 2> {
        let shape = x_nd.dims();
        Fused::new([raw(x_nd)]).makes(shape).one()
    }

    fn layer_norm_backward(x_nd: Tensor<Self, 2>, dy_nd: Tensor<Self, 2>, _eps: f64) -> Tensor<Self, 2> {
        let shape = x_nd.dims();
        Fused::new([raw(x_nd), raw(dy_nd)]).makes(shape).one()
    }

    fn modulated_layer_norm(
        x_nd: Tensor<Self, 2>,
        scale_bd: Tensor<Self, 2>,
        shift_bd: Tensor<Self, 2>,
        _eps: f64,
    ) -> Tensor<Self, 2> {
        let shape = x_nd.dims();
        Fused::new([raw(x_nd), raw(scale_bd), raw(shift_bd)]).makes(shape).one()
    }

    fn modulated_layer_norm_backward(
        x_nd: Tensor<Self, 2>,
        scale_bd: Tensor<Self, 2>,
        dy_nd: Tensor<Self, 2>,
        _eps: f64,
    ) -> [Tensor<Self, 2>; 3] {
        let (shape, modulation) = (x_nd.dims(), scale_bd.dims());
        let fused = Fused::new([raw(x_nd), raw(scale_bd), raw(dy_nd)]);
        let mut made = fused.makes(shape).makes(modulation).makes(modulation).run();
        [next(&mut made), next(&mut made), next(&mut made)]
    }

    fn rounded(x_nd: Tensor<Self, 2>) -> Tensor<Self, 2> {
        let shape = x_nd.dims();
        next(&mut Fused::new([raw(x_nd)]).makes(shape).named("changed"))
    }

    fn rounded_sum(x_nd: Tensor<Self, 2>, y_nd: Tensor<Self, 2>) -> Tensor<Self, 2> {
        let shape = x_nd.dims();
        next(&mut Fused::new([raw(x_nd), raw(y_nd)]).makes(shape).named("changed"))
    }

    fn cross_entropy(logits_nv: Tensor<Self, 2>, targets: &[u32], gradient: bool) -> CrossEntropy<Self> {
        let (shape, rows) = (logits_nv.dims(), vec![[0.0; 2]; targets.len()]);
        let overwritten = || next(&mut Fused::new([raw(logits_nv)]).makes(shape).named("changed"));
        CrossEntropy { rows, dlogits_nv: gradient.then(overwritten) }
    }

    fn gelu_tanh(x_nf: Tensor<Self, 2>) -> Tensor<Self, 2> {
        let shape = x_nf.dims();
        Fused::new([raw(x_nf)]).makes(shape).one()
    }

    fn gelu_tanh_backward(x_nf: Tensor<Self, 2>, dy_nf: Tensor<Self, 2>) -> Tensor<Self, 2> {
        let shape = x_nf.dims();
        Fused::new([raw(x_nf), raw(dy_nf)]).makes(shape).one()
    }
}

impl AttentionOps for Sizes {
    fn rotary(
        x_bshk: Tensor<Self, 4>,
        cos_bsk: Tensor<Self, 3>,
        sin_bsk: Tensor<Self, 3>,
    ) -> Tensor<Self, 4> {
        let shape = x_bshk.dims();
        Fused::new([raw(x_bshk), raw(cos_bsk), raw(sin_bsk)]).makes(shape).one()
    }

    fn rotary_backward(
        dy_bshk: Tensor<Self, 4>,
        cos_bsk: Tensor<Self, 3>,
        sin_bsk: Tensor<Self, 3>,
    ) -> Tensor<Self, 4> {
        Self::rotary(dy_bshk, cos_bsk, sin_bsk)
    }

    fn attention_saving(
        q_bshk: Tensor<Self, 4>,
        k_bshk: Tensor<Self, 4>,
        v_bshk: Tensor<Self, 4>,
        mask: &AttentionMask,
        _scale: f64,
    ) -> AttentionOutput<Self> {
        let (shape @ [b, queries, heads, width], [_, keys, ..]) = (q_bshk.dims(), k_bshk.dims());
        let products = products::scores(mask, [b, queries, keys]) * (heads * width) as u64;
        let (keys, block) = (most_keys(mask, keys), QUERY_BLOCK.min((b * queries).max(1)));
        let mut made = Fused::new([q_bshk, k_bshk, v_bshk].map(raw))
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
        _scale: f64,
        dout_bshk: Tensor<Self, 4>,
    ) -> [Tensor<Self, 4>; 3] {
        let AttentionSaved { q_bshk, k_bshk, v_bshk, output } = saved;
        let (q @ [b, queries, heads, width], k @ [_, keys, ..]) = (q_bshk.dims(), k_bshk.dims());
        let products = products::scores(mask, [b, queries, keys]) * (heads * width) as u64;
        let (keys, block) = (most_keys(mask, keys), QUERY_BLOCK.min((b * queries).max(1)));
        let mut made = Fused::new([q_bshk, k_bshk, v_bshk, output.out_bshk, dout_bshk].map(raw))
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
        next(&mut Fused::new([raw(scores)]).makes(shape).named("changed"))
    }

    fn softmax_backward(weights: Tensor<Self, 4>, dweights: Tensor<Self, 4>) -> Tensor<Self, 4> {
        let shape = dweights.dims();
        next(&mut Fused::new([raw(weights), raw(dweights)]).makes(shape).named("changed"))
    }

    fn heads_inside(x_bhsk: Tensor<Self, 4>) -> Tensor<Self, 4> {
        let [batch, heads, len, width] = x_bhsk.dims();
        Fused::new([raw(x_bhsk)]).makes([batch, len, heads, width]).one()
    }
}

impl LinearOps for Sizes {
    fn linear(
        x_ni: Tensor<Self, 2>,
        w_oi: impl Into<Weight<Self>>,
        bias_o: Option<Tensor<Self, 1>>,
    ) -> Tensor<Self, 2> {
        let w_oi = w_oi.into();
        let ([rows, inputs], [outputs, _]) = (x_ni.dims(), w_oi.dims());
        let scratch = panels(rows, &w_oi);
        Fused::new([raw(x_ni)])
            .and(held(w_oi))
            .and(bias_o.map(raw))
            .makes([rows, outputs])
            .computes(products::linear([rows, inputs, outputs]))
            .needs(scratch)
            .beside(if rows <= FEW_TOKENS { rows * inputs } else { 0 })
            .one()
    }

    fn linear_input_gradient(dy_no: Tensor<Self, 2>, w_oi: impl Into<Weight<Self>>) -> Tensor<Self, 2> {
        let w_oi = w_oi.into();
        let ([rows, outputs], [_, inputs]) = (dy_no.dims(), w_oi.dims());
        let (scratch, flops) = (panels_back(&w_oi), products::linear([rows, inputs, outputs]));
        let fused = Fused::new([raw(dy_no)]).and(held(w_oi));
        fused.makes([rows, inputs]).computes(flops).needs(scratch).one()
    }

    fn linear_weight_gradient(dy_no: Tensor<Self, 2>, x_ni: Tensor<Self, 2>) -> Tensor<Self, 2> {
        let ([rows, outputs], [_, inputs]) = (dy_no.dims(), x_ni.dims());
        let flops = products::linear([rows, inputs, outputs]);
        Fused::new([raw(dy_no), raw(x_ni)]).makes([outputs, inputs]).computes(flops).one()
    }

    fn add_linear_weight_gradient(dy_no: Tensor<Self, 2>, x_ni: Tensor<Self, 2>, _sum: GradientSlot<'_>) {
        let ([rows, outputs], [_, inputs]) = (dy_no.dims(), x_ni.dims());
        Fused::new([raw(dy_no), raw(x_ni)]).computes(products::linear([rows, inputs, outputs])).run();
    }

    fn lora_linear_saving(
        x_ni: Tensor<Self, 2>,
        w_oi: impl Into<Weight<Self>>,
        bias_o: Option<Tensor<Self, 1>>,
        update: &LowRank<Self>,
    ) -> (Tensor<Self, 2>, Tensor<Self, 2>) {
        let w_oi = w_oi.into();
        let ([rows, inputs], [outputs, _], [rank, _]) = (x_ni.dims(), w_oi.dims(), update.a_ri.dims());
        let dropped = update.dropout.as_ref().map_or(0, |_| 4 * (inputs * DROPOUT_BLOCK[0].min(rows)) as u64);
        let scratch = panels(rows, &w_oi).max(dropped);
        let mut made = Fused::new([raw(x_ni), raw(update.a_ri.clone()), raw(update.b_or.clone())])
            .and(held(w_oi))
            .and(bias_o.map(raw))
            .makes([rows, outputs])
            .makes([rows, rank])
            .computes(products::linear([rows, inputs, outputs]))
            .computes(products::linear([rows, inputs, rank]) + products::linear([rows, rank, outputs]))
            .needs(scratch)
            .beside(if rows <= FEW_TOKENS { rows * inputs } else { 0 })
            .run();
        (next(&mut made), next(&mut made))
    }

    fn lora_linear_backward(
        saved: LowRankSaved<Self>,
        dy_no: Tensor<Self, 2>,
        wants_dx: bool,
    ) -> LowRankGradients<Self> {
        let LowRankSaved { x_ni, down_nr, w_oi, update } = saved;
        let ([rows, inputs], [outputs, _], [rank, _]) = (x_ni.dims(), w_oi.dims(), update.a_ri.dims());
        let dropped = update.dropout.as_ref().map_or(0, |_| 4 * (rows * DROPOUT_BLOCK[1].min(inputs)) as u64);
        let scratch = panels_back(&w_oi).max(dropped);
        // Through `b`, then the gradients of both; the input's by way of `a`, and by way of the weight.
        let [dense, down, up] =
            [[inputs, outputs], [inputs, rank], [rank, outputs]].map(|[i, o]| products::linear([rows, i, o]));
        let fused = Fused::new([x_ni, down_nr, update.a_ri, update.b_or, dy_no].map(raw))
            .and(held(w_oi))
            .makes([rank, inputs])
            .makes([outputs, rank])
            .computes(2 * up + down)
            .needs(scratch);
        let fused = if wants_dx { fused.makes([rows, inputs]).computes(dense + down) } else { fused };
        let mut made = fused.beside(rows * rank).run();
        let (da_ri, db_or) = (next(&mut made), next(&mut made));
        LowRankGradients { dx_ni: wants_dx.then(|| next(&mut made)), da_ri, db_or }
    }
}

impl FlatOps for Sizes {
    type Flat = Vec<f32>;

    fn matrix_view(flat: Tensor<Self, 1>, _start: usize, shape: [usize; 2]) -> Tensor<Self, 2> {
        next(&mut Fused::new([raw(flat)]).makes(shape).named("part"))
    }
}

impl ModelBackend for Sizes {
    const ON_HOST: bool = true;

    const VALUES: bool = false;
}

impl Tape for Sizes {
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
