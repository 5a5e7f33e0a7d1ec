//! Operations on a GPU against their references on the CPU. Without a GPU each test says so and passes.

use std::{io::Write, ops::Range};

use burn::{
    backend::{Autodiff, Flex},
    tensor::{DType, Tensor, TensorData, backend::Backend},
};

use burn_cuda::{Cuda, CudaDevice};
use coxswain_integration_tests::expert;
use coxswain_nn::kernels::{
    AdaNorm, AttentionMask, AttentionOps, JoinedHeads, LinearLayer, LinearOps, LowRank, ModelBackend,
    Residual, RopeMask, RowOps,
    flat::{Coefficients, FlatOn, Gradient, OnDevice, Part, Run},
};
use coxswain_proto::run_spec::Recompute;
use coxswain_worker::device::Accelerator;

use crate::NVIDIA;

mod dropout;
mod few_bits;
mod flash;
mod joined;
mod peaks;
mod rounded;

/// The first GPU, if this machine has one that can be used.
fn gpu() -> Option<CudaDevice> {
    match NVIDIA.probe() {
        Ok(_) => Some(CudaDevice::new(0)),
        Err(missing) => {
            // A stderr that is closed loses a line, and nothing else.
            let _ = writeln!(std::io::stderr(), "skipped: operations on a GPU: {missing}");
            None
        }
    }
}

fn values(count: usize, seed: u64) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 40) as f32 / (1 << 23) as f32 - 1.0
    };
    (0..count).map(|_| next()).collect()
}

fn tensor<B: Backend, const D: usize>(shape: [usize; D], seed: u64, device: &B::Device) -> Tensor<B, D> {
    Tensor::from_data(TensorData::new(values(shape.iter().product(), seed), shape), device)
}

fn numbers<B: Backend, const D: usize>(x: Tensor<B, D>) -> Vec<f32> {
    x.into_data().convert::<f32>().to_vec().expect("converted to f32")
}

/// Norm of the difference over the norm.
#[track_caller]
fn assert_close(what: &str, found: &[f32], expected: &[f32], tolerance: f64) {
    assert_close_at_least(what, found, expected, 0.0, tolerance);
}

/// Asserts that the norm of the difference over the norm is small; a result that is zero but for rounding is
/// held against values of this size.
#[track_caller]
fn assert_close_at_least(what: &str, found: &[f32], expected: &[f32], least: f64, tolerance: f64) {
    assert_eq!(found.len(), expected.len(), "{what}");
    let norm = |values: &mut dyn Iterator<Item = f64>| values.map(|x| x * x).sum::<f64>().sqrt();
    let size = norm(&mut expected.iter().map(|&x| f64::from(x))).max(least * (expected.len() as f64).sqrt());
    let error = norm(&mut found.iter().zip(expected).map(|(&a, &b)| f64::from(a) - f64::from(b)));
    assert!(error <= tolerance * size, "{what}: relative error {:e}", error / size);
}

/// Values of a tensor as a narrower type has them.
type Rounding<'a> = &'a dyn Fn(Tensor<Cuda, 2>) -> Vec<f32>;

#[test]
fn what_is_missing_is_reported_with_a_remedy() {
    if let Err(missing) = NVIDIA.probe() {
        let message = missing.to_string();
        let remedies = ["install", "check", "newer"];
        assert!(remedies.iter().any(|remedy| message.contains(remedy)), "{message}");
    }
}

/// What one operation gave.
type Outcome = (String, Vec<f32>);

/// One operation under autodiff: its value, and the gradients of all inputs.
fn pulled<B: ModelBackend, const N: usize, const D: usize, const E: usize>(
    what: &str,
    device: &B::Device,
    shapes: [[usize; D]; N],
    operation: impl Fn([Tensor<Autodiff<B>, D>; N]) -> Tensor<Autodiff<B>, E>,
) -> Vec<Outcome> {
    let mut seed = 10;
    let inputs = shapes.map(|shape| {
        seed += 1;
        tensor::<Autodiff<B>, D>(shape, seed, device).require_grad()
    });
    let y = operation(inputs.clone());
    let dy = tensor::<B, E>(y.dims(), 99, device);
    let gradients = (y.clone() * Tensor::from_inner(dy)).sum().backward();
    let mut outcomes = vec![(what.to_owned(), numbers(y.inner()))];
    for (i, input) in inputs.iter().enumerate() {
        outcomes.push((format!("{what}, gradient {i}"), numbers(input.grad(&gradients).expect("tracked"))));
    }
    outcomes
}

