//! Operations that a GPU does otherwise than a CPU, by size: as `kernels::cube` has them.
//!
//! ```text
//! linear     inputs are rounded to the weight's type first; of half precision already, `x a^T` is so, too;
//!            a weight of few bits is widened first, and gone with its product
//! joined     outputs side by side, of half precision where it is asked for
//! attention  one kernel, or the tiles of `blockwise` themselves, between operations by size
//! ```
//!
//! What is added to a product is added where the product lies. What this file does not count: gradients of
//! weights that wait to be added together, at most 32 MiB, copies for kernels of odd sizes, and attention's
//! tiles under weights of bfloat16 on GPUs before compute capability 8.0.

use burn::tensor::{DType, Tensor};

use super::{
    fused::{Fusion, next, raw},
    products,
    router::Sizes,
};
use crate::kernels::{
    AttentionMask, AttentionOps, AttentionOutput, AttentionSaved, JoinedGradients, JoinedLayers, JoinedSaved,
    LinearOps, LowRank, LowRankGradients, LowRankSaved, Weight,
    attention_ops::may_fuse,
    blockwise::{self, Keys, Scores, TiledInputs},
    packed::PackedMatrix,
    segments,
    weight::packed_dims,
};

/// Whether a tensor is in a GPU's memory.
pub(super) fn is_on_gpu<const D: usize>(x: &Tensor<Sizes, D>) -> bool {
    raw(x.clone()).client.ledger().gpu
}

/// As products read it: rounded to half precision if the other side is of it.
fn rounded_like(x: Tensor<Sizes, 2>, w: DType) -> Tensor<Sizes, 2> {
    if w == DType::F32 { x } else { as_type(x, w) }
}

/// The type that a weight is in when it is multiplied.
fn multiplied_in(w_oi: &Weight<Sizes>) -> DType {
    w_oi.dtype().unwrap_or(DType::F32)
}

fn as_type(x: Tensor<Sizes, 2>, dtype: DType) -> Tensor<Sizes, 2> {
    if x.dtype() == dtype {
        return x;
    }
    let shape = x.dims();
    Fusion::new([raw(x)]).makes_in(shape, dtype).one()
}

/// See [`WeightOps::unpacked`].
pub(super) fn unpacked(parts: &[PackedMatrix<Sizes>]) -> Tensor<Sizes, 2> {
    let mut words = parts.iter().map(|part| part.words().into_primitive());
    let first = words.next().expect("a weight has parts");
    Fusion::new([first]).and(words).makes_in(packed_dims(parts), DType::BF16).one()
}

/// A product of this arithmetic, in float32.
fn product(
    x: Tensor<Sizes, 2>,
    w_oi: Tensor<Sizes, 2>,
    [rows, inputs, outputs]: [usize; 3],
    width: usize,
) -> Tensor<Sizes, 2> {
    let fused = Fusion::new([raw(x), raw(w_oi)]);
    fused.makes([rows, width]).computes(products::linear([rows, inputs, outputs])).one()
}

/// See [`LinearOps::linear`].
pub(super) fn linear(
    x_ni: Tensor<Sizes, 2>,
    w_oi: Weight<Sizes>,
    _bias_o: Option<Tensor<Sizes, 1>>,
) -> Tensor<Sizes, 2> {
    let ([rows, inputs], [outputs, _]) = (x_ni.dims(), w_oi.dims());
    let w_oi = w_oi.into_tensor(&x_ni.device());
    product(rounded_like(x_ni, w_oi.dtype()), w_oi, [rows, inputs, outputs], outputs)
}

/// See [`LinearOps::linear_input_gradient`].
pub(super) fn linear_input_gradient(dy_no: Tensor<Sizes, 2>, w_oi: Weight<Sizes>) -> Tensor<Sizes, 2> {
    let ([rows, outputs], [_, inputs]) = (dy_no.dims(), w_oi.dims());
    let w_oi = w_oi.into_tensor(&dy_no.device());
    product(rounded_like(dy_no, w_oi.dtype()), w_oi, [rows, inputs, outputs], inputs)
}

