//! The policy on the small checkpoint that ships with the repository.

use burn::backend::Flex;
use coxswain_models::families::shelf;
use coxswain_models::{
    pretrained::checkpoint::Checkpoint,
    vision_language::{Tap, VlPass},
};
use coxswain_nn::{
    dtypes::FrozenDtype,
    params::{FlatGrads, Group, Trainables},
    recompute::Retention,
};
use coxswain_proto::{
    ids::Step,
    run_spec::{Recompute, RunSpec},
};
use coxswain_task::{MicroLoss, Pass, StageClock};
use serde_json::{Value, json};

use super::{parts::download, *};
use crate::vla_flow::{
    data::MicroBatch,
    testing::small::{DIMS, EVERYWHERE, Fixture, MODEL, batch, load, normal, relative_error, shaken, spec},
};

mod bias;
mod cached;
mod dora;
mod full;
mod layerwise;
mod quantized;
mod rounded;
mod sharded;
mod streamed;
mod table;

#[test]
fn recompute_changes_no_bit_of_loss_or_gradient() {
    let upper = r".*language_model\.layers\.[345]\..*(v_proj|up_proj)";
    for (targets, dropout) in [(EVERYWHERE, 0.0), (EVERYWHERE, 0.3), (upper, 0.0), (upper, 0.3)] {
        let lora = json!({"rank": 2, "targets": targets, "dropout": dropout});
        let with = |mode| shaken(&spec(&[("lora", lora.clone()), ("train", mode)]));
        let mode = |mode: Value| json!({"steps": 1, "global_batch": 3, "micro_batch": 3, "recompute": mode});
        let unchecked = with(mode(json!("none"))).run(&batch(&[0, 1, 2]));
        for name in [json!("selective"), json!("full"), json!({"every": 2})] {
            assert!(with(mode(name.clone())).run(&batch(&[0, 1, 2])) == unchecked, "{name} with {lora}");
        }
    }
}

#[test]
fn splitting_a_batch_changes_gradients_by_rounding_only() {
    for dropout in [0.0, 0.3] {
        split(&shaken(&spec(&[("lora", json!({"rank": 2, "targets": EVERYWHERE, "dropout": dropout}))])));
    }
}

fn split(fixture: &Fixture) {
    let (whole, whole_grads) = fixture.run(&batch(&[0, 1, 2]));
    let mut grads = FlatGrads::new(fixture.trainables.layout().len());
    let mut sum = MicroLoss::default();
    for rows in [&[0, 1][..], &[2]] {
        let part = fixture
            .policy
            .forward_backward(&fixture.trainables, &batch(rows), &mut grads, &mut StageClock::default())
            .expect("a sound batch");
        sum = MicroLoss { loss_sum: sum.loss_sum + part.loss_sum, valid: sum.valid + part.valid };
    }
    assert_eq!((whole.valid, sum.valid), (22.0, 22.0));
    assert!((whole.loss_sum - sum.loss_sum).abs() < 1e-4 * whole.loss_sum);
    assert!(relative_error(grads.values(), whole_grads.values()) < 1e-4);
}

#[test]
fn gradients_are_derivatives_in_every_group() {
    for dropout in [0.0, 0.3] {
        let lora = json!({"rank": 2, "targets": EVERYWHERE, "dropout": dropout});
        are_derivatives(&shaken(&spec(&[("lora", lora)])));
    }
}

fn are_derivatives(fixture: &Fixture) {
    are_slopes(fixture, 5e-4);
}

