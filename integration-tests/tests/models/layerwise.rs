//! starVLA's QwenPI_v3 on a small Qwen3-VL against Transformers and PyTorch (`fixtures/make_qwen_pi.py`):
//! loss, gradients down to the vision tower, sampled actions.

use std::sync::Arc;

use burn_flex::Flex;
use coxswain_integration_tests::{
    expert::{Case, wave},
    fixture, relative_error,
};
use coxswain_models::families::shelf;
use coxswain_nn::params::{FlatGrads, Trainables};
use coxswain_proto::{ids::Step, run_spec::RunSpec};
use coxswain_task::StageClock;
use coxswain_tasks::vla_flow::{
    data::{Sample, SampleDims, collate},
    policy::Policy,
};
use serde_json::json;

const TOLERANCE: f64 = 1e-4;
const DIMS: SampleDims = SampleDims { state: 0, sensor_window: 0, sensor_channels: 0, horizon: 4, action: 2 };
/// Sums of a gradient with so many waves are held, not every value.
const SUMS: usize = 8;

fn spec() -> RunSpec {
    let model = fixture("golden").join("qwen3-tied-left/model");
    let train = json!([
        r"visual\.merger\.linear_fc2",
        r"deepstack_merger_list\.0\.linear_fc2",
        r"language_model\.layers\.\d\.self_attn\.q_proj"
    ]);
    let head = json!({
        "preset": "qwen_pi", "width": 8, "heads": 2, "ends_width": 7, "future_tokens": 2, "dropout": 0.0
    });
    serde_json::from_value(json!({
        "run": {"name": "test", "output_dir": "unused", "seed": 11},
        "model": {"path": model, "train": train},
        "expert": head,
        "data": {"path": "unused", "cameras": ["unused"], "state": "none", "horizon": 4},
        "train": {"steps": 1, "global_batch": 2, "micro_batch": 2, "recompute": "full"},
        "cache": {},
        "memory": {},
    }))
    .expect("a run spec")
}

fn doubles(values: &[f32]) -> Vec<f64> {
    values.iter().map(|value| f64::from(*value)).collect()
}

#[test]
fn a_policy_that_reads_every_layer_is_starvlas_in_loss_actions_and_gradients() {
    let case = Case::read("layerwise-policy");
    let loaded = Policy::<Flex>::load(&spec(), shelf(), DIMS, &Default::default());
    let (policy, layout, mut values) = loaded.unwrap_or_else(|error| panic!("{error}"));
    for param in layout.params().iter().filter(|param| param.name.starts_with("expert.")) {
        values[param.range()].copy_from_slice(&case.weight(&param.name, &param.shape));
    }
    let trainables = Trainables::new(layout.clone(), values, &Default::default());
    let (grids, pixels) = ([[1, 4, 6], [1, 2, 2]], wave("pixels", 28, 96));
    let patches = [&pixels[..24 * 96], &pixels[24 * 96..]];
    let (ids, actions) = (case.get("in.ids"), case.get("in.actions"));
    let sample = |row: usize| Sample {
        index: row as u64,
        input_ids: ids[12 * row..][..12].iter().map(|id| *id as u32).collect(),
        pixel_values: Arc::new(patches[row].to_vec()),
        image_shapes: vec![grids[row]],
        actions: actions[8 * row..][..8].to_vec(),
        action_width: 2,
        action_is_pad: vec![false; 4],
        ..Sample::default()
    };
    let batch = collate(Step(1), &[0, 1].map(sample), 0);
    let holds = |what: &str, ours: &[f32], expected: &[f32]| {
        let error = relative_error(&doubles(ours), &doubles(expected));
        println!("{what}: {error:.1e}");
        assert!(error <= TOLERANCE, "{what} is off by {error:.2e}");
    };

    let mut grads = FlatGrads::new(layout.len());
    let loss = policy.forward_backward(&trainables, &batch, &mut grads, &mut StageClock::default());
    let loss = loss.expect("a sound batch");
    holds("loss", &[(loss.loss_sum / loss.valid) as f32], case.get("out.loss"));
    let sampled = policy.sample_actions_from(&trainables, &batch, wave("noise", 8, 2).into()).expect("sound");
    holds("actions", &sampled, case.get("out.actions"));

    let names: Vec<_> = case.sizes["names"].split(' ').collect();
    assert_eq!(names.len(), layout.params().len());
    for (name, expected) in names.into_iter().zip(case.get("grads").chunks(SUMS)) {
        let param = layout.params().iter().find(|param| param.name == name).expect(name);
        let ours = doubles(&grads.values()[param.range()]);
        let sums: Vec<f32> = wave("sums", SUMS, ours.len())
            .chunks(ours.len())
            .map(|wave| {
                wave.iter().zip(&ours).map(|(w, g)| f64::from(*w) * g / loss.valid).sum::<f64>() as f32
            })
            .collect();
        holds(name, &sums, expected);
    }
}