/// What an update makes of rows: `[n, r]`, in this type.
fn low(x: &Tensor<Sizes, 2>, [rows, width, rank]: [usize; 3], dtype: DType) -> Tensor<Sizes, 2> {
    let flops = products::linear([rows, width, rank]);
    Fusion::new([raw(x.clone())]).makes_in([rows, rank], dtype).computes(flops).one()
}

/// What dropout leaves of rows.
fn kept(x: &Tensor<Sizes, 2>, update: &LowRank<Sizes>) -> Tensor<Sizes, 2> {
    match update.dropout {
        Some(_) => Fusion::new([raw(x.clone())]).makes_in(x.dims(), x.dtype()).one(),
        None => x.clone(),
    }
}

/// See [`LinearOps::lora_linear_saving`].
pub(super) fn lora_linear(
    x_ni: Tensor<Sizes, 2>,
    w_oi: Weight<Sizes>,
    _bias_o: Option<Tensor<Sizes, 1>>,
    update: &LowRank<Sizes>,
) -> (Tensor<Sizes, 2>, Tensor<Sizes, 2>) {
    let ([rows, inputs], [outputs, _], [rank, _]) = (x_ni.dims(), w_oi.dims(), update.a_ri.dims());
    let w_oi = w_oi.into_tensor(&x_ni.device());
    let narrows = w_oi.dtype() == x_ni.dtype() || update.dropout.is_some();
    let x_ni = as_type(x_ni, if narrows { w_oi.dtype() } else { DType::F32 });
    let down_nr = low(&kept(&x_ni, update), [rows, inputs, rank], x_ni.dtype());
    let y_no = product(rounded_like(x_ni, w_oi.dtype()), w_oi, [rows, inputs, outputs], outputs);
    let raised = Fusion::new([raw(down_nr.clone()), raw(y_no)]).makes([rows, outputs]);
    let y_no = next(&mut raised.computes(products::linear([rows, rank, outputs])).named("changed"));
    (y_no, down_nr)
}

/// See [`LinearOps::lora_linear_backward`].
pub(super) fn lora_linear_backward(
    saved: LowRankSaved<Sizes>,
    dy_no: Tensor<Sizes, 2>,
    wants_dx: bool,
) -> LowRankGradients<Sizes> {
    let LowRankSaved { x_ni, down_nr, w_oi, update } = saved;
    let ([rows, inputs], [outputs, _], [rank, _]) = (x_ni.dims(), w_oi.dims(), update.a_ri.dims());
    let (weight, device) = (multiplied_in(&w_oi), dy_no.device());
    let narrows = weight == x_ni.dtype() || update.dropout.is_some();
    let dtype = if narrows { weight } else { DType::F32 };
    let (x_ni, dy_no) = (as_type(x_ni, dtype), as_type(dy_no, DType::F32));
    let ddown_nr = low(&dy_no, [rows, outputs, rank], dtype);
    let narrow_no =
        if wants_dx || dtype != DType::F32 { rounded_like(dy_no.clone(), weight) } else { dy_no.clone() };
    let dx_ni = wants_dx.then(|| {
        let w_oi = w_oi.into_tensor(&device);
        // Dropped as the input was, and so made before it is added.
        let more_ni = update.dropout.is_some().then(|| {
            let low_ni = Fusion::new([raw(ddown_nr.clone())]).makes([rows, inputs]).one::<2>();
            kept(&low_ni, &update)
        });
        let dx_ni = product(narrow_no.clone(), w_oi, [rows, inputs, outputs], inputs);
        drop(more_ni);
        let raised = Fusion::new([raw(ddown_nr.clone()), raw(dx_ni)]).makes([rows, inputs]);
        next(&mut raised.computes(products::linear([rows, rank, inputs])).named("changed"))
    });
    let dy_no = if dtype == DType::F32 { dy_no } else { narrow_no };
    LowRankGradients {
        dx_ni,
        da_ri: Sizes::linear_weight_gradient(ddown_nr, kept(&x_ni, &update)),
        db_or: Sizes::linear_weight_gradient(dy_no, down_nr),
    }
}