/// Every operation that has a kernel of its own, in widths that fill vectors and planes and in ones that do
/// not.
fn operations<B: ModelBackend>(device: &B::Device) -> Vec<Outcome> {
    let mut all = Vec::new();
    for width in [3, 64, 1280] {
        let frozen = |len, seed| Tensor::from_inner(tensor::<B, 1>([len], seed, device));
        let name = |what: &str| format!("{what} of width {width}");
        let one = [[6, width]];
        all.extend(pulled::<B, 1, 2, 2>(&name("rms_norm"), device, one, |[x]| {
            RowOps::rms_norm(x, frozen(width, 1), 1e-6)
        }));
        all.extend(pulled::<B, 1, 2, 2>(&name("layer_norm"), device, one, |[x]| RowOps::layer_norm(x, 1e-5)));
        all.extend(pulled::<B, 1, 2, 2>(&name("x + layer_norm"), device, one, |[x]| {
            x.clone() + <Autodiff<B> as RowOps>::layer_norm(x, 1e-5)
        }));
        for shift_first in [false, true] {
            let (what, how) =
                (format!("ada_layer_norm, shift {shift_first}"), AdaNorm { shift_first, eps: 1e-5 });
            let modulated = [[6, width], [3, 2 * width]];
            all.extend(pulled::<B, 2, 2, 2>(&name(&what), device, modulated, |[x, ada]| {
                RowOps::ada_layer_norm(x, ada, how)
            }));
            all.extend(pulled::<B, 2, 2, 2>(&name(&format!("x + {what}")), device, modulated, |[x, ada]| {
                x.clone() + <Autodiff<B> as RowOps>::ada_layer_norm(x, ada, how)
            }));
        }
        all.extend(pulled::<B, 2, 2, 2>(&name("swiglu"), device, [[6, width]; 2], |[gate, up]| {
            RowOps::swiglu(gate, up)
        }));
        all.extend(pulled::<B, 1, 2, 2>(&name("swiglu_joined"), device, [[6, 2 * width]], |[both]| {
            RowOps::swiglu_joined(both, None)
        }));
        all.extend(pulled::<B, 2, 2, 2>(&name("rounded_sum"), device, [[6, width]; 2], |[x, y]| {
            RowOps::rounded_sum(x, y)
        }));
        all.extend(pulled::<B, 1, 2, 2>(&name("rounded"), device, one, |[x]| RowOps::rounded(x)));
        all.extend(pulled::<B, 1, 2, 2>(&name("gelu_tanh"), device, one, |[x]| RowOps::gelu_tanh(x)));
        all.extend(pulled::<B, 1, 2, 2>(&name("gelu_erf"), device, one, |[x]| RowOps::gelu_erf(x)));
        all.extend(pulled::<B, 2, 2, 2>(&name("linear"), device, [[6, width], [5, width]], |[x, w]| {
            LinearOps::linear(x, w, Some(frozen(5, 2)))
        }));
    }
    all.extend(low_rank_updates::<B>(device));
    all.extend(layers_of_one_input::<B>(device));
    all.extend(joined::layers::<B>(device));
    all.extend(finished_sums::<B>(device));
    for rows in [1, 2] {
        let table = |seed| Tensor::from_inner(tensor::<B, 3>([rows, 3, 8], seed, device));
        let what = format!("rotary by tables of {rows} rows");
        all.extend(pulled::<B, 1, 4, 4>(&what, device, [[2, 3, 5, 8]], |[x]| {
            AttentionOps::rotary(x, table(3), table(4))
        }));
        let what = format!("attention of turned slices, tables of {rows} rows");
        all.extend(pulled::<B, 1, 4, 4>(&what, device, [[2, 3, 8, 8]], |[qkv]| {
            let part = |start, heads| qkv.clone().narrow(2, start, heads);
            let mask = AttentionMask::Causal([0..3, 1..3].into());
            let inputs = [part(0, 4), part(4, 2), part(6, 2)];
            AttentionOps::rope_attention(inputs, [table(3), table(4)], &mask, 0.35)
        }));
        let what = format!("attention of joined heads, tables of {rows} rows");
        all.extend(pulled::<B, 1, 2, 4>(&what, device, [[6, 64]], |[qkv_no]| {
            let mask = AttentionMask::Causal([0..3, 1..3].into());
            let attending = RopeMask { tables_bsk: [table(3), table(4)], mask: &mask, scale: 0.35, to: None };
            let joined = JoinedHeads { qkv_no, rows: [2, 3], heads: [4, 2, 2] };
            <Autodiff<B> as AttentionOps>::rope_attention_joined(joined, attending)
        }));
    }
    // Heads of an odd width, one behind the other in a row.
    all.extend(pulled::<B, 1, 4, 4>("attention by odd heads", device, [[2, 6, 9, 15]], |[qkv]| {
        let part = |start| qkv.clone().narrow(2, start, 3);
        <Autodiff<B> as AttentionOps>::attention(part(0), part(3), part(6), &AttentionMask::Full, 0.35)
    }));
    for (what, [queries, keys], mask) in [
        ("full", [40, 50], AttentionMask::Full),
        ("keys", [5, 70], AttentionMask::Keys([0..70, 35..61].into())),
        ("causal", [45, 45], AttentionMask::Causal([0..45, 0..45].into())),
        ("causal from", [45, 45], AttentionMask::Causal([7..45, 3..30].into())),
    ] {
        let what = format!("{what} attention");
        all.extend(attended::<B>(&what, device, [2, queries, keys, 4], &mask));
    }
    // One key/value head of several rows.
    all.extend(attended::<B>("attention by one head", device, [3, 40, 50, 1], &AttentionMask::Full));
    for ends in [vec![0, 16, 32, 48], vec![0, 20, 20, 40, 41, 48]] {
        let what = format!("attention in segments {ends:?}");
        let causal = AttentionMask::CausalSegments(ends.clone().into());
        all.extend(attended::<B>(&what, device, [1, 48, 48, 2], &AttentionMask::Segments(ends.into())));
        all.extend(attended::<B>(&format!("causal {what}"), device, [1, 48, 48, 2], &causal));
    }
    all
}

