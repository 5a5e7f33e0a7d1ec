//! The action expert and the sensor encoder against the PyTorch module of `fixtures/make_expert_fixtures.py`:
//! values, loss, and the gradient of every weight. Relative error is the norm of the difference over the norm
//! of the reference.

use std::{collections::HashMap, fs};

use burn::tensor::{Tensor, TensorData};
use coxswain_nn::{
    kernels::{AttentionMask, Tape},
    lora::{Lora, LoraPlan, LoraTargets},
    params::{FlatGrads, TrainableLayout, Trainables},
    recompute::{
        Retention,
        segment::{Input, RecordedSegment},
    },
};
use coxswain_proto::run_spec::Recompute;
use coxswain_tasks::vla_flow::{
    adapters::modules,
    expert::{ActionExpert, Conditioning, Draws, ExpertForm, ExpertShape, Learning},
    flow::{CleanActions, squared_error},
    sensor::{SensorEncoder, SensorShape},
};
use safetensors::SafeTensors;

use crate::{fixture, relative_error};

/// All cases.
pub const CASES: [&str; 5] = ["plain", "repeated-sensor-padded", "adapted", "of-the-field", "layerwise"];
const GRADIENT_TOLERANCE: f64 = 1e-3;

/// A case: its sizes and its tensors, flat.
pub struct Case {
    /// As its script has them.
    pub sizes: HashMap<String, String>,
    tensors: HashMap<String, Vec<f32>>,
}

impl Case {
    /// The case of this name.
    pub fn read(name: &str) -> Self {
        let bytes = fs::read(fixture("expert").join(format!("{name}.safetensors"))).unwrap();
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

    /// A tensor.
    pub fn get(&self, name: &str) -> &[f32] {
        self.tensors.get(name).unwrap_or_else(|| panic!("the fixture has no `{name}`"))
    }

    fn tensor<B: Tape>(&self, name: &str, columns: usize, device: &B::Device) -> Tensor<B, 2> {
        upload(self.get(name), columns, device)
    }

    /// What a case does not say it has not.
    fn form(&self) -> ExpertForm {
        let of = |name: &str| self.sizes.get(name).map_or(0, |value| value.parse().unwrap());
        let some = |size: usize| (size > 0).then_some(size);
        ExpertForm {
            time_in_actions: of("time_in_actions") > 0,
            state_hidden: some(of("state_hidden")),
            decoder_hidden: some(of("decoder_hidden")),
            feature_norm: of("feature_norm") > 0,
            future_tokens: of("future_tokens"),
            dropout: 0.0,
            layerwise: of("layerwise") > 0,
        }
    }

    /// A weight: the fixture's, or the wave that its script has in place of random values.
    pub fn weight(&self, name: &str, shape: &[usize]) -> Vec<f32> {
        if let Some(given) = self.tensors.get(&format!("param.{name}")) {
            return given.clone();
        }
        let [rows, columns] = if let [rows, columns] = *shape { [rows, columns] } else { [1, shape[0]] };
        let wave = wave(name, rows, columns).into_iter();
        match (shape, name.ends_with(".weight")) {
            ([_, columns], true) => wave.map(|value| value / (*columns as f64).sqrt() as f32).collect(),
            (_, true) => wave.map(|value| 1.0 + 0.2 * value).collect(),
            ([_], false) => wave.map(|value| 0.1 * value).collect(),
            _ => wave.map(|value| 0.3 * value).collect(),
        }
    }

    fn lora(&self, shape: ExpertShape) -> Option<LoraPlan> {
        let targets = self.sizes.get("lora_targets")?;
        let targets = LoraTargets::Suffixes(targets.split(' ').map(str::to_owned).collect());
        let (rank, alpha) = (self.size("lora_r"), self.size("lora_alpha") as f64);
        let lora = Lora { rank, alpha, targets, ..Lora::default() };
        Some(LoraPlan::resolve(&lora, &modules(shape)).unwrap())
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
            form: self.form(),
        };
        let lora = self.lora(shape);
        (sensor, ActionExpert::register(layout, shape, Learning::new(lora.is_none(), lora.as_ref())))
    }
}

