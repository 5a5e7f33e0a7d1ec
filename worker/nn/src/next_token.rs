//! The loss of predicting tokens from hidden states, without ever holding the logits of all of them.
//!
//! A vocabulary is large: the logits of 4,096 tokens over 151,936 entries are 2.5 GB, and a loss that is
//! differentiated operation by operation holds several of them. Here rows go through head, cross entropy and
//! back in chunks, and each chunk's logits are overwritten by their gradient. That costs no product twice,
//! because the loss is a sum: its gradient by the hidden states needs nothing from above, so it is made at
//! once, forward and backward in one.
//!
//! A head may have a low-rank adapter, or a weight that trains: its gradient is made of the same chunks. Rows
//! that predict nothing have no logits. What this file does not do: know which tokens are learned.

use burn::tensor::{Int, Tensor, TensorData};

use crate::{
    kernels::{LinearOps, LowRank, LowRankSaved, ModelBackend},
    memory,
    params::{GradientSums, ParamSpec},
};

/// Logits of a chunk, in host memory: 64 MiB.
const CHUNK_ON_HOST: usize = 16 << 20;
/// Logits of a chunk on a device, which wants larger products: 256 MiB.
const CHUNK_ON_DEVICE: usize = 64 << 20;

/// Tokens that are predicted: from which row of the hidden states, and what is there.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TokenTargets {
    /// Rows, ascending.
    pub rows: Vec<u32>,
    /// The token that each predicts.
    pub ids: Vec<u32>,
}

impl TokenTargets {
    /// Targets of labels, one a row; none where nothing is predicted.
    pub fn of(labels: impl IntoIterator<Item = Option<u32>>) -> Self {
        let labelled = labels.into_iter().zip(0..).filter_map(|(label, row)| Some((row, label?)));
        let (rows, ids) = labelled.unzip();
        Self { rows, ids }
    }
}

/// What predicting tokens has come to.
pub struct NextTokens<B: ModelBackend> {
    /// Each target's loss in nats, and its margin: `x_t - max(x)`, zero where it is the likeliest token.
    pub rows: Vec<[f32; 2]>,
    /// The gradient of the losses' sum by the hidden states, as many as there were, if it was asked for;
    /// scaled ([`GradientSums::scaled`]), as the next one is.
    pub dhidden: Option<Tensor<B, 2>>,
    /// The gradient of the losses' sum by the two matrices of the head's update, if it has one; scaled like
    /// `dhidden`.
    pub dupdate: Option<[Tensor<B, 2>; 2]>,
}

/// What makes logits of hidden states.
pub struct Head<B: ModelBackend> {
    /// Weight, `[v, d]`.
    pub w_vd: Tensor<B, 2>,
    /// What an adapter adds; its dropout's rows are those of the targets.
    pub update: Option<LowRank<B>>,
    /// The parameter that the weight is, if it trains; then there is no adapter.
    pub trained: Option<ParamSpec>,
}

/// Rows whose logits over a vocabulary of so many entries are held at once.
pub fn chunk_rows(vocab: usize, on_host: bool) -> usize {
    let values = if on_host { CHUNK_ON_HOST } else { CHUNK_ON_DEVICE };
    (values / vocab.max(1)).max(1)
}

/// Predicts targets from rows of `hidden` `[n, d]`. With `grads` there are gradients, and that of a weight
/// that trains is added to them.
pub fn next_tokens<B: ModelBackend>(
    hidden_nd: Tensor<B, 2>,
    head: &Head<B>,
    targets: &TokenTargets,
    grads: Option<&mut dyn GradientSums<B>>,
) -> NextTokens<B> {
    let ([n, d], device) = (hidden_nd.dims(), hidden_nd.device());
    let indices = |rows: &[u32]| -> Tensor<B, 1, Int> {
        let rows: Vec<i32> = rows.iter().map(|&row| row as i32).collect();
        let len = rows.len();
        Tensor::from_data(TensorData::new(rows, [len]), &device)
    };
    let found = one_each(hidden_nd.select(0, indices(&targets.rows)), head, &targets.ids, grads);
    // Zero at rows that predict nothing. Each is taken from one place, so that no sum depends on an order.
    let spread = |dhidden_md: Tensor<B, 2>| {
        let mut sources = vec![targets.rows.len() as u32; n];
        for (&row, source) in targets.rows.iter().zip(0..) {
            sources[row as usize] = source;
        }
        Tensor::cat(vec![dhidden_md, Tensor::zeros([1, d], &device)], 0).select(0, indices(&sources))
    };
    NextTokens { dhidden: found.dhidden.map(spread), ..found }
}