/// Gradients are derivatives by differences so far apart.
fn are_slopes(fixture: &Fixture, step: f64) {
    let (_, grads) = fixture.run(&batch(&[0, 1]));
    let layout = fixture.trainables.layout();
    for group in layout.groups() {
        // Along the gradient itself the slope is largest, which is what f32 differences need.
        let mut direction = vec![0.0; layout.len()];
        for param in layout.params().iter().filter(|param| param.group == group) {
            let range = param.offset..param.offset + param.len();
            direction[range.clone()].copy_from_slice(&grads.values()[range]);
        }
        let norm = direction.iter().map(|&v| f64::from(v).powi(2)).sum::<f64>().sqrt();
        let at = |length: f64| {
            let values = fixture.trainables.to_vec();
            let shift = length / norm;
            let moved = values.iter().zip(&direction).map(|(v, d)| v + (shift * f64::from(*d)) as f32);
            let trainables = Trainables::new(layout.clone(), moved.collect(), &Default::default());
            let mut unused = FlatGrads::new(layout.len());
            let clock = &mut StageClock::default();
            let loss = fixture.policy.forward_backward(&trainables, &batch(&[0, 1]), &mut unused, clock);
            loss.expect("sound").loss_sum
        };
        let slope = (at(step) - at(-step)) / (2.0 * step);
        assert!((slope - norm).abs() < 0.01 * norm, "{group}: slope {slope}, gradient norm {norm}");
    }
}

#[test]
fn dropout_is_drawn_anew_in_every_step_and_drops_nothing_outside_training() {
    let with = |dropout: f64| {
        shaken(&spec(&[("lora", json!({"rank": 2, "targets": EVERYWHERE, "dropout": dropout}))]))
    };
    let (plain, dropping) = (with(0.0), with(0.3));
    let batch = batch(&[0, 1]);
    let loss = |fixture: &Fixture| fixture.policy.loss(&fixture.trainables, &batch).expect("sound");
    assert_eq!(loss(&plain), loss(&dropping), "a pass without gradients drops nothing");
    assert_eq!(plain.run(&batch).0, loss(&plain));
    let hidden = |fixture: &Fixture| {
        fixture.policy.vl_features(&fixture.trainables, &batch).expect("sound").hidden_nd.into_data()
    };
    assert_eq!(hidden(&plain), hidden(&dropping));
    // Sums over few actions: drops move them by more than rounding could.
    let (once, again) = (dropping.run(&batch), dropping.run(&batch));
    assert!(once == again && once.0 != loss(&plain));
    let elsewhere = MicroBatch { step: Step(batch.step.0 + 1), ..batch.clone() };
    let (noise, both) = (plain.run(&elsewhere).0.loss_sum, dropping.run(&elsewhere).0.loss_sum);
    let moved = [once.0.loss_sum - loss(&plain).loss_sum, both - noise];
    assert!((moved[0] - moved[1]).abs() > 1e-6, "{moved:?}");
}

#[test]
fn a_frozen_model_gets_no_trace_and_the_expert_all_gradients() {
    let frozen = shaken(&spec(&[("lora", Value::Null)]));
    assert!(frozen.trainables.layout().params().iter().all(|param| param.group != Group::LORA));
    let (loss, grads) = frozen.run(&batch(&[0, 1]));
    assert!(loss.loss_sum > 0.0);
    assert!(frozen.trainables.layout().params().iter().all(|param| grads.touched(param)));
}

#[test]
fn repeated_noise_leaves_the_valid_count_alone() {
    let expert = |repeats: usize| {
        let expert = json!({"width": 32, "layers": 2, "heads": 2, "repeated_noise": repeats});
        shaken(&spec(&[("expert", expert)])).run(&batch(&[0, 1])).0
    };
    let (once, often) = (expert(1), expert(6));
    assert_eq!(once.valid, often.valid);
    assert!((once.loss_sum / often.loss_sum - 1.0).abs() < 0.9);
}

#[test]
fn an_empty_micro_batch_costs_nothing() {
    let fixture = load(&spec(&[]));
    let empty = MicroBatch { sample_indices: vec![], ..batch(&[0]) };
    let (loss, grads) = fixture.run(&empty);
    assert_eq!(loss, MicroLoss::default());
    assert!(grads.values().iter().all(|&g| g == 0.0));
}

