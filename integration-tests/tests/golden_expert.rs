//! The action expert and the sensor encoder against the PyTorch module of `fixtures/make_expert_fixtures.py`: values, loss, and the
//! gradient of every weight. Relative error is the norm of the difference over the norm of the reference.

#![allow(clippy::unwrap_used, reason = "helpers of tests fail by panicking")]

use std::{collections::HashMap, fs, path::Path};

use burn::{
    backend::Flex,
    tensor::{Tensor, TensorData},
};
use coxswain_proto::run_spec::Recompute;
use coxswain_worker::{
    kernels::AttentionMask,
    model::{
        expert::{ActionExpert, Conditioning, Draws, ExpertShape},
        flow::{CleanActions, squared_error},
        recompute::segment::{Input, Recorded},
        sensor::{SensorEncoder, SensorShape},
    },
    params::{FlatGrads, TrainableLayout, Trainables},
};
use safetensors::SafeTensors;

const VALUE_TOLERANCE: f64 = 1e-4;
const GRADIENT_TOLERANCE: f64 = 1e-3;

/// A case: its sizes and its tensors, flat.
struct Case {
    sizes: HashMap<String, String>,
    tensors: HashMap<String, Vec<f32>>,
}

impl Case {
    fn read(name: &str) -> Self {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("fixtures/expert/{name}.safetensors"));
        let bytes = fs::read(path).unwrap();
        let (_, header) = SafeTensors::read_metadata(&bytes).unwrap();
        let tensors = SafeTensors::deserialize(&bytes).unwrap().tensors().into_iter().map(|(name, view)| {
            let values = view.data().chunks(4).map(|b| f32::from_le_bytes(b.try_into().unwrap()));
            (name, values.collect())
        });
        Self { sizes: header.metadata().clone().unwrap(), tensors: tensors.collect() }
    }

    fn size(&self, name: &str) -> usize {
        self.sizes[name].parse().unwrap()
    }

    fn get(&self, name: &str) -> &[f32] {
        self.tensors.get(name).unwrap_or_else(|| panic!("the fixture has no `{name}`"))
    }

    fn tensor(&self, name: &str, columns: usize) -> Tensor<Flex, 2> {
        upload(self.get(name), columns)
    }

    fn register(&self, layout: &mut TrainableLayout) -> (Option<SensorEncoder>, ActionExpert) {
        let width = self.size("width");
        let sensor = (self.size("window") > 0).then(|| {
            let shape = SensorShape {
                window: self.size("window"),
                channels: self.size("channels"),
                tokens: self.size("sensor_tokens"),
                width: self.size("sensor_width"),
                outputs: width,
            };
            SensorEncoder::register(layout, shape)
        });
        let shape = ExpertShape {
            width,
            layers: self.size("layers"),
            heads: self.size("heads"),
            context: self.size("context"),
            state: self.size("state"),
            sensor_tokens: self.size("sensor_tokens"),
            horizon: self.size("horizon"),
            action: self.size("action"),
        };
        (sensor, ActionExpert::register(layout, shape))
    }
}

fn upload(values: &[f32], columns: usize) -> Tensor<Flex, 2> {
    Tensor::from_data(
        TensorData::new(values.to_vec(), [values.len() / columns, columns]),
        &Default::default(),
    )
}

fn download(x: Tensor<Flex, 2>) -> Vec<f32> {
    x.into_data().into_vec().unwrap()
}

fn relative_error(ours: &[f32], reference: &[f32]) -> f64 {
    assert_eq!(ours.len(), reference.len());
    let difference: f64 = ours.iter().zip(reference).map(|(a, b)| f64::from(a - b).powi(2)).sum();
    let norm: f64 = reference.iter().map(|&b| f64::from(b).powi(2)).sum();
    (difference / norm).sqrt()
}

fn hold_against_pytorch(name: &str, mode: Recompute) {
    let case = Case::read(name);
    let mut layout = TrainableLayout::default();
    let (sensor, expert) = case.register(&mut layout);
    let values =
        layout.params().iter().flat_map(|p| case.get(&format!("param.{}", p.name)).to_vec()).collect();
    let trainables = Trainables::<Flex>::new(layout.clone(), values, &Default::default());
    let check = |what: &str, ours: &[f32], tolerance: f64| {
        let error = relative_error(ours, case.get(what));
        assert!(error <= tolerance, "{name}: {what} is off by {error:.2e}");
    };

    let sensor = sensor.as_ref().map(|sensor| {
        Recorded::run(&sensor.segment(case.get("in.window"), &Default::default()), &trainables, vec![])
    });
    if let Some(sensor) = &sensor {
        check("out.sensor", &download(sensor.output()), VALUE_TOLERANCE);
    }
    let ranges: Vec<_> = case.get("in.valid").chunks(2).map(|r| r[0] as u32..r[1] as u32).collect();
    let conditioning = Conditioning {
        state_bc: case.tensor("in.state", case.size("state")),
        sensor: sensor.as_ref().map(|sensor| Input::tracked(sensor.output())),
        hidden: Input::tracked(case.tensor("in.hidden", case.size("context"))),
        mask: AttentionMask::Keys(ranges.into()),
    };
    let action = case.size("action");
    let draws = Draws { times: case.get("in.times"), noisy_nc: case.tensor("in.noisy", action) };
    let (velocity, trace) = expert.forward(&trainables, mode, conditioning, draws);
    let velocity = download(velocity);
    check("out.velocity", &velocity, VALUE_TOLERANCE);

    let samples: Vec<u64> = (0..case.size("batch") as u64).collect();
    let clean = CleanActions { samples: &samples, actions: &[], valid: case.get("in.counts"), action };
    let loss = squared_error(&velocity, case.get("in.target"), clean);
    check("out.loss", &[loss.sum() as f32], VALUE_TOLERANCE);

    let mut grads = FlatGrads::new(layout.len());
    let gradient = ActionExpert::backward(trace, upload(&loss.gradient, action), &mut grads);
    check("grad.in.hidden", &download(gradient.hidden.unwrap()), GRADIENT_TOLERANCE);
    if let (Some(sensor), Some(dtokens)) = (sensor, gradient.sensor) {
        sensor.backward(dtokens, &mut grads);
    }
    for param in layout.params() {
        let ours = &grads.values()[param.offset..param.offset + param.len()];
        check(&format!("grad.{}", param.name), ours, GRADIENT_TOLERANCE);
    }
}

#[test]
fn the_expert_computes_what_pytorch_computes() {
    hold_against_pytorch("plain", Recompute::None);
}

#[test]
fn repeated_draws_sensor_tokens_and_padding_agree_with_repeating_everything() {
    hold_against_pytorch("repeated-sensor-padded", Recompute::None);
    hold_against_pytorch("repeated-sensor-padded", Recompute::Full);
}