/// Linear layers with an update, of ranks that have kernels and of ones that do not, in sizes that fill their
/// tiles and in ones that do not.
fn low_rank_updates<B: ModelBackend>(device: &B::Device) -> Vec<Outcome> {
    let mut all = Vec::new();
    for (rank, [n, i, o]) in [
        (4, [6, 40, 24]),
        (8, [37, 264, 520]),
        (8, [4, 30, 24]),
        (16, [5, 64, 72]),
        (32, [33, 520, 260]),
        (64, [17, 1028, 132]),
    ] {
        let frozen = tensor::<B, 2>([o, i], 1, device);
        let bias = tensor::<B, 1>([o], 2, device);
        let what = format!("a layer of {i} to {o} with an update of rank {rank}");
        all.extend(pulled::<B, 3, 2, 2>(&what, device, [[n, i], [rank, i], [o, rank]], |[x, a_ri, b_or]| {
            let (w, bias) = (Tensor::from_inner(frozen.clone()), Tensor::from_inner(bias.clone()));
            LinearOps::lora_linear(x, w, Some(bias), LowRank { a_ri, b_or, scale: 0.5, dropout: None })
        }));
    }
    // A narrow weight: of an input that rounding to bfloat16 does not change, the value is exact, and in
    // float16 as well, whose mantissa is longer. (A CPU has no float16: it gets the same numbers as float32.)
    let sizes = [(8, [37, 264, 520]), (32, [33, 520, 260]), (64, [17, 1028, 132])];
    for (dtype, (rank, [n, i, o])) in
        [DType::BF16, DType::F16].into_iter().flat_map(|of| sizes.map(|s| (of, s)))
    {
        let x = RowOps::rounded(tensor::<B, 2>([n, i], 3, device));
        let w = tensor::<B, 2>([o, i], 1, device).cast(DType::BF16);
        let w = match dtype {
            DType::BF16 => w,
            _ if B::ON_HOST => w.cast(DType::F32),
            _ => w.cast(dtype),
        };
        let what = format!("a {dtype:?} layer of {i} to {o} with an update of rank {rank}");
        all.extend(pulled::<B, 2, 2, 2>(&what, device, [[rank, i], [o, rank]], |[a_ri, b_or]| {
            let (x, w) = (Tensor::from_inner(x.clone()), Tensor::from_inner(w.clone()));
            LinearOps::lora_linear(x, w, None, LowRank { a_ri, b_or, scale: 0.5, dropout: None })
        }));
    }
    all
}