#[test]
fn not_a_number_in_the_data_is_named_by_step_and_sample() {
    let fixture = shaken(&spec(&[]));
    let mut broken = batch(&[0, 1, 2]);
    broken.state[DIMS.state] = f32::NAN;
    let mut grads = FlatGrads::new(fixture.trainables.layout().len());
    let error = fixture
        .policy
        .forward_backward(&fixture.trainables, &broken, &mut grads, &mut StageClock::default())
        .expect_err("the second row has no finite loss");
    assert_eq!(error, StepError::NonFiniteLoss { step: Step(3), samples: vec![101] });
}

#[test]
fn tokens_that_do_not_fit_the_images_are_named() {
    let fixture = load(&spec(&[]));
    let mut broken = batch(&[0, 1]);
    broken.image_shapes[0] = [1, 2, 2];
    let mut grads = FlatGrads::new(fixture.trainables.layout().len());
    let error = fixture
        .policy
        .forward_backward(&fixture.trainables, &broken, &mut grads, &mut StageClock::default())
        .expect_err("the first row has more image tokens than its image");
    assert!(error.to_string().starts_with("step 3, samples [100, 101]"), "{error}");
}

#[test]
fn sampled_actions_depend_on_seed_and_sample_alone() {
    let fixture = shaken(&spec(&[]));
    let sample = |rows: &[usize], seed| {
        fixture.policy.sample_actions(&fixture.trainables, &batch(rows), seed).expect("a sound batch")
    };
    let chunk = DIMS.horizon * DIMS.action;
    let both = sample(&[0, 2], 1);
    assert_eq!(both.len(), 2 * chunk);
    assert!(relative_error(&both[chunk..], &sample(&[2], 1)) < 1e-4);
    assert!(relative_error(&both, &sample(&[0, 2], 2)) > 1e-2);
}

#[test]
fn features_are_those_the_training_pass_sees() {
    let fixture = shaken(&spec(&[("lora", json!({"rank": 2, "targets": EVERYWHERE}))]));
    let batch = batch(&[0, 1]);
    let features = fixture.policy.vl_features(&fixture.trainables, &batch).expect("sound");
    let run = fixture.policy.model().run(pass(&fixture, &batch)).expect("sound");
    let (mut read, trace) = run.forward(&[Tap::Final], &mut |_| {}).expect("sound");
    assert!(trace.trains());
    let hidden_nd = read.pop().expect("one was asked for");
    assert!(relative_error(&download(features.hidden_nd), &download(hidden_nd)) < 1e-5);
}

fn pass<'a>(fixture: &'a Fixture, batch: &'a MicroBatch) -> VlPass<'a, Flex> {
    VlPass {
        prompts: batch.prompts(),
        kept: None,
        trainables: &fixture.trainables,
        retention: Retention::in_float32(Recompute::Selective),
        dropout: None,
    }
}

#[test]
fn gradients_of_several_taps_add_up_in_one_pass() {
    let fixture = shaken(&spec(&[("lora", json!({"rank": 2, "targets": EVERYWHERE}))]));
    let (batch, model) = (batch(&[0, 1]), fixture.policy.model());
    let taps = [Tap::Layer(0), Tap::Layer(2), Tap::Layer(5), Tap::Final];
    // What is read, and the gradients of all trainables, given that of each tap: its own values, times this.
    let through = |taps: &[Tap], factors: &[f32]| {
        let run = model.run(pass(&fixture, &batch)).expect("sound");
        let (read, trace) = run.forward(taps, &mut |_| {}).expect("sound");
        let values: Vec<_> = read.iter().map(|read| download(read.clone())).collect();
        let given = read.into_iter().zip(factors).map(|(read, factor)| read * *factor).collect();
        let mut grads = FlatGrads::new(fixture.trainables.layout().len());
        trace.backward(given, &mut grads, &mut |_| {}).expect("sound");
        (values, grads.values().to_vec())
    };
    let (values, of_all) = through(&taps, &[1.0; 4]);
    let mut sum = vec![0.0; of_all.len()];
    for (tap, value) in taps.iter().zip(&values) {
        let (alone, of_one) = through(std::slice::from_ref(tap), &[1.0]);
        assert!(&alone[0] == value, "{tap}: what is read does not depend on what else is");
        sum.iter_mut().zip(of_one).for_each(|(sum, one)| *sum += one);
    }
    assert!(of_all.iter().any(|gradient| *gradient != 0.0));
    assert!(relative_error(&sum, &of_all) < 1e-5);
}