/// See [`LinearOps::joined_saving`].
pub(super) fn joined(
    x_ni: Tensor<Sizes, 2>,
    layers: &JoinedLayers<Sizes>,
) -> (Tensor<Sizes, 2>, Option<Tensor<Sizes, 2>>) {
    let ([rows, inputs], [outputs, _]) = (x_ni.dims(), layers.w_oi.dims());
    let w_oi = layers.w_oi.clone().into_tensor(&x_ni.device());
    let dtype = w_oi.dtype();
    let x_ni = as_type(x_ni, dtype);
    let ranks = ranks(layers);
    let down_nr = (ranks > 0).then(|| low(&x_ni, [rows, inputs, ranks], dtype));
    let raised = layers.updates.iter().zip(&layers.outputs);
    let raised: u64 = raised.map(|(update, &o)| products::linear([rows, update.a_ri.dims()[0], o])).sum();
    let made = Fusion::new([raw(x_ni), raw(w_oi)])
        .makes_in([rows, outputs], if layers.rounded { dtype } else { DType::F32 })
        .computes(products::linear([rows, inputs, outputs]) + raised);
    (made.one(), down_nr)
}

fn ranks(layers: &JoinedLayers<Sizes>) -> usize {
    layers.updates.iter().map(|update| update.a_ri.dims()[0]).sum()
}

/// See [`LinearOps::joined_backward`].
pub(super) fn joined_backward(
    saved: JoinedSaved<Sizes>,
    dy_no: Tensor<Sizes, 2>,
    wants_dx: bool,
    sum_ni: Option<Tensor<Sizes, 2>>,
) -> JoinedGradients<Sizes> {
    let JoinedSaved { x_ni, down_nr, layers } = saved;
    let ([rows, inputs], [outputs, _]) = (x_ni.dims(), layers.w_oi.dims());
    let dtype = multiplied_in(&layers.w_oi);
    let dy_no = as_type(dy_no, dtype);
    let ranks = ranks(&layers);
    let of_updates = layers.updates.iter().zip(&layers.outputs);
    let through: u64 =
        of_updates.map(|(update, &o)| products::linear([rows, update.a_ri.dims()[0], o])).sum();
    let ddown_nr = (ranks > 0).then(|| {
        let reduced = Fusion::new([raw(dy_no.clone())]).makes_in([rows, ranks], dtype).computes(through);
        reduced.one::<2>()
    });
    let dx_ni = wants_dx.then(|| {
        let w_oi = layers.w_oi.clone().into_tensor(&dy_no.device());
        let dx_ni = product(dy_no.clone(), w_oi, [rows, inputs, outputs], inputs);
        // What others send is added where the product lies, and what an update adds.
        let added = Fusion::new([raw(dx_ni)]).makes([rows, inputs]);
        next(&mut added.computes(products::linear([rows, ranks, inputs])).named("changed"))
    });
    drop(sum_ni);
    let Some((ddown_nr, down_nr)) = ddown_nr.zip(down_nr) else {
        return JoinedGradients { dx_ni, updates: Vec::new() };
    };
    let da_ri = Sizes::linear_weight_gradient(ddown_nr, as_type(x_ni, dtype));
    // Rows of one layer by ranks of all are made; what is asked for is a block of them.
    let db_or = Fusion::new([raw(dy_no), raw(down_nr)]).makes([outputs, ranks]).computes(through).one::<2>();
    let (mut row, mut rank) = (0, 0);
    let of_layer = |(update, &outputs): (&LowRank<Sizes>, &usize)| {
        let of = update.a_ri.dims()[0];
        let (rows, from) = (row..row + outputs, rank..rank + of);
        (row, rank) = (rows.end, from.end);
        [da_ri.clone().slice([from.clone(), 0..inputs]), db_or.clone().slice([rows, from])]
    };
    let updates = layers.updates.iter().zip(&layers.outputs).map(of_layer).collect();
    JoinedGradients { dx_ni, updates }
}