/// Two layers of one input that others read as well: gradients are added to gradients that are there.
fn layers_of_one_input<B: ModelBackend>(device: &B::Device) -> Vec<Outcome> {
    let mut all = Vec::new();
    for (ranks, [n, width]) in [
        ([8, 8], [37, 264]),
        ([64, 64], [17, 132]),
        ([32, 16], [33, 64]),
        ([8, 4], [6, 40]),
        ([5, 5], [6, 30]),
    ] {
        let frozen = |seed| Tensor::from_inner(tensor::<B, 2>([width, width], seed, device) * 0.1);
        let gain = || Tensor::from_inner(tensor::<B, 1>([width], 3, device));
        let what = format!("layers of width {width} with updates of ranks {ranks:?}");
        let [r, q] = ranks;
        let shapes = [[n, width], [r, width], [width, r], [q, width], [width, q]];
        all.extend(pulled::<B, 5, 2, 2>(&what, device, shapes, |[x, a, b, c, d]| {
            let y = RowOps::rms_norm(x.clone(), gain(), 1e-6);
            let layer = |seed, a_ri, b_or| LinearLayer {
                w_oi: frozen(seed).into(),
                bias_o: Some(gain()),
                update: Some(LowRank { a_ri, b_or, scale: 0.1 * seed as f64, dropout: None }),
            };
            let outputs = LinearOps::linears(y, vec![layer(1, a, b), layer(2, c, d)]);
            outputs.into_iter().fold(x, |x, y| x + y)
        }));
    }
    all
}

/// What finishes products: values of a few bits, so that sums are exact and are rounded alike.
fn finished_sums<B: ModelBackend>(device: &B::Device) -> Vec<Outcome> {
    let few_bits = |shape: [usize; 2], seed| (tensor::<B, 2>(shape, seed, device) * 4.0).round() * 0.25;
    let mut all = Vec::new();
    for (rank, [n, i, o]) in [(8, [37, 24, 260]), (32, [5, 40, 72]), (4, [6, 40, 24]), (8, [4, 30, 21])] {
        for rounded in [false, true] {
            let residual = || Residual { x_no: few_bits([n, o], 1), rounded };
            let (x, w) = (few_bits([n, i], 2), few_bits([o, i], 3));
            let bias = (rank != 32).then(|| few_bits([1, o], 4).reshape([o]));
            let update = LowRank {
                a_ri: few_bits([rank, i], 5),
                b_or: few_bits([o, rank], 6),
                scale: 0.5,
                dropout: None,
            };
            let what = format!("a sum onto {n} rows of {o}, rank {rank}, rounded {rounded}");
            let (sum, down) =
                B::lora_linear_residual_saving(residual(), x.clone(), w.clone(), bias.clone(), &update);
            let plain = <B as LinearOps>::linear_residual(residual(), x, w, bias);
            for (part, value) in [("sum", sum), ("inner product", down), ("without an update", plain)] {
                all.push((format!("{what}: {part}"), numbers(value)));
            }
        }
    }
    all
}

