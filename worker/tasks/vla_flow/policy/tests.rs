//! The policy on the small checkpoint that ships with the repository.

use crate::vla_flow::config::LearningRates;
use burn::backend::Flex;
use coxswain_proto::{ids::Step, run_spec::RunSpec};
use serde_json::{Value, json};

use super::*;
use coxswain_models::qwen2_5_vl::checkpoint::Checkpoint;
use coxswain_nn::{
    params::{FlatGrads, Group, TrainableLayout},
    rng::{Key, Purpose},
};

mod cached;
mod on_device;
mod rounded;
mod streamed;

const MODEL: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../configs/assets/tiny-vla");
const DIMS: SampleDims = SampleDims { state: 3, sensor_window: 4, sensor_channels: 2, horizon: 4, action: 2 };
/// Adapters in both towers and the merger.
const EVERYWHERE: &str = r".*(q_proj|down_proj|attn\.qkv|merger\.mlp\.0)";

fn spec(changes: &[(&str, Value)]) -> RunSpec {
    let mut spec = json!({
        "run": {"name": "test", "output_dir": "unused", "seed": 11},
        "model": {"path": MODEL},
        "lora": {"rank": 2, "alpha": 4.0},
        "expert": {"width": 32, "layers": 2, "heads": 2},
        "sensor": {"width": 8, "tokens": 2},
        "data": {"path": "unused", "cameras": ["unused"]},
        "train": {"steps": 1, "global_batch": 3, "micro_batch": 3},
        "cache": {},
        "memory": {},
    });
    for (path, value) in changes {
        *spec.pointer_mut(&format!("/{}", path.replace('.', "/"))).expect("a key of the base spec") =
            value.clone();
    }
    serde_json::from_value(spec).expect("a run spec")
}

struct Fixture {
    policy: Policy<Flex>,
    trainables: Trainables<Flex>,
}

fn load(spec: &RunSpec) -> Fixture {
    let (policy, layout, values) =
        Policy::<Flex>::load(spec, DIMS, &Default::default()).expect("the checkpoint is sound");
    Fixture { policy, trainables: Trainables::new(layout, values, &Default::default()) }
}

/// With every zero start replaced, so that nothing is hidden.
fn shaken(spec: &RunSpec) -> Fixture {
    let Fixture { policy, trainables } = load(spec);
    let layout = trainables.layout().clone();
    let noise = normal(layout.len(), 77);
    let values = trainables.to_vec().iter().zip(noise).map(|(v, n)| v + 0.05 * n).collect();
    Fixture { policy, trainables: Trainables::new(layout, values, &Default::default()) }
}

fn normal(len: usize, stream: u64) -> Vec<f32> {
    let mut values = vec![0.0; len];
    Key { seed: 5, purpose: Purpose::Init, step: stream, sample: 0, repeat: 0 }.draws().normal(&mut values);
    values
}

/// Samples `rows` of a small world: prompts of different lengths, one or two images of different sizes.
fn batch(rows: &[usize]) -> MicroBatch {
    let grids: [&[[u32; 3]]; 3] = [&[[1, 4, 4]], &[[1, 4, 6], [1, 2, 4]], &[[1, 6, 4]]];
    let prompts: Vec<Vec<u32>> = rows
        .iter()
        .map(|&row| {
            let mut ids = vec![20 + row as u32; 2 + row];
            for grid in grids[row] {
                ids.push(1014);
                ids.extend(vec![1016; (grid[1] * grid[2] / 4) as usize]);
                ids.push(1015);
            }
            ids.extend([50, 51 + row as u32]);
            ids
        })
        .collect();
    let seq_len = prompts.iter().map(Vec::len).max().expect("at least one row");
    let mut batch = MicroBatch {
        step: Step(3),
        sample_indices: rows.iter().map(|&row| 100 + row as u64).collect(),
        input_ids: vec![],
        valid: vec![],
        seq_len,
        pixel_values: vec![],
        image_grids: vec![],
        images_per_row: vec![],
        state: vec![],
        sensor: vec![],
        actions: vec![],
        action_valid: vec![],
        features: None,
    };
    for (&row, prompt) in rows.iter().zip(prompts) {
        let padding = seq_len - prompt.len();
        batch.input_ids.extend(std::iter::repeat_n(0, padding).chain(prompt));
        batch.valid.push(padding as u32..seq_len as u32);
        let stream = 10 * row as u64;
        for (image, grid) in grids[row].iter().enumerate() {
            batch.pixel_values.extend(normal((grid[1] * grid[2]) as usize * 1176, stream + image as u64));
        }
        batch.image_grids.extend(grids[row]);
        batch.images_per_row.push(grids[row].len() as u32);
        batch.state.extend(normal(DIMS.state, stream + 5));
        batch.sensor.extend(normal(DIMS.sensor_window * DIMS.sensor_channels, stream + 6));
        batch.actions.extend(normal(DIMS.horizon * DIMS.action, stream + 7));
        batch.action_valid.extend([1.0, 1.0, 1.0, if row == 1 { 0.0 } else { 1.0 }]);
    }
    batch
}

