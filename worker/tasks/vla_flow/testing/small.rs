//! A policy on the small checkpoint that ships with the repository.

use coxswain_models::families::shelf;
use std::sync::Arc;

use burn::backend::Flex;
use coxswain_nn::{
    params::{FlatGrads, Trainables},
    rng::{Key, Purpose},
};
use coxswain_proto::{ids::Step, run_spec::RunSpec};
use coxswain_task::{MicroLoss, StageClock};
use serde_json::{Value, json};

use crate::vla_flow::{
    data::{MicroBatch, SampleDims},
    policy::Policy,
};

/// The checkpoint.
pub const MODEL: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../configs/assets/tiny-vla");
/// Sizes of its samples.
pub const DIMS: SampleDims =
    SampleDims { state: 3, sensor_window: 4, sensor_channels: 2, horizon: 4, action: 2 };
/// Adapters in both towers and the merger.
pub const EVERYWHERE: &str = r".*(q_proj|down_proj|attn\.qkv|merger\.mlp\.0)";

/// A run of it with some settings changed, by their paths.
pub fn spec(changes: &[(&str, Value)]) -> RunSpec {
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

/// A policy and its trainables.
pub struct Fixture {
    /// What is frozen, and what is computed.
    pub policy: Policy<Flex>,
    /// What trains.
    pub trainables: Trainables<Flex>,
}

/// As a run begins.
pub fn load(spec: &RunSpec) -> Fixture {
    let (policy, layout, values) =
        Policy::<Flex>::load(spec, shelf(), DIMS, &Default::default()).expect("the checkpoint is sound");
    Fixture { policy, trainables: Trainables::new(layout, values, &Default::default()) }
}

/// With every zero start replaced, so that nothing is hidden.
pub fn shaken(spec: &RunSpec) -> Fixture {
    let Fixture { policy, trainables } = load(spec);
    let layout = trainables.layout().clone();
    let noise = normal(layout.len(), 77);
    let values = trainables.to_vec().iter().zip(noise).map(|(v, n)| v + 0.05 * n).collect();
    Fixture { policy, trainables: Trainables::new(layout, values, &Default::default()) }
}

/// Draws of a normal distribution.
pub fn normal(len: usize, stream: u64) -> Vec<f32> {
    let mut values = vec![0.0; len];
    Key { seed: 5, purpose: Purpose::Init, step: stream, sample: 0, repeat: 0 }.draws().normal(&mut values);
    values
}

/// Samples `rows` of a small world: prompts of different lengths, one or two images of different sizes.
pub fn batch(rows: &[usize]) -> MicroBatch {
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
        image_shapes: vec![],
        images_per_row: vec![],
        state: vec![],
        sensor: vec![],
        actions: vec![],
        action_widths: vec![],
        action_valid: vec![],
        features: None,
    };
    for (&row, prompt) in rows.iter().zip(prompts) {
        let padding = seq_len - prompt.len();
        batch.input_ids.extend(std::iter::repeat_n(0, padding).chain(prompt));
        batch.valid.push(padding as u32..seq_len as u32);
        let stream = 10 * row as u64;
        let image = |(image, grid): (usize, &[u32; 3])| {
            normal((grid[1] * grid[2]) as usize * 1176, stream + image as u64)
        };
        batch.pixel_values.push(Arc::new(grids[row].iter().enumerate().flat_map(image).collect()));
        batch.image_shapes.extend(grids[row]);
        batch.images_per_row.push(grids[row].len() as u32);
        batch.state.extend(normal(DIMS.state, stream + 5));
        batch.sensor.extend(normal(DIMS.sensor_window * DIMS.sensor_channels, stream + 6));
        batch.actions.extend(normal(DIMS.horizon * DIMS.action, stream + 7));
        batch.action_widths.push(DIMS.action);
        batch.action_valid.extend([1.0, 1.0, 1.0, if row == 1 { 0.0 } else { 1.0 }]);
    }
    batch
}

impl Fixture {
    /// Loss and gradients of a batch.
    pub fn run(&self, batch: &MicroBatch) -> (MicroLoss, FlatGrads) {
        let mut grads = FlatGrads::new(self.trainables.layout().len());
        let loss =
            self.policy.forward_backward(&self.trainables, batch, &mut grads, &mut StageClock::default());
        (loss.expect("a sound batch"), grads)
    }
}

/// Norm of the difference over the norm of `b`.
pub fn relative_error(a: &[f32], b: &[f32]) -> f64 {
    let norm = |values: &mut dyn Iterator<Item = f64>| values.map(|v| v * v).sum::<f64>().sqrt();
    norm(&mut a.iter().zip(b).map(|(a, b)| f64::from(a - b))) / norm(&mut b.iter().map(|&b| b.into()))
}