#[test]
fn what_is_made_for_products_that_round_is_what_they_round() {
    let Some(gpu) = gpu() else { return };
    for width in [3, 64, 1280] {
        let (x, y) = (tensor::<Cuda, 2>([6, width], 1, &gpu), tensor::<Cuda, 2>([6, width], 2, &gpu));
        let gain = tensor::<Cuda, 1>([width], 3, &gpu);
        let rounded = |x| numbers(Cuda::rounded(x));
        let in_float16 = |x: Tensor<Cuda, 2>| numbers(x.cast(DType::F16));
        let both: [(DType, Rounding<'_>); 2] = [(DType::BF16, &rounded), (DType::F16, &in_float16)];
        for (dtype, rounded) in both {
            let normed = Cuda::rms_norm_for_rounding(x.clone(), gain.clone(), 1e-6, dtype);
            assert_eq!(normed.dtype(), dtype);
            let expected = rounded(Cuda::rms_norm(x.clone(), gain.clone(), 1e-6));
            assert_eq!(numbers(normed), expected, "a norm of width {width}");
            let mixed = Cuda::swiglu_for_rounding(x.clone(), y.clone(), dtype);
            let expected = rounded(Cuda::swiglu(x.clone(), y.clone()));
            assert_eq!(numbers(mixed), expected, "a gate of width {width}");
        }
    }
}

/// Attention of four query heads, `[batch, queries, keys, kv_heads]`.
fn attended<B: ModelBackend>(
    what: &str,
    device: &B::Device,
    [batch, queries, keys, kv_heads]: [usize; 4],
    mask: &AttentionMask,
) -> Vec<Outcome> {
    let inputs = [[batch, queries, 4, 8], [batch, keys, kv_heads, 8], [batch, keys, kv_heads, 8]];
    pulled::<B, 3, 4, 4>(what, device, inputs, |[q, k, v]| {
        <Autodiff<B> as AttentionOps>::attention(q, k, v, mask, 0.35)
    })
}

#[test]
fn every_operation_agrees_with_the_cpu() {
    let Some(gpu) = gpu() else { return };
    let expected = operations::<Flex>(&Default::default());
    let found = operations::<Cuda>(&gpu);
    assert_eq!(found.len(), expected.len());
    for ((what, found), (_, expected)) in found.iter().zip(&expected) {
        // A gradient may be zero but for rounding.
        assert_close_at_least(what, found, expected, 1e-2, 1e-5);
    }
}

/// Pieces of a flat buffer, more of them than one kernel takes: of a few elements, of some cubes, and at
/// places where no vector begins.
fn pieces() -> Vec<Range<usize>> {
    let lens = [1, 300, 3, 1024, 257, 64, 7].into_iter().cycle().take(37);
    let mut start = 2;
    lens.map(|len| {
        let piece = start..start + len;
        // Every third is followed by elements of nobody.
        start += len + [0, 0, 5][len % 3];
        piece
    })
    .collect()
}

/// Two rounds of gradients, of which every second piece's first overwrites what is there, and steps of AdamW
/// on the same pieces.
fn flat_buffers<F: FlatOn<B>, B: ModelBackend>(device: &B::Device) -> [Vec<f32>; 4] {
    let (place, pieces) = (F::place(device), pieces());
    let len = pieces[pieces.len() - 1].end + 3;
    let flat = |seed| F::of(&place, values(len, seed));
    let (mut grads, mut weights, mut exp_avg, mut exp_avg_sq) =
        (flat(1), flat(2), F::zeros(&place, len), F::zeros(&place, len));
    for round in 0..2 {
        let of_piece = |(number, range): (usize, &Range<usize>)| Gradient {
            range: range.clone(),
            first: round == 0 && number % 2 == 0,
            values: tensor([1, range.len()], 100 * round + number as u64, device),
        };
        grads.add(pieces.iter().enumerate().map(of_piece).collect());
        let of_piece = |(number, range): (usize, &Range<usize>)| Run {
            range: range.clone(),
            coefficients: Coefficients {
                factor: 0.5,
                one_minus_beta1: 0.1,
                beta2: 0.99,
                one_minus_beta2: 0.01,
                keep: 1.0 - 1e-3 * number as f32,
                step_size: 1e-2 / (1 + number) as f32,
                root_factor: 1.7,
                eps: 1e-8,
            },
        };
        let (weights, exp_avg, exp_avg_sq) = (&mut weights, &mut exp_avg, &mut exp_avg_sq);
        let part =
            Part { weights, weights_from: 0, state: [exp_avg, exp_avg_sq], grads: &grads, grads_from: 0 };
        F::adamw(part, &pieces.iter().enumerate().map(of_piece).collect::<Vec<_>>(), None);
    }
    [grads, weights, exp_avg, exp_avg_sq].map(|flat| flat.read(0..len).into_owned())
}

#[test]
fn many_gradients_and_runs_in_one_kernel_do_what_the_host_does_one_by_one() {
    let Some(gpu) = gpu() else { return };
    let expected = flat_buffers::<Vec<f32>, Flex>(&Default::default());
    let found = flat_buffers::<OnDevice<Cuda>, Cuda>(&gpu);
    assert_eq!(found[0], expected[0], "sums of the same numbers in the same order");
    for (i, (found, expected)) in found.iter().zip(&expected).enumerate() {
        assert_close(&format!("buffer {i}"), found, expected, 1e-6);
    }
}

/// A block's worth of operations and the gradients of everything that is tracked; `narrow` is the weight's
/// type, which of float16 a CPU has as float32.
fn block<B: ModelBackend>(device: &B::Device, narrow: DType) -> Vec<Vec<f32>> {
    let leaf = |shape: [usize; 2], seed| tensor::<Autodiff<B>, 2>(shape, seed, device).require_grad();
    let (x, a, b) = (leaf([128, 64], 1), leaf([8, 64], 2), leaf([192, 8], 3));
    // As a layer's weights are: with larger ones a softmax is so steep that it multiplies whatever bfloat16
    // rounds.
    let w = tensor::<B, 2>([192, 64], 4, device) * 0.1;
    let w = if narrow == DType::F16 && B::ON_HOST { w } else { w.cast(narrow) };
    let gain = tensor::<B, 1>([64], 5, device);
    let update = LowRank { a_ri: a.clone(), b_or: b.clone(), scale: 0.5, dropout: None };
    let normed = <Autodiff<B> as RowOps>::rms_norm(x.clone(), Tensor::from_inner(gain), 1e-6);
    let qkv = <Autodiff<B> as LinearOps>::lora_linear(normed, Tensor::from_inner(w), None, update);
    let qkv = qkv.reshape([2, 64, 12, 16]);
    let part = |start| qkv.clone().narrow(2, start, 4);
    let mask = AttentionMask::Causal([0..64, 5..64].into());
    let out = <Autodiff<B> as AttentionOps>::attention(part(0), part(4), part(8), &mask, 0.25);
    let y = <Autodiff<B> as RowOps>::gelu_tanh(out.reshape([128, 64]));
    let dy = tensor::<B, 2>([128, 64], 6, device);
    let gradients = (y.clone() * Tensor::from_inner(dy)).sum().backward();
    let gradient = |leaf: &Tensor<Autodiff<B>, 2>| numbers(leaf.grad(&gradients).expect("tracked"));
    vec![numbers(y.inner()), gradient(&x), gradient(&a), gradient(&b)]
}

#[test]
fn a_block_agrees_with_the_cpu_in_every_type_of_weights() {
    let Some(gpu) = gpu() else { return };
    for (narrow, tolerance) in [(DType::F32, 1e-3), (DType::BF16, 2e-2), (DType::F16, 5e-3)] {
        let found = [block::<Cuda>(&gpu, narrow), joined::block::<Cuda>(&gpu, narrow)].concat();
        let host = Default::default();
        let expected = [block::<Flex>(&host, narrow), joined::block::<Flex>(&host, narrow)].concat();
        for (i, (found, expected)) in found.iter().zip(&expected).enumerate() {
            assert_close(&format!("value {i}, {narrow:?}"), found, expected, tolerance);
        }
    }
}

#[test]
fn the_expert_on_a_gpu_computes_what_pytorch_computes() {
    let Some(gpu) = gpu() else { return };
    for case in expert::CASES {
        expert::hold::<Cuda>(case, Recompute::Full, &gpu, 1e-3);
    }
}