/// One target from each row of `hidden` `[m, d]`.
fn one_each<B: ModelBackend>(
    hidden_md: Tensor<B, 2>,
    head: &Head<B>,
    targets: &[u32],
    mut grads: Option<&mut dyn GradientSums<B>>,
) -> NextTokens<B> {
    let Head { w_vd, update, trained } = head;
    let gradient = grads.is_some();
    let scale = grads.as_mut().and_then(|grads| grads.scaled(targets.len() as f64));
    let scaled = |dlogits_cv: Tensor<B, 2>| match scale {
        Some(scale) => dlogits_cv * scale,
        None => dlogits_cv,
    };
    let rows_at_once = chunk_rows(w_vd.dims()[0], B::ON_HOST);
    let (mut rows, mut gradients) = (Vec::with_capacity(targets.len()), Vec::new());
    let mut dupdate: Option<[Tensor<B, 2>; 2]> = None;
    for (chunk, targets) in targets.chunks(rows_at_once).enumerate() {
        memory::check();
        let first = chunk * rows_at_once;
        let hidden_cd = hidden_md.clone().narrow(0, first, targets.len());
        let Some(update) = update.as_ref().map(|update| update.of_rows(first, targets.len())) else {
            let logits_cv = <B as LinearOps>::linear(hidden_cd.clone(), w_vd.clone(), None);
            let found = B::cross_entropy(logits_cv, targets, gradient);
            rows.extend(found.rows);
            let Some(dlogits_cv) = found.dlogits_nv.map(scaled) else { continue };
            if let (Some(weight), Some(grads)) = (trained, &mut grads) {
                grads.add_weight_gradients(vec![(weight, [dlogits_cv.clone(), hidden_cd])]);
            }
            gradients.push(B::linear_input_gradient(dlogits_cv, w_vd.clone()));
            continue;
        };
        let (logits_cv, down_nr) = B::lora_linear_saving(hidden_cd.clone(), w_vd.clone(), None, &update);
        let found = B::cross_entropy(logits_cv, targets, gradient);
        rows.extend(found.rows);
        let Some(dlogits_cv) = found.dlogits_nv.map(scaled) else { continue };
        let saved = LowRankSaved { x_ni: hidden_cd, down_nr, w_oi: w_vd.clone().into(), update };
        let found = B::lora_linear_backward(saved, dlogits_cv, true);
        gradients.extend(found.dx_ni);
        dupdate = Some(match dupdate {
            Some([da_ri, db_or]) => [da_ri + found.da_ri, db_or + found.db_or],
            None => [found.da_ri, found.db_or],
        });
    }
    drop(hidden_md);
    let dhidden = match gradients.len() {
        0 => None,
        1 => gradients.pop(),
        _ => Some(Tensor::cat(gradients, 0)),
    };
    NextTokens { rows, dhidden, dupdate }
}

#[cfg(test)]
mod tests {
    use burn::{
        backend::{Autodiff, Flex},
        tensor::{Distribution, activation},
    };

    use super::*;
    use crate::{
        kernels::{RowOps, reference},
        params::{FlatGrads, Group, Init, TrainableLayout},
    };

    type A = Autodiff<Flex>;

    fn drawn(shape: [usize; 2], scale: f64) -> Tensor<Flex, 2> {
        Tensor::random(shape, Distribution::Normal(0.0, scale), &Default::default())
    }

    fn off(found: Tensor<Flex, 2>, wanted: Tensor<Flex, 2>) -> f32 {
        let size: f32 = wanted.clone().powi_scalar(2).sum().into_scalar();
        let difference: f32 = (found - wanted).powi_scalar(2).sum().into_scalar();
        (difference / size).sqrt()
    }

    #[test]
    fn chunks_give_the_loss_and_the_gradient_of_all_logits_at_once() {
        // So many that a chunk ends within them.
        let (m, d, v) = (45, 24, CHUNK_ON_HOST / 16);
        let (hidden, head) = (drawn([m, d], 1.0), drawn([v, d], 0.3));
        // Every sixth row predicts nothing.
        let labels = (0..m as u32).map(|row| (row % 6 != 5).then_some(row * 7919 % v as u32));
        let targets = TokenTargets::of(labels);
        let [a, b] = [drawn([2, d], 0.3), drawn([v, 2], 0.3)];
        let update = LowRank { a_ri: a.clone(), b_or: b.clone(), scale: 0.7, dropout: None };
        let adapted = Head { w_vd: head.clone(), update: Some(update), trained: None };
        let mut layout = TrainableLayout::default();
        let id = layout.add("head.weight".into(), &[v, d], Group::BASE, true, Init::Pretrained);
        let head = Head { w_vd: head, update: None, trained: Some(layout.get(id).clone()) };
        chunks_are_one(&hidden, &head, None, &targets);
        chunks_are_one(&hidden, &adapted, Some([a, b]), &targets);
    }

