//! Rotary embedding and attention of slices.

use burn::{backend::Flex, tensor::Tensor};

use super::{
    attention,
    border::{BshkView, Values, attention_inputs, changed, is_f32, tensor},
    pointwise, rows,
    softmax::{self, ScoreBias},
};
use crate::{
    kernels::{AttentionMask, AttentionOps, AttentionOutput, AttentionSaved, backward, reference},
    profile,
};

impl AttentionOps for Flex {
    fn rotary(
        x_bshk: Tensor<Self, 4>,
        cos_bsk: Tensor<Self, 3>,
        sin_bsk: Tensor<Self, 3>,
    ) -> Tensor<Self, 4> {
        let _op = profile::operation("rotary embedding");
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
        let _op = profile::operation("rotary embedding, backward");
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
        let _op = profile::operation("attention");
        if !is_f32(&q_bshk) {
            let out_bshk = reference::attention(q_bshk, k_bshk, v_bshk, mask, scale);
            return AttentionOutput { out_bshk, lse_bsh: None };
        }
        let shape @ [batch, queries, heads, _] = q_bshk.dims();
        let (q, k, v) =
            (BshkView::from_tensor(q_bshk), BshkView::from_tensor(k_bshk), BshkView::from_tensor(v_bshk));
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
        let _op = profile::operation("attention, backward");
        let Some(lse_bsh) = saved.output.lse_bsh.clone() else {
            return backward::attention(saved, mask, scale, dout_bshk);
        };
        let (q_shape, k_shape) = (saved.q_bshk.dims(), saved.k_bshk.dims());
        let (q, k, v) = (
            BshkView::from_tensor(saved.q_bshk),
            BshkView::from_tensor(saved.k_bshk),
            BshkView::from_tensor(saved.v_bshk),
        );
        let (out, dout) = (BshkView::from_tensor(saved.output.out_bshk), BshkView::from_tensor(dout_bshk));
        let lse = Values::from_tensor(lse_bsh);
        let inputs = attention_inputs([&q, &k, &v], mask, scale);
        let outputs = attention::Outputs { out: out.heads(), lse: lse.get(), dout: dout.heads() };
        let (dq, dk, dv) = attention::backward(&inputs, &outputs);
        [tensor(dq, q_shape), tensor(dk, k_shape), tensor(dv, k_shape)]
    }

    fn biased_softmax(scores: Tensor<Self, 4>, added: &[Tensor<Self, 4>]) -> Tensor<Self, 4> {
        let _op = profile::operation("softmax");
        if !(is_f32(&scores) && added.iter().all(is_f32)) {
            return reference::biased_softmax(scores, added);
        }
        let shape = scores.dims();
        let held: Vec<_> =
            added.iter().map(|added| (Values::from_tensor(added.clone()), added.dims())).collect();
        let added: Vec<_> =
            held.iter().map(|(values, shape)| ScoreBias { values: values.get(), shape: *shape }).collect();
        changed(scores, |scores| softmax::forward(scores, shape, &added))
    }

    fn softmax_backward(weights: Tensor<Self, 4>, dweights: Tensor<Self, 4>) -> Tensor<Self, 4> {
        let _op = profile::operation("softmax, backward");
        if !(is_f32(&weights) && is_f32(&dweights)) {
            return backward::softmax(weights, dweights);
        }
        let ([.., keys], weights) = (weights.dims(), Values::from_tensor(weights));
        changed(dweights, |dweights| softmax::backward(weights.get(), dweights, keys))
    }

    fn heads_inside(x_bhsk: Tensor<Self, 4>) -> Tensor<Self, 4> {
        let _op = profile::operation("transposition of heads");
        let [batch, heads, len, width] = x_bhsk.dims();
        if !is_f32(&x_bhsk) {
            return x_bhsk.swap_dims(1, 2);
        }
        let x = Values::from_tensor(x_bhsk);
        let fill = |first: usize, rows: &mut [f32]| {
            for (row, out) in (first..).zip(rows.chunks_exact_mut((heads * width).max(1))) {
                let (b, at) = (row / len, row % len);
                for (head, out) in out.chunks_exact_mut(width).enumerate() {
                    let from = ((b * heads + head) * len + at) * width;
                    out.copy_from_slice(&x.get()[from..from + width]);
                }
            }
        };
        tensor(rows::build(batch * len, heads * width, fill), [batch, len, heads, width])
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
    let (x, cos, sin) = (Values::from_tensor(x_bshk), Values::from_tensor(cos), Values::from_tensor(sin));
    let rotation =
        pointwise::Rotation { cos: cos.get(), sin: sin.get(), rows: (tables * seq).max(1), backward };
    tensor(pointwise::rotary(x.get(), [batch * seq, heads, dim], &rotation), shape)
}