/// See [`AttentionOps::rope`]: on a GPU values are written anew with queries and keys.
pub(super) fn rope(
    inputs_bshk: [Tensor<Sizes, 4>; 3],
    tables_bsk: [Tensor<Sizes, 3>; 2],
) -> [Tensor<Sizes, 4>; 3] {
    let ([q_bshk, k_bshk, v_bshk], [cos_bsk, sin_bsk]) = (inputs_bshk, tables_bsk);
    if !is_on_gpu(&q_bshk) {
        let q_bshk = Sizes::rotary(q_bshk, cos_bsk.clone(), sin_bsk.clone());
        return [q_bshk, Sizes::rotary(k_bshk, cos_bsk, sin_bsk), v_bshk];
    }
    let (q, k, v) = (q_bshk.dims(), k_bshk.dims(), v_bshk.dims());
    let mut made = Fusion::new([q_bshk, k_bshk, v_bshk].map(raw)).makes(q).makes(k).makes(v).run();
    [next(&mut made), next(&mut made), next(&mut made)]
}

/// See [`AttentionOps::rope_backward_joined`].
pub(super) fn rope_backward_joined(
    gradients_bshk: [Tensor<Sizes, 4>; 3],
    _tables_bsk: [Tensor<Sizes, 3>; 2],
    to: Option<DType>,
) -> Tensor<Sizes, 2> {
    let [b, s, _, k] = gradients_bshk[0].dims();
    let heads: usize = gradients_bshk.iter().map(|gradient| gradient.dims()[2]).sum();
    Fusion::new(gradients_bshk.map(raw)).makes_in([b * s, heads * k], to.unwrap_or(DType::F32)).one()
}

/// See [`AttentionOps::attention_saving`].
pub(super) fn attention(
    [q_bshk, k_bshk, v_bshk]: [Tensor<Sizes, 4>; 3],
    mask: &AttentionMask,
    scale: f64,
) -> AttentionOutput<Sizes> {
    let [b, queries, heads, width] = q_bshk.dims();
    let products = products::scores(mask, [b, queries, k_bshk.dims()[1]]) * (heads * width) as u64;
    let client = raw(q_bshk.clone()).client.clone();
    let before = client.ledger().flops;
    let output =
        segments::attention([q_bshk, k_bshk, v_bshk], mask, |inputs_bshk, mask| match may_fuse(width) {
            true => attend_fused(inputs_bshk),
            false => blockwise::attention(TiledInputs::new(inputs_bshk, scale), mask),
        });
    // Counted is what has to be computed, whatever a tile computes in vain.
    client.ledger().flops = before + 4 * products;
    output
}

/// See [`AttentionOps::attention_backward`].
pub(super) fn attention_backward(
    saved: AttentionSaved<Sizes>,
    mask: &AttentionMask,
    scale: f64,
    dout_bshk: Tensor<Sizes, 4>,
) -> [Tensor<Sizes, 4>; 3] {
    let [b, queries, heads, width] = saved.q_bshk.dims();
    let products = products::scores(mask, [b, queries, saved.k_bshk.dims()[1]]) * (heads * width) as u64;
    let client = raw(dout_bshk.clone()).client.clone();
    let before = client.ledger().flops;
    let gradients = segments::gradients(saved, mask, dout_bshk, |saved, mask, dout_bshk| {
        let AttentionSaved { q_bshk, k_bshk, v_bshk, output } = saved;
        let inputs_bshk = [q_bshk, k_bshk, v_bshk];
        match may_fuse(width) {
            true => pull_fused(inputs_bshk, output, dout_bshk),
            false => blockwise::gradients(TiledInputs::new(inputs_bshk, scale), output, mask, dout_bshk),
        }
    });
    client.ledger().flops = before + 10 * products;
    gradients
}

