//! Every operation of [`ModelBackend`](super::ModelBackend) in burn's own tensor operations: slow, obvious,
//! differentiable anywhere.

use burn::tensor::{DType, IndexingUpdateOp, Int, Tensor, TensorData, activation, backend::Backend};

use super::{AttentionMask, CrossEntropy, LowRank};

/// See [`RowOps::rms_norm`](super::RowOps::rms_norm).
pub fn rms_norm<B: Backend>(x_nd: Tensor<B, 2>, gain_d: Tensor<B, 1>, eps: f64) -> Tensor<B, 2> {
    let mean_square_n1 = (x_nd.clone() * x_nd.clone()).mean_dim(1);
    x_nd * (mean_square_n1 + eps).sqrt().recip() * gain_d.unsqueeze()
}

/// See [`RowOps::cross_entropy`](super::RowOps::cross_entropy).
pub fn cross_entropy<B: Backend>(
    logits_nv: Tensor<B, 2>,
    targets: &[u32],
    gradient: bool,
) -> CrossEntropy<B> {
    let (n, device) = (targets.len(), logits_nv.device());
    let targets: Vec<i32> = targets.iter().map(|&target| target as i32).collect();
    let targets_n1: Tensor<B, 2, Int> = Tensor::from_data(TensorData::new(targets, [n, 1]), &device);
    let shifted_nv = logits_nv.clone() - logits_nv.max_dim(1);
    let margin_n1 = shifted_nv.clone().gather(1, targets_n1.clone());
    let weights_nv = shifted_nv.exp();
    let sum_n1 = weights_nv.clone().sum_dim(1);
    let rows_n2 = Tensor::cat(vec![sum_n1.clone().log() - margin_n1.clone(), margin_n1], 1);
    let rows = rows_n2.into_data().convert::<f32>().into_vec::<f32>().expect("converted to f32");
    let minus_one_n1 = Tensor::ones([n, 1], &device).neg();
    let dlogits_nv =
        gradient.then(|| (weights_nv / sum_n1).scatter(1, targets_n1, minus_one_n1, IndexingUpdateOp::Add));
    CrossEntropy { rows: rows.as_chunks().0.to_vec(), dlogits_nv }
}

/// See [`RowOps::swiglu`](super::RowOps::swiglu).
pub fn swiglu<B: Backend>(gate_nf: Tensor<B, 2>, up_nf: Tensor<B, 2>) -> Tensor<B, 2> {
    activation::silu(gate_nf) * up_nf
}

/// See [`AttentionOps::rotary`](super::AttentionOps::rotary).
pub fn rotary<B: Backend>(
    x_bshk: Tensor<B, 4>,
    cos_bsk: Tensor<B, 3>,
    sin_bsk: Tensor<B, 3>,
) -> Tensor<B, 4> {
    let half = x_bshk.dims()[3] / 2;
    let first = x_bshk.clone().narrow(3, 0, half);
    let second = x_bshk.clone().narrow(3, half, half);
    let rotated_bshk = Tensor::cat(vec![-second, first], 3);
    x_bshk * cos_bsk.unsqueeze_dim(2) + rotated_bshk * sin_bsk.unsqueeze_dim(2)
}

/// See [`AttentionOps::attention`](super::AttentionOps::attention).
pub fn attention<B: Backend>(
    q_bshk: Tensor<B, 4>,
    k_bshk: Tensor<B, 4>,
    v_bshk: Tensor<B, 4>,
    mask: &AttentionMask,
    scale: f64,
) -> Tensor<B, 4> {
    let [batch, queries, heads, _] = q_bshk.dims();
    let [_, keys, kv_heads, _] = k_bshk.dims();
    let device = q_bshk.device();
    let group = heads / kv_heads;
    let q_bhqk = q_bshk.swap_dims(1, 2);
    let k_bhsk = repeat_heads(k_bshk.swap_dims(1, 2), group);
    let v_bhsk = repeat_heads(v_bshk.swap_dims(1, 2), group);

    let blockwise: Vec<bool> = (0..batch * queries * keys)
        .map(|i| !admits(mask, i / (queries * keys), i / keys % queries, i % keys))
        .collect();
    let blockwise_b1qs = Tensor::<B, 4, burn::tensor::Bool>::from_data(
        TensorData::new(blockwise, [batch, 1, queries, keys]),
        &device,
    )
    .expand([batch, heads, queries, keys]);
    let scores_bhqs =
        (q_bhqk.matmul(k_bhsk.swap_dims(2, 3)) * scale).mask_fill(blockwise_b1qs.clone(), -1e30);
    let weights_bhqs = activation::softmax(scores_bhqs, 3).mask_fill(blockwise_b1qs, 0.0);
    weights_bhqs.matmul(v_bhsk).swap_dims(1, 2)
}

/// See [`AttentionOps::biased_softmax`](super::AttentionOps::biased_softmax).
pub fn biased_softmax<B: Backend>(scores: Tensor<B, 4>, added: &[Tensor<B, 4>]) -> Tensor<B, 4> {
    activation::softmax(added.iter().fold(scores, |scores, added| scores + added.clone()), 3)
}