impl Fixture {
    fn run(&self, batch: &MicroBatch) -> (MicroLoss, FlatGrads) {
        let mut grads = FlatGrads::new(self.trainables.layout().len());
        let loss =
            self.policy.forward_backward(&self.trainables, batch, &mut grads, &mut StageClock::default());
        (loss.expect("a sound batch"), grads)
    }
}

fn relative_error(a: &[f32], b: &[f32]) -> f64 {
    let norm = |values: &mut dyn Iterator<Item = f64>| values.map(|v| v * v).sum::<f64>().sqrt();
    norm(&mut a.iter().zip(b).map(|(a, b)| f64::from(a - b))) / norm(&mut b.iter().map(|&b| b.into()))
}

#[test]
fn recompute_changes_no_bit_of_loss_or_gradient() {
    for targets in [json!(EVERYWHERE), json!(r".*language_model\.layers\.[345]\..*(v_proj|up_proj)")] {
        let with = |mode| {
            shaken(&spec(&[("lora", json!({"rank": 2, "targets": targets.clone()})), ("train", mode)]))
        };
        let mode = |mode: Value| json!({"steps": 1, "global_batch": 3, "micro_batch": 3, "recompute": mode});
        let unchecked = with(mode(json!("none"))).run(&batch(&[0, 1, 2]));
        for name in [json!("selective"), json!("full"), json!({"every": 2})] {
            assert!(with(mode(name.clone())).run(&batch(&[0, 1, 2])) == unchecked, "{name} with {targets}");
        }
    }
}

#[test]
fn splitting_a_batch_changes_gradients_by_rounding_only() {
    let fixture = shaken(&spec(&[("lora", json!({"rank": 2, "targets": EVERYWHERE}))]));
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
    let fixture = shaken(&spec(&[("lora", json!({"rank": 2, "targets": EVERYWHERE}))]));
    let (_, grads) = fixture.run(&batch(&[0, 1]));
    let layout = fixture.trainables.layout();
    for group in [Group::LORA, Group("expert"), Group("sensor")] {
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
        let step = 5e-4;
        let slope = (at(step) - at(-step)) / (2.0 * step);
        assert!((slope - norm).abs() < 0.01 * norm, "{group}: slope {slope}, gradient norm {norm}");
    }
}

#[test]
fn everything_trains_within_three_steps_of_the_zero_start() {
    let Fixture { policy, mut trainables } = load(&spec(&[]));
    let layout = trainables.layout().clone();
    let mut watch = GradientWatch::new(&layout, &LearningRates::default());
    for step in 0..GradientWatch::STEPS as u64 {
        assert!(!watch.all_heard());
        let mut grads = FlatGrads::new(layout.len());
        let batch = MicroBatch { step: Step(step), ..batch(&[0, 1, 2]) };
        policy.forward_backward(&trainables, &batch, &mut grads, &mut StageClock::default()).expect("sound");
        watch.observe(&layout, &grads);
        assert_eq!(watch.verdict(&layout), Ok(()));
        let moved = trainables.to_vec().iter().zip(grads.values()).map(|(v, g)| v - 1e-3 * g).collect();
        trainables.set(moved);
    }
    assert!(watch.all_heard());
}