/// Values that a script has in place of random ones.
pub fn wave(name: &str, rows: usize, columns: usize) -> Vec<f32> {
    let phase = name.bytes().fold(0, |phase, byte| (31 * phase + u32::from(byte)) % 1009);
    let value = |at: usize| 0.37 * ((at / columns + 1) * (at % columns + 1)) as f64 + f64::from(phase);
    (0..rows * columns).map(|at| value(at).sin() as f32).collect()
}

fn upload<B: Tape>(values: &[f32], columns: usize, device: &B::Device) -> Tensor<B, 2> {
    Tensor::from_data(TensorData::new(values.to_vec(), [values.len() / columns, columns]), device)
}

fn download<B: Tape>(x: Tensor<B, 2>) -> Vec<f32> {
    x.into_data().convert::<f32>().into_vec().unwrap()
}

fn doubles(values: &[f32]) -> Vec<f64> {
    values.iter().map(|&value| f64::from(value)).collect()
}

/// Holds a case: values within `tolerance`, gradients of every weight within 1e-3.
pub fn hold<B: Tape<Base = B>>(name: &str, mode: Recompute, device: &B::Device, tolerance: f64) {
    let case = Case::read(name);
    let mut layout = TrainableLayout::default();
    let (sensor, expert) = case.register(&mut layout);
    let values = layout.whole().flat_map(|p| case.weight(&p.name, &p.shape)).collect();
    let trainables = Trainables::<B>::new(layout.clone(), values, device);
    let check = |what: &str, ours: &[f32], tolerance: f64| {
        let error = relative_error(&doubles(ours), &doubles(case.get(what)));
        assert!(error <= tolerance, "{name}: {what} is off by {error:.2e}");
    };

    let sensor = sensor.as_ref().map(|sensor| {
        RecordedSegment::run(&sensor.segment(case.get("in.window"), device), &trainables, vec![])
    });
    if let Some(sensor) = &sensor {
        check("out.sensor", &download(sensor.output()), tolerance);
    }
    let ranges: Vec<_> = case.get("in.valid").chunks(2).map(|r| r[0] as u32..r[1] as u32).collect();
    // One after another where each block has its own.
    let (context, seq) = (case.size("context"), case.size("seq"));
    let hidden = case.get("in.hidden").chunks(ranges.len() * seq * context);
    let conditioning = Conditioning {
        batch: ranges.len(),
        state_bc: (case.size("state") > 0).then(|| case.tensor("in.state", case.size("state"), device)),
        sensor: sensor.as_ref().map(|sensor| Input::tracked(sensor.output())),
        hidden: hidden.map(|values| Input::tracked(upload(values, context, device))).collect(),
        mask: AttentionMask::Keys(ranges.into()),
    };
    let action = case.size("action");
    let draws = Draws { times: case.get("in.times"), noisy_nc: case.tensor("in.noisy", action, device) };
    let (velocity, trace) =
        expert.forward(&trainables, Retention::in_float32(mode), conditioning, draws, None);
    let velocity = download(velocity);
    check("out.velocity", &velocity, tolerance);

    let samples: Vec<u64> = (0..case.size("batch") as u64).collect();
    let clean = CleanActions {
        samples: &samples,
        actions: &[],
        valid: case.get("in.counts"),
        action,
        widths: &vec![action; samples.len()],
    };
    let loss = squared_error(&velocity, case.get("in.target"), clean);
    check("out.loss", &[loss.sum() as f32], tolerance);

    let mut grads = FlatGrads::new(layout.len());
    let gradient = ActionExpert::backward(trace, upload(&loss.gradient, action, device), &mut grads);
    let of_hidden: Vec<f32> = gradient.hidden.unwrap().into_iter().flat_map(download).collect();
    check("grad.in.hidden", &of_hidden, GRADIENT_TOLERANCE);
    if let (Some(sensor), Some(dtokens)) = (sensor, gradient.sensor) {
        sensor.backward(dtokens, &mut grads);
    }
    for param in layout.params() {
        let ours = &grads.values()[param.offset..param.offset + param.len()];
        check(&format!("grad.{}", param.name), ours, GRADIENT_TOLERANCE);
    }
}