/// Whether query `q` of batch row `b` may attend to key `k`.
pub fn admits(mask: &AttentionMask, b: usize, q: usize, k: usize) -> bool {
    match mask {
        AttentionMask::Full => true,
        AttentionMask::Keys(ranges) => ranges[b].contains(&(k as u32)),
        AttentionMask::Causal(ranges) => k <= q && ranges[b].contains(&(k as u32)),
        AttentionMask::Segments(ends) => segment_of(ends, q) == segment_of(ends, k),
        AttentionMask::CausalSegments(ends) => k <= q && segment_of(ends, q) == segment_of(ends, k),
    }
}

fn segment_of(ends: &[u32], position: usize) -> usize {
    ends.partition_point(|&end| end as usize <= position)
}

fn repeat_heads<B: Backend>(x_bhsk: Tensor<B, 4>, group: usize) -> Tensor<B, 4> {
    let [batch, heads, seq, dim] = x_bhsk.dims();
    x_bhsk.unsqueeze_dim::<5>(2).expand([batch, heads, group, seq, dim]).reshape([
        batch,
        heads * group,
        seq,
        dim,
    ])
}

/// See [`LinearOps::linear`](super::LinearOps::linear).
pub fn linear<B: Backend>(
    x_ni: Tensor<B, 2>,
    w_oi: Tensor<B, 2>,
    bias_o: Option<Tensor<B, 1>>,
) -> Tensor<B, 2> {
    let dtype = x_ni.dtype();
    let y_no = x_ni.matmul(same_dtype(w_oi, dtype).transpose());
    match bias_o {
        Some(bias_o) => y_no + bias_o.cast(dtype).unsqueeze(),
        None => y_no,
    }
}

/// See [`LinearOps::lora_linear`](super::LinearOps::lora_linear).
pub fn lora_linear<B: Backend>(
    x_ni: Tensor<B, 2>,
    w_oi: Tensor<B, 2>,
    bias_o: Option<Tensor<B, 1>>,
    update: LowRank<B>,
) -> Tensor<B, 2> {
    lora_linear_saving(x_ni, w_oi, bias_o, &update).0
}

/// See [`LinearOps::lora_linear_saving`](super::LinearOps::lora_linear_saving).
pub fn lora_linear_saving<B: Backend>(
    x_ni: Tensor<B, 2>,
    w_oi: Tensor<B, 2>,
    bias_o: Option<Tensor<B, 1>>,
    update: &LowRank<B>,
) -> (Tensor<B, 2>, Tensor<B, 2>) {
    let (low_no, down_nr) = low_rank(x_ni.clone(), update);
    (linear(x_ni, w_oi, bias_o) + low_no, down_nr)
}

/// A linear with an update, without the weight: what the update alone adds, `[n, o]`, and `scale * x a^T`.
pub fn low_rank<B: Backend>(x_ni: Tensor<B, 2>, update: &LowRank<B>) -> (Tensor<B, 2>, Tensor<B, 2>) {
    let dtype = x_ni.dtype();
    let a_ri = same_dtype(update.a_ri.clone(), dtype);
    let b_or = same_dtype(update.b_or.clone(), dtype);
    let down_nr = update.input(x_ni).matmul(a_ri.transpose()) * update.scale;
    (down_nr.clone().matmul(b_or.transpose()), down_nr)
}

/// `w`, converted if it has to be.
pub(super) fn same_dtype<B: Backend>(w: Tensor<B, 2>, dtype: DType) -> Tensor<B, 2> {
    if w.dtype() == dtype { w } else { w.cast(dtype) }
}

/// See [`RowOps::rounded`](super::RowOps::rounded).
pub fn rounded<B: Backend>(x_nd: Tensor<B, 2>) -> Tensor<B, 2> {
    let dtype = x_nd.dtype();
    x_nd.cast(DType::BF16).cast(dtype)
}

/// See [`RowOps::layer_norm`](super::RowOps::layer_norm).
pub fn layer_norm<B: Backend>(x_nd: Tensor<B, 2>, eps: f64) -> Tensor<B, 2> {
    let centred_nd = x_nd.clone() - x_nd.mean_dim(1);
    let variance_n1 = (centred_nd.clone() * centred_nd.clone()).mean_dim(1);
    centred_nd * (variance_n1 + eps).sqrt().recip()
}

/// See [`RowOps::modulated_layer_norm`](super::RowOps::modulated_layer_norm).
pub fn modulated_layer_norm<B: Backend>(
    x_nd: Tensor<B, 2>,
    scale_bd: Tensor<B, 2>,
    shift_bd: Tensor<B, 2>,
    eps: f64,
) -> Tensor<B, 2> {
    let [rows, dim] = x_nd.dims();
    let batch = scale_bd.dims()[0];
    let y_bsd = layer_norm(x_nd, eps).reshape([batch, rows / batch, dim]);
    let y_bsd = y_bsd * (scale_bd.unsqueeze_dim::<3>(1) + 1.0) + shift_bd.unsqueeze_dim::<3>(1);
    y_bsd.reshape([rows, dim])
}

/// See [`RowOps::gelu_tanh`](super::RowOps::gelu_tanh).
pub fn gelu_tanh<B: Backend>(x_nf: Tensor<B, 2>) -> Tensor<B, 2> {
    let cube = x_nf.clone() * x_nf.clone() * x_nf.clone();
    let inner = (x_nf.clone() + cube * 0.044_715) * (2.0 / std::f64::consts::PI).sqrt();
    x_nf * (inner.tanh() + 1.0) * 0.5
}