#[test]
fn the_report_counts_every_weight_of_the_checkpoint() {
    let fixture = load(&spec(&[]));
    let layout = fixture.trainables.layout();
    let report = fixture.policy.trainable_report(layout, Default::default());
    let header = Checkpoint::open(std::path::Path::new(MODEL), fixture.policy.model().outline().rules);
    let header = header.expect("sound").stored_bytes();
    let frozen: usize = report.iter().filter(|row| !row.trains).map(|row| row.parameters).sum();
    assert_eq!(2 * frozen as u64, header, "the checkpoint is bfloat16 with a tied head");
    let trained: usize = report.iter().filter(|row| row.trains).map(|row| row.parameters).sum();
    assert_eq!(trained, layout.len());
    let names: Vec<_> = report.iter().map(|row| row.module.as_str()).collect();
    assert_eq!(names, ["vision", "language", "language.lora", "expert", "sensor"]);
}

#[test]
fn settings_that_do_not_fit_are_refused_by_name() {
    let refused = |changes: &[(&str, Value)]| {
        let error = Policy::<Flex>::load(&spec(changes), shelf(), DIMS, &Default::default());
        error.err().expect("refused").to_string()
    };
    let message = refused(&[("expert", json!({"width": 32, "heads": 5}))]);
    assert!(message.starts_with("expert.heads: 5 heads"), "{message}");
    let message = refused(&[("sensor", json!({"tokens": 9}))]);
    assert!(message.starts_with("sensor.tokens: 9 tokens for a window of 4"), "{message}");
    let message = refused(&[("expert", json!({"repeated_noise": 0}))]);
    assert!(message.starts_with("expert.repeated_noise: 0"), "{message}");
    let message = refused(&[("lora", json!({"targets": "lm_head|.*q_proj"}))]);
    assert!(message.contains("lm_head"), "{message}");
    let message = refused(&[("lora", json!({"init_from": "no/such/adapter"}))]);
    assert!(message.contains("no/such/adapter"), "{message}");
}

#[test]
fn training_starts_from_an_adapter_directory() {
    let lora = json!({"rank": 2, "alpha": 4.0, "targets": ["q_proj"]});
    let donor = shaken(&spec(&[("lora", lora.clone())]));
    let dir = tempfile::tempdir().expect("a directory");
    let plan = donor.policy.lora().expect("it has adapters");
    let values = donor.trainables.to_vec();
    let origin = coxswain_nn::lora::AdapterOrigin {
        base_model: MODEL,
        task_type: None,
        readme: "",
        tied: None,
        trained_above: None,
    };
    coxswain_nn::lora::write_adapter(dir.path(), plan, donor.trainables.layout(), &values, &origin)
        .expect("written");

    let mut from_dir = lora;
    from_dir["init_from"] = json!(dir.path());
    let heir = load(&spec(&[("lora", from_dir.clone())]));
    let layout = heir.trainables.layout();
    let adapters = layout.params().iter().filter(|param| param.group == Group::LORA);
    let end = adapters.map(|param| param.offset + param.len()).max().expect("some");
    assert_eq!(heir.trainables.to_vec()[..end], values[..end]);

    from_dir["rank"] = json!(3);
    let error = Policy::<Flex>::load(&spec(&[("lora", from_dir)]), shelf(), DIMS, &Default::default());
    let message = error.err().expect("the ranks differ").to_string();
    assert!(message.contains("lora.init_from") && message.contains("rank"), "{message}");
}
