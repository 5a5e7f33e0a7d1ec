//! Layers of one input as one product, and what reads their outputs side by side.

use burn::{
    backend::Autodiff,
    tensor::{DType, Tensor},
};
use coxswain_nn::kernels::{
    AttentionMask, AttentionOps, JoinedHeads, JoinedLayers, LinearOps, LowRank, ModelBackend, RopeMask,
    RowOps,
};

use super::{Outcome, numbers, pulled, tensor};

/// Layers whose weights lie together, of an input that others read as well: with updates that kernels take
/// together, with ones that they do not, and without.
pub fn layers<B: ModelBackend>(device: &B::Device) -> Vec<Outcome> {
    let mut all = Vec::new();
    for (rank, width, outputs) in [
        (8, 264, vec![264, 8, 16]),
        (32, 64, vec![520, 132, 4]),
        (64, 132, vec![300, 264]),
        (64, 132, vec![12, 16, 20]),
        (4, 40, vec![24, 40]),
        (8, 40, vec![24, 21]),
    ] {
        let (n, sum) = (37, outputs.iter().sum::<usize>());
        let name = |what: &str| format!("joined {outputs:?} of {width}, rank {rank}: {what}");
        let w_oi = Tensor::from_inner(tensor::<B, 2>([sum, width], 1, device) * 0.1);
        let bias_o = Some(Tensor::from_inner(tensor::<B, 1>([sum], 2, device)));
        let gain = || Tensor::from_inner(tensor::<B, 1>([width], 3, device));
        let layers = |updates| JoinedLayers {
            w_oi: w_oi.clone().into(),
            bias_o: bias_o.clone(),
            updates,
            outputs: outputs.clone(),
            rounded: true,
        };
        let of = |x: Tensor<Autodiff<B>, 2>, updates| {
            let y = <Autodiff<B> as RowOps>::rms_norm(x, gain(), 1e-6);
            let joined = <Autodiff<B> as LinearOps>::joined(y.clone(), layers(updates));
            // Read by a product beside it, which adds its gradient.
            Tensor::cat(vec![joined, <Autodiff<B> as RowOps>::rms_norm(y, gain(), 1e-6)], 1)
        };
        all.extend(pulled::<B, 1, 2, 2>(&name("no updates"), device, [[n, width]], |[x]| of(x, Vec::new())));
        let update =
            |scale: usize, a_ri, b_or| LowRank { a_ri, b_or, scale: 0.1 * scale as f64, dropout: None };
        let of_layer = |number: usize| [[rank, width], [outputs[number], rank]];
        let ([a, b], [c, d]) = (of_layer(0), of_layer(1));
        match outputs.len() {
            2 => all.extend(pulled::<B, 5, 2, 2>(
                &name("updates"),
                device,
                [[n, width], a, b, c, d],
                |[x, a, b, c, d]| of(x, vec![update(1, a, b), update(2, c, d)]),
            )),
            _ => {
                let [e, f] = of_layer(2);
                all.extend(pulled::<B, 7, 2, 2>(
                    &name("updates"),
                    device,
                    [[n, width], a, b, c, d, e, f],
                    |[x, a, b, c, d, e, f]| of(x, vec![update(1, a, b), update(2, c, d), update(3, e, f)]),
                ));
            }
        }
    }
    all
}

/// A block of joined layers and the gradients of everything that is tracked: attention, a gate, and a layer
/// that reads what the gate has rounded.
pub fn block<B: ModelBackend>(device: &B::Device, narrow: DType) -> Vec<Vec<f32>> {
    let mut seed = 0;
    let mut leaf = |shape: [usize; 2]| {
        seed += 1;
        tensor::<Autodiff<B>, 2>(shape, seed, device).require_grad()
    };
    let to = (narrow != DType::F32).then_some(narrow);
    let weight = |shape: [usize; 2], seed| {
        let w = tensor::<B, 2>(shape, seed, device) * 0.1;
        Tensor::from_inner(if narrow == DType::F16 && B::ON_HOST { w } else { w.cast(narrow) })
    };
    let gain = || Tensor::from_inner(tensor::<B, 1>([64], 5, device));
    let normed = |x: &Tensor<Autodiff<B>, 2>| match to {
        Some(to) => RowOps::rms_norm_for_rounding(x.clone(), gain(), 1e-6, to),
        None => <Autodiff<B> as RowOps>::rms_norm(x.clone(), gain(), 1e-6),
    };
    let update = |[a_ri, b_or]: &[Tensor<Autodiff<B>, 2>; 2]| LowRank {
        a_ri: a_ri.clone(),
        b_or: b_or.clone(),
        // With a larger one scores are so steep that softmax multiplies whatever bfloat16 rounds.
        scale: 0.1,
        dropout: None,
    };
    let x = leaf([128, 64]);
    let factors = [[64, 64], [64, 32], [64, 32], [64, 96], [64, 96], [96, 64]]
        .map(|[inputs, outputs]| [leaf([8, inputs]), leaf([outputs, 8])]);
    let [q, k, v, gate, up, down] = factors.each_ref().map(update);
    let joined = |seed, outputs: Vec<usize>, updates, rounded| JoinedLayers {
        w_oi: weight([outputs.iter().sum(), 64], seed).into(),
        bias_o: None,
        updates,
        outputs,
        rounded: rounded && narrow == DType::BF16,
    };
    let layers = joined(11, vec![64, 32, 32], vec![q, k, v], false);
    let qkv_no = <Autodiff<B> as LinearOps>::joined(normed(&x), layers);
    let table = |seed| Tensor::from_inner(tensor::<B, 3>([1, 64, 16], seed, device));
    let mask = AttentionMask::Causal([0..64, 5..64].into());
    let attending = RopeMask { tables_bsk: [table(7), table(8)], mask: &mask, scale: 0.25, to };
    let heads = JoinedHeads { qkv_no, rows: [2, 64], heads: [4, 2, 2] };
    let h =
        x.clone() + <Autodiff<B> as AttentionOps>::rope_attention_joined(heads, attending).reshape([128, 64]);
    let layers = joined(12, vec![96, 96], vec![gate, up], true);
    let gate_up = <Autodiff<B> as LinearOps>::joined(normed(&h), layers);
    let inner = <Autodiff<B> as RowOps>::swiglu_joined(gate_up, to);
    let y = h + <Autodiff<B> as LinearOps>::lora_linear(inner, weight([64, 96], 13), None, down);
    let dy = tensor::<B, 2>([128, 64], 6, device);
    let gradients = (y.clone() * Tensor::from_inner(dy)).sum().backward();
    let gradient = |leaf: &Tensor<Autodiff<B>, 2>| numbers(leaf.grad(&gradients).expect("tracked"));
    let all = factors.iter().flatten().map(gradient);
    [numbers(y.inner()), gradient(&x)].into_iter().chain(all).collect()
}