    fn chunks_are_one(
        hidden: &Tensor<Flex, 2>,
        head: &Head<Flex>,
        update: Option<[Tensor<Flex, 2>; 2]>,
        targets: &TokenTargets,
    ) {
        let m = targets.ids.len();
        let mut sums = FlatGrads::new(head.w_vd.dims().iter().product());
        let found = next_tokens(hidden.clone(), head, targets, Some(&mut sums));

        let leaf = Tensor::<A, 2>::from_inner(hidden.clone()).require_grad();
        let weight = Tensor::<A, 2>::from_inner(head.w_vd.clone()).require_grad();
        let integers = |values: &[u32]| -> Tensor<A, 1, Int> {
            let values: Vec<i32> = values.iter().map(|&value| value as i32).collect();
            Tensor::from_data(TensorData::new(values, [m]), &Default::default())
        };
        let picked = leaf.clone().select(0, integers(&targets.rows));
        let mut logits = picked.clone().matmul(weight.clone().transpose());
        let leaves = update.map(|both| both.map(|matrix| Tensor::<A, 2>::from_inner(matrix).require_grad()));
        if let Some([a, b]) = &leaves {
            logits = logits + picked.matmul(a.clone().transpose()).matmul(b.clone().transpose()) * 0.7;
        }
        let ids = integers(&targets.ids).reshape([m, 1]);
        let losses = activation::log_softmax(logits, 1).gather(1, ids).neg();
        let wanted: Vec<f32> = losses.clone().into_data().into_vec().expect("f32");
        for (row, wanted) in found.rows.iter().zip(&wanted) {
            assert!((row[0] - wanted).abs() < 1e-4, "{row:?} is not {wanted}");
        }
        let gradients = losses.sum().backward();
        let dhidden = found.dhidden.expect("it was asked for");
        assert!(off(dhidden, leaf.grad(&gradients).expect("tracked")) < 1e-4);
        for (leaf, found) in leaves.iter().flatten().zip(found.dupdate.into_iter().flatten()) {
            assert!(off(found, leaf.grad(&gradients).expect("tracked")) < 1e-4);
        }

        let dweight = Tensor::from_data(
            TensorData::new(sums.values_mut().clone(), head.w_vd.dims()),
            &Default::default(),
        );
        match head.trained {
            Some(_) => assert!(off(dweight, weight.grad(&gradients).expect("tracked")) < 1e-4),
            None => assert_eq!(dweight.abs().sum().into_scalar(), 0.0, "a frozen weight has no gradient"),
        }

        let alone = next_tokens(hidden.clone(), head, targets, None);
        assert!(alone.dhidden.is_none());
        for (row, wanted) in alone.rows.iter().zip(&found.rows) {
            assert!((row[0] - wanted[0]).abs() < 1e-5 && row[1] == wanted[1], "{row:?} is not {wanted:?}");
        }
    }

    #[test]
    fn the_fused_loss_is_the_reference_and_says_when_the_target_is_likeliest() {
        let logits = drawn([9, 1003], 4.0);
        let likeliest: Vec<i32> =
            logits.clone().argmax(1).into_data().convert::<i32>().into_vec().expect("i32");
        let mut targets: Vec<u32> = likeliest.iter().map(|&id| id as u32).collect();
        targets[4] = (targets[4] + 1) % 1003;
        let found = <Flex as RowOps>::cross_entropy(logits.clone(), &targets, true);
        let wanted = reference::cross_entropy(logits, &targets, true);
        for (row, (found, wanted)) in found.rows.iter().zip(&wanted.rows).enumerate() {
            assert!((found[0] - wanted[0]).abs() < 1e-4 * wanted[0].max(1.0), "{found:?} is not {wanted:?}");
            assert_eq!(found[1] == 0.0, row != 4, "{found:?}");
        }
        let [found, wanted] = [found, wanted].map(|of| of.dlogits_nv.expect("it was asked for"));
        assert!(off(found, wanted) < 1e-5);
    }

    #[test]
    fn nothing_to_predict_is_no_loss() {
        let head = Head { w_vd: drawn([8, 4], 1.0), update: None, trained: None };
        let none = TokenTargets::default();
        let found = next_tokens(drawn([3, 4], 1.0), &head, &none, Some(&mut FlatGrads::new(0)));
        assert!(found.rows.is_empty() && found.dhidden.is_none());
    }
}
