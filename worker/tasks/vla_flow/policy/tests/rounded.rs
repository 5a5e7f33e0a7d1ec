//! Activations in bfloat16: the same bits whatever is kept, near float32, and everywhere alike.

use super::*;
use coxswain_task::FrozenWeights;

fn model(activations: &str) -> (&'static str, Value) {
    ("model", json!({"path": MODEL, "activations_dtype": activations}))
}

fn train(recompute: Value) -> (&'static str, Value) {
    ("train", json!({"steps": 1, "global_batch": 3, "micro_batch": 3, "recompute": recompute}))
}

fn everywhere() -> (&'static str, Value) {
    ("lora", json!({"rank": 2, "targets": EVERYWHERE}))
}

#[test]
fn recompute_changes_no_bit_of_what_is_rounded() {
    for repeats in [1, 4] {
        let expert = ("expert", json!({"width": 32, "layers": 2, "heads": 2, "repeated_noise": repeats}));
        let run = |mode| {
            shaken(&spec(&[everywhere(), expert.clone(), model("bfloat16"), train(mode)]))
                .run(&batch(&[0, 1, 2]))
        };
        let unchecked = run(json!("none"));
        for mode in [json!("selective"), json!("full"), json!({"every": 2})] {
            assert!(run(mode.clone()) == unchecked, "{mode} with {repeats} draws");
        }
    }
}

#[test]
fn a_rounded_step_is_that_of_float32_as_far_as_eight_bits_tell() {
    let run = |activations| {
        let fixture = shaken(&spec(&[everywhere(), model(activations)]));
        let (loss, grads) = fixture.run(&batch(&[0, 1, 2]));
        (loss, grads, fixture.trainables.layout().clone())
    };
    let ((exact, exact_grads, layout), (rounded, rounded_grads, _)) = (run("float32"), run("bfloat16"));
    assert_eq!(rounded.valid, exact.valid);
    let error = (rounded.loss_sum / exact.loss_sum - 1.0).abs();
    assert!(0.0 < error && error < LOSS, "{error}");
    for group in [Group::LORA, Group("expert"), Group("sensor")] {
        let of = |grads: &FlatGrads| {
            let params = layout.params().iter().filter(|param| param.group == group);
            params.flat_map(|param| grads.values()[param.range()].to_vec()).collect::<Vec<_>>()
        };
        let error = relative_error(&of(&rounded_grads), &of(&exact_grads));
        assert!(0.0 < error && error < GRADIENT, "{group}: {error}");
    }
}

/// Each half of a block rounds its sum, each attention up to three products: with six decoder layers and the
/// vision blocks below them some fifty errors of at most 2^-9, which add up like the steps of a random walk
/// to 0.014 of what comes out; twice that, because norms and gates may enlarge what they get, and a squared
/// error doubles it.
const LOSS: f64 = 0.028;
/// On its way down a gradient meets as many Jacobians, each taken where values are off by that much; what
/// they add is a random walk, too: `sqrt(50) * 0.014`.
const GRADIENT: f64 = 0.1;

#[test]
fn what_comes_out_without_a_trace_is_what_training_sees() {
    let fixture = shaken(&spec(&[everywhere(), model("bfloat16"), train(json!("selective"))]));
    let batch = batch(&[0, 1, 2]);
    let (trained, _) = fixture.run(&batch);
    let seen = fixture.policy.loss(&fixture.trainables, &batch).expect("sound");
    assert!((seen.loss_sum / trained.loss_sum - 1.0).abs() < 1e-6, "{seen:?} {trained:?}");
    let exact = shaken(&spec(&[everywhere(), model("float32")]));
    let hidden = |fixture: &Fixture| {
        download(fixture.policy.vl_features(&fixture.trainables, &batch).expect("sound").hidden_nd)
    };
    let error = relative_error(&hidden(&fixture), &hidden(&exact));
    assert!(1e-4 < error && error < LOSS, "features are rounded, too: {error}");
}

#[test]
fn features_of_rounded_activations_have_a_namespace_of_their_own_and_others_keep_theirs() {
    let named = |model: Value| {
        let policy = load(&spec(&[("model", model)])).policy;
        [Tap::Vision, Tap::Layer(2), Tap::Final].map(|tap| {
            let weights = policy.weights_below(tap).expect("the checkpoint is there");
            (weights.name(), weights.digest().expect("and can be read"))
        })
    };
    let unsaid = named(json!({"path": MODEL}));
    assert_eq!(named(json!({"path": MODEL, "activations_dtype": "float32"})), unsaid);
    let rounded = named(json!({"path": MODEL, "activations_dtype": "bfloat16"}));
    for ((name, digest), (rounded_name, rounded_digest)) in unsaid.iter().zip(&rounded) {
        assert!(name != rounded_name && digest != rounded_digest);
    }
}