#[test]
fn a_trainable_without_a_gradient_is_found_and_named() {
    let mut layout = TrainableLayout::default();
    layout.add("lost".into(), &[2], Group::LORA, true, coxswain_nn::params::Init::Zeros);
    let Fixture { policy, trainables } = load(&spec(&[]));
    let mut grads = FlatGrads::new(trainables.layout().len());
    policy
        .forward_backward(&trainables, &batch(&[0]), &mut grads, &mut StageClock::default())
        .expect("sound");
    let mut watch = GradientWatch::new(trainables.layout(), &LearningRates::default());
    for tries in 1..GradientWatch::STEPS {
        // However often a step is tried, it counts once.
        (0..=tries).for_each(|_| watch.observe(trainables.layout(), &grads));
        assert_eq!(watch.verdict(trainables.layout()), Ok(()), "too early to tell");
        assert_eq!(watch.verdict(trainables.layout()), Ok(()), "a step without samples");
    }
    watch.observe(trainables.layout(), &grads);
    let silent = watch.verdict(trainables.layout()).expect_err("the adapters never got a gradient");
    assert!(silent.to_string().contains("lora_A"), "{silent}");
}

#[test]
fn what_has_no_learning_rate_is_not_expected_to_train() {
    let Fixture { policy, trainables } = load(&spec(&[]));
    let mut grads = FlatGrads::new(trainables.layout().len());
    policy
        .forward_backward(&trainables, &batch(&[0]), &mut grads, &mut StageClock::default())
        .expect("sound");
    // A fresh adapter that rests: `lora_A` never gets a gradient, because `lora_B` stays zero.
    let resting = LearningRates { lora: 0.0, ..LearningRates::default() };
    let mut watch = GradientWatch::new(trainables.layout(), &resting);
    // The expert's output layer has moved.
    grads.values_mut().iter_mut().for_each(|g| *g += 1e-3);
    for param in trainables.layout().params().iter().filter(|param| param.group == Group::LORA) {
        grads.values_mut()[param.offset..param.offset + param.len()].fill(0.0);
    }
    for _ in 0..2 * GradientWatch::STEPS {
        watch.observe(trainables.layout(), &grads);
        assert_eq!(watch.verdict(trainables.layout()), Ok(()));
    }
    assert!(watch.all_heard());
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
    broken.image_grids[0] = [1, 2, 2];
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
    let context = VlContext::new(fixture.policy.model(), &batch, &Entry::Pixels).expect("sound");
    let run = VlRun {
        model: fixture.policy.model(),
        context: &context,
        trainables: &fixture.trainables,
        retention: Retention::in_float32(Recompute::Selective),
    };
    let (hidden_nd, trace) = run.forward(&batch, Entry::Pixels, &mut StageClock::default()).expect("sound");
    assert!(trace.trains());
    assert!(relative_error(&download(features.hidden_nd), &download(hidden_nd)) < 1e-5);
}

#[test]
fn the_report_counts_every_weight_of_the_checkpoint() {
    let fixture = load(&spec(&[]));
    let layout = fixture.trainables.layout();
    let report = fixture.policy.trainable_report(layout, Default::default());
    let header = Checkpoint::open(std::path::Path::new(MODEL)).expect("sound").stored_bytes();
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
        let error = Policy::<Flex>::load(&spec(changes), DIMS, &Default::default());
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
    coxswain_nn::lora::write_adapter(dir.path(), plan, MODEL, donor.trainables.layout(), &values, "")
        .expect("written");

    let mut from_dir = lora;
    from_dir["init_from"] = json!(dir.path());
    let heir = load(&spec(&[("lora", from_dir.clone())]));
    let layout = heir.trainables.layout();
    let adapters = layout.params().iter().filter(|param| param.group == Group::LORA);
    let end = adapters.map(|param| param.offset + param.len()).max().expect("some");
    assert_eq!(heir.trainables.to_vec()[..end], values[..end]);

    from_dir["rank"] = json!(3);
    let error = Policy::<Flex>::load(&spec(&[("lora", from_dir)]), DIMS, &Default::default());
    let message = error.err().expect("the ranks differ").to_string();
    assert!(message.contains("lora.init_from") && message.contains("rank"), "{message}");
}
