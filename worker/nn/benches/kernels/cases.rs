//! The operations that are timed, at the sizes of the `small` preset.

use burn::{
    backend::{Autodiff, Flex},
    tensor::{Distribution, Tensor},
};
use coxswain_nn::kernels::{AttentionMask, AttentionOps, LinearOps, LowRank, RowOps};

use crate::{Case, decoder::Decoder};

/// Backend of plain passes.
pub type F = Flex;
/// Backend of passes that record.
pub type A = Autodiff<Flex>;

/// Batch rows.
pub const BATCH: usize = 2;
/// Tokens of a batch row.
pub const SEQ: usize = 192;
/// Hidden size.
pub const HIDDEN: usize = 768;
/// Query heads.
pub const HEADS: usize = 12;
/// Key and value heads.
pub const KV_HEADS: usize = 4;
/// Size of a head.
pub const HEAD: usize = 64;
/// Size between gate and down projection.
pub const INTER: usize = 2048;
/// Rank of the low-rank updates.
pub const RANK: usize = 16;
const TOKENS: usize = BATCH * SEQ;

/// Random values.
pub fn random<const D: usize>(shape: [usize; D]) -> Tensor<F, D> {
    Tensor::random(shape, Distribution::Normal(0.0, 0.05), &Default::default())
}

/// A tensor whose gradient is asked for.
pub fn leaf<const D: usize>(x: &Tensor<F, D>) -> Tensor<A, D> {
    Tensor::from_inner(x.clone()).require_grad()
}

fn constant<const D: usize>(x: &Tensor<F, D>) -> Tensor<A, D> {
    Tensor::from_inner(x.clone())
}

/// Runs a backward pass from the sum of `y`.
pub fn backward<const D: usize>(y: Tensor<A, D>) {
    std::hint::black_box(y.sum().backward());
}

fn case(name: &'static str, run: impl Fn() + 'static) -> Case {
    Case { name, run: Box::new(run) }
}

/// Every case, in the order of the table.
pub fn all() -> Vec<Case> {
    let mut cases = rowwise();
    cases.extend(linear());
    cases.extend(attention());
    cases.extend(layers());
    cases
}

fn rowwise() -> Vec<Case> {
    let (x, gain) = (random([TOKENS, HIDDEN]), random([HIDDEN]));
    let (gate, up) = (random([TOKENS, INTER]), random([TOKENS, INTER]));
    let q = random([BATCH, SEQ, HEADS, HEAD]);
    let (cos, sin) = (random([BATCH, SEQ, HEAD]), random([BATCH, SEQ, HEAD]));
    let eps = 1e-6;
    vec![
        case("rms_norm", {
            let (x, gain) = (x.clone(), gain.clone());
            move || drop(F::rms_norm(x.clone(), gain.clone(), eps))
        }),
        case("rms_norm both", move || backward(A::rms_norm(leaf(&x), constant(&gain), eps))),
        case("swiglu", {
            let (gate, up) = (gate.clone(), up.clone());
            move || drop(F::swiglu(gate.clone(), up.clone()))
        }),
        case("swiglu both", {
            let gate = gate.clone();
            move || backward(A::swiglu(leaf(&gate), leaf(&up)))
        }),
        case("gelu_tanh both", move || backward(A::gelu_tanh(leaf(&gate)))),
        case("rotary", {
            let (q, cos, sin) = (q.clone(), cos.clone(), sin.clone());
            move || drop(F::rotary(q.clone(), cos.clone(), sin.clone()))
        }),
        case("rotary both", move || backward(A::rotary(leaf(&q), constant(&cos), constant(&sin)))),
    ]
}

fn linear() -> Vec<Case> {
    let mut cases = Vec::new();
    let shapes = [
        ("linear 384x768x768", "linear 384x768x768 both", [TOKENS, HIDDEN, HIDDEN]),
        ("linear 384x768x2048", "linear 384x768x2048 both", [TOKENS, HIDDEN, INTER]),
        ("linear 384x2048x768", "linear 384x2048x768 both", [TOKENS, INTER, HIDDEN]),
        ("linear 34x768x3072", "linear 34x768x3072 both", [34, HIDDEN, 4 * HIDDEN]),
    ];
    for (name, both, [n, i, o]) in shapes {
        let (x, w) = (random([n, i]), random([o, i]));
        cases.push(case(name, {
            let (x, w) = (x.clone(), w.clone());
            move || drop(<F as LinearOps>::linear(x.clone(), w.clone(), None))
        }));
        cases.push(case(both, move || backward(<A as LinearOps>::linear(leaf(&x), constant(&w), None))));
    }
    let (x, w, bias) = (random([34, HIDDEN]), random([4 * HIDDEN, HIDDEN]), random([4 * HIDDEN]));
    cases.push(case("linear 34x768x3072 trained", move || {
        backward(<A as LinearOps>::linear(leaf(&x), leaf(&w), Some(leaf(&bias))));
    }));
    let (x, w) = (random([TOKENS, HIDDEN]), random([INTER, HIDDEN]));
    let (a, b) = (random([RANK, HIDDEN]), random([INTER, RANK]));
    cases.push(case("lora 384x768x2048 both", move || {
        let update = LowRank { a_ri: leaf(&a), b_or: leaf(&b), scale: 1.0, dropout: None };
        backward(A::lora_linear(leaf(&x), constant(&w), None, update));
    }));
    cases
}

fn attention() -> Vec<Case> {
    let mut cases = Vec::new();
    let text = AttentionMask::Causal([0..SEQ as u32, 0..SEQ as u32].into());
    let windows = AttentionMask::Segments((0..=16).map(|i| i * 64).collect());
    let expert = AttentionMask::Full;
    let shapes = [
        (
            "attention causal",
            "attention causal both",
            [BATCH, SEQ, HEADS, HEAD],
            [BATCH, SEQ, KV_HEADS, HEAD],
            text,
        ),
        ("attention windows", "attention windows both", [1, 1024, 6, 64], [1, 1024, 6, 64], windows),
        ("attention cross", "attention cross both", [BATCH, 17, 12, 64], [BATCH, SEQ, 12, 64], expert),
    ];
    for (name, both, q, k, mask) in shapes {
        let (q, k, v, mask2) = (random(q), random(k), random(k), mask.clone());
        cases.push(case(name, {
            let (q, k, v) = (q.clone(), k.clone(), v.clone());
            move || drop(<F as AttentionOps>::attention(q.clone(), k.clone(), v.clone(), &mask, 0.125))
        }));
        cases.push(case(both, move || {
            backward(<A as AttentionOps>::attention(leaf(&q), leaf(&k), leaf(&v), &mask2, 0.125));
        }));
    }
    cases
}

fn layers() -> Vec<Case> {
    let layer = std::rc::Rc::new(Decoder::new(1));
    let text = std::rc::Rc::new(Decoder::new(12));
    let x = random([TOKENS, HIDDEN]);
    let (l1, l2, t1, t2, t3) = (layer.clone(), layer, text.clone(), text.clone(), text);
    let (x1, x2, x3, x4, x5) = (x.clone(), x.clone(), x.clone(), x.clone(), x);
    vec![
        case("layer forward", move || drop(l1.forward(x1.clone()))),
        case("layer both", move || l2.both(x2.clone())),
        case("text forward", move || drop(t1.forward(x3.clone()))),
        case("text both", move || t2.both(x4.clone())),
        case("text both, recompute", move || t3.both_recomputing(x5.clone())),
    ]
}