fn attend_fused(inputs_bshk: [Tensor<Sizes, 4>; 3]) -> AttentionOutput<Sizes> {
    let shape @ [batch, queries, heads, _] = inputs_bshk[0].dims();
    let mut made = Fusion::new(inputs_bshk.map(raw)).makes(shape).makes([batch, queries, heads]).run();
    AttentionOutput { out_bshk: next(&mut made), lse_bsh: Some(next(&mut made)) }
}

fn pull_fused(
    inputs_bshk: [Tensor<Sizes, 4>; 3],
    output: AttentionOutput<Sizes>,
    dout_bshk: Tensor<Sizes, 4>,
) -> [Tensor<Sizes, 4>; 3] {
    let [q, k, v] = inputs_bshk.each_ref().map(Tensor::dims);
    let read = [raw(output.out_bshk), raw(dout_bshk)];
    let fused = Fusion::new(inputs_bshk.map(raw)).and(read).and(output.lse_bsh.map(raw));
    let [batch, queries, heads, _] = q;
    let mut made = fused.makes(q).makes(k).makes(v).beside(batch * queries * heads).run();
    [next(&mut made), next(&mut made), next(&mut made)]
}

impl Scores for Sizes {
    fn weigh(scores: Tensor<Self, 4>, seen: &Keys<Self>) -> (Tensor<Self, 4>, Tensor<Self, 3>) {
        let (shape, [batch, heads, _, _]) = (scores.dims(), scores.dims());
        let lse_bnh =
            Fusion::new([raw(scores.clone())]).makes([batch, seen.queries, heads * seen.group]).one::<3>();
        (next(&mut Fusion::new([raw(scores)]).makes(shape).named("changed")), lse_bnh)
    }

    fn weigh_again(scores: Tensor<Self, 4>, lse_bnh: Tensor<Self, 3>, _seen: &Keys<Self>) -> Tensor<Self, 4> {
        let shape = scores.dims();
        next(&mut Fusion::new([raw(lse_bnh), raw(scores)]).makes(shape).named("changed"))
    }

    fn pull(
        weights: Tensor<Self, 4>,
        dweights: Tensor<Self, 4>,
        delta_bnh: Tensor<Self, 3>,
        _seen: &Keys<Self>,
    ) -> Tensor<Self, 4> {
        let shape = dweights.dims();
        let fused = Fusion::new([raw(weights), raw(delta_bnh), raw(dweights)]);
        next(&mut fused.makes(shape).named("changed"))
    }

    fn dots(x_bshk: Tensor<Self, 4>, y_bshk: Tensor<Self, 4>) -> (Tensor<Self, 3>, Tensor<Self, 4>) {
        let shape @ [batch, tokens, heads, _] = x_bshk.dims();
        let fused = Fusion::new([raw(x_bshk.clone()), raw(y_bshk)]).makes([batch, tokens, heads]);
        if heads == 1 {
            return (fused.one(), x_bshk);
        }
        let mut made = fused.makes(shape).run();
        (next(&mut made), next(&mut made))
    }

    fn by_head(x_bshk: Tensor<Self, 4>) -> Tensor<Self, 4> {
        let [batch, tokens, heads, width] = x_bshk.dims();
        next(&mut Fusion::new([raw(x_bshk)]).makes([batch, heads, tokens, width]).named("lies"))
    }

    fn by_segment(x_1shk: Tensor<Self, 4>, _start: usize, [segments, len]: [usize; 2]) -> Tensor<Self, 4> {
        let [_, _, heads, width] = x_1shk.dims();
        next(&mut Fusion::new([raw(x_1shk)]).makes([segments, len, heads, width]).named("part"))
    }
}
