//! How many elements there are of what: exact, from sizes alone.
//!
//! Frozen weights come from the same list of modules that PEFT's names are checked against; expert and sensor
//! encoder from the layout that training itself uses, which needs no tensor; adapters from the plan that
//! decides where they are.

use crate::vla_flow::config::VlaSettings;

use coxswain_models::{pretrained::trains::Trains, vision_language::ModelOutline};
use coxswain_nn::{
    lora::{LoraPlan, ModuleKind},
    params::{Group, Init, TrainableLayout},
};

use crate::vla_flow::{
    EXPERT, SENSOR,
    adapters::Split,
    data::SampleDims,
    expert::Learning,
    head::HeadShape,
    sensor::{SensorEncoder, SensorShape},
};

/// Elements of a frozen part.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Elements {
    /// Elements of matrices, which are kept in `model.weights_dtype`.
    pub matrices: u64,
    /// Elements of biases and gains, which are always fp32.
    pub vectors: u64,
}

impl Elements {
    /// Matrices and vectors.
    pub fn total(&self) -> u64 {
        self.matrices + self.vectors
    }
}

/// Elements of a policy by part.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// The vision tower and its merger.
    pub vision: Elements,
    /// Embedding table, decoder layers, final norm.
    pub language: Elements,
    /// The LM head where it is a matrix of its own. Training on actions never loads it.
    pub head: Elements,
    /// Adapters.
    pub lora: u64,
    /// What of the pretrained model trains in full.
    pub base: u64,
    /// What trains of the action expert.
    pub expert: u64,
    /// What does not, float32.
    pub frozen_expert: u64,
    /// The sensor encoder.
    pub sensor: u64,
}

impl Counts {
    /// Counts a policy, of which this trains.
    pub fn from_layout(model: &ModelOutline, layout: &TrainableLayout) -> Self {
        let mut counts = Self::frozen(model);
        for param in layout.params() {
            let group = match param.group {
                SENSOR => &mut counts.sensor,
                EXPERT => &mut counts.expert,
                Group::BASE => &mut counts.base,
                _ => &mut counts.lora,
            };
            *group += param.len() as u64;
        }
        counts.frozen_expert = (layout.whole_len() - layout.len()) as u64;
        counts
    }

    /// Counts the pretrained model alone.
    pub fn frozen(model: &ModelOutline) -> Self {
        let mut counts = Self::default();
        for tensor in model.tensors() {
            let part = if tensor.of_vision() { &mut counts.vision } else { &mut counts.language };
            let elements = if tensor.is_matrix { &mut part.matrices } else { &mut part.vectors };
            *elements += tensor.elements as u64;
        }
        counts.head.matrices = model.head().map_or(0, |head| head.elements as u64);
        counts
    }

    /// The pretrained model, its head included: the number that a model is known by.
    pub fn pretrained(&self) -> u64 {
        self.vision.total() + self.language.total() + self.head.total()
    }
}

/// What trains of a policy for samples of these sizes, tensor by tensor.
pub fn trained(
    model: &ModelOutline,
    trains: Trains<'_>,
    vla: &VlaSettings,
    dims: SampleDims,
) -> TrainableLayout {
    let mut layout = TrainableLayout::default();
    trains.lora.iter().for_each(|plan| add_adapters(&mut layout, model, plan));
    for tensor in model.tensors().into_iter().chain(model.head()) {
        let Some(group) = trains.group(&tensor.name) else { continue };
        layout.add(tensor.name, &[tensor.elements], group, true, Init::Zeros);
    }
    // As a policy registers them.
    if dims.sensor_window > 0 {
        let shape = SensorShape {
            window: dims.sensor_window,
            channels: dims.sensor_channels,
            tokens: vla.sensor.tokens.max(1),
            width: vla.sensor.width,
            outputs: vla.expert.width,
        };
        SensorEncoder::register(&mut layout, shape);
    }
    // Targets that mean nothing were refused before anything is counted.
    let split = Split::from_settings(vla, model).unwrap_or_default();
    let learning = Learning::new(vla.expert.train, split.expert.as_ref());
    HeadShape::from_settings(vla, model.into(), dims).register(&mut layout, learning);
    layout
}

/// A model's adapters.
fn add_adapters(layout: &mut TrainableLayout, model: &ModelOutline, plan: &LoraPlan) {
    for module in &model.modules {
        let ModuleKind::Linear { inputs, outputs, .. } = module.kind else { continue };
        let Some(adapter) = plan.adapter(&module.name) else { continue };
        let factors = [("lora_A", adapter.rank * inputs), ("lora_B", adapter.rank * outputs)];
        let magnitudes = adapter.dora.then_some(("lora_magnitude_vector", outputs));
        for (part, len) in factors.into_iter().chain(magnitudes) {
            layout.add(format!("{}.{part}", module.name), &[len], Group::LORA, true, Init::Zeros);
        }
    }
}
