//! How many elements there are of what: exact, from sizes alone.
//!
//! Frozen weights come from the same list of modules that PEFT's names are checked against; expert and sensor
//! encoder from the layout that training itself uses, which needs no tensor; adapters from the plan that
//! decides where they are.

use crate::vla_flow::config::VlaSettings;

use coxswain_models::{pretrained::trains::Trains, vision_language::ModelOutline};
use coxswain_nn::{
    lora::{LoraPlan, ModuleKind, TrainedModules},
    params::TrainableLayout,
};

use crate::vla_flow::{
    EXPERT, SENSOR,
    adapters::Split,
    data::SampleDims,
    expert::{ActionExpert, ExpertShape, Learning},
    sensor::{SensorEncoder, SensorShape},
};

/// Elements of a frozen part.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Elements {
    /// Of matrices, which are kept in `model.weights_dtype`.
    pub matrices: u64,
    /// Of biases and gains, which are always fp32.
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
    /// Counts a policy for samples of these sizes.
    pub fn of(model: &ModelOutline, trains: Trains<'_>, vla: &VlaSettings, dims: SampleDims) -> Self {
        let mut counts = Self::frozen(model);
        counts.lora = trains.lora.map_or(0, |plan| adapters(model, plan));
        counts.base = trains.full.map_or(0, |full| in_full(model, full));
        let mut layout = TrainableLayout::default();
        register(&mut layout, model, vla, dims);
        for param in layout.params() {
            let group = match param.group {
                SENSOR => &mut counts.sensor,
                EXPERT => &mut counts.expert,
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

    /// What is held while nothing of the model trains in full: without a head of its own.
    pub fn held_frozen(&self) -> Elements {
        Elements {
            matrices: self.vision.matrices + self.language.matrices,
            vectors: self.vision.vectors + self.language.vectors,
        }
    }

    /// Everything that trains: the length of the flat parameter buffer.
    pub fn trainable(&self) -> u64 {
        self.lora + self.base + self.expert + self.sensor
    }
}

/// Elements of a model's adapters, and of biases that train beside them.
pub(crate) fn adapters(model: &ModelOutline, plan: &LoraPlan) -> u64 {
    let elements = model.modules.iter().filter_map(|module| match module.kind {
        ModuleKind::Linear { inputs, outputs, .. } => plan
            .adapter(&module.name)
            .map(|adapter| adapter.rank * (inputs + outputs) + if adapter.dora { outputs } else { 0 }),
        _ => None,
    });
    let tensors = model.tensors().into_iter().filter(|tensor| plan.trains_bias(&tensor.name));
    (elements.sum::<usize>() + tensors.map(|tensor| tensor.elements).sum::<usize>()) as u64
}

/// Elements of what trains of a model in full.
pub(crate) fn in_full(model: &ModelOutline, full: &TrainedModules) -> u64 {
    let tensors = model.tensors().into_iter().chain(model.head());
    let trained = tensors.filter(|tensor| full.trains(&tensor.name));
    trained.map(|tensor| tensor.elements as u64).sum()
}

/// Sensor encoder and expert, in the order in which a policy registers them.
fn register(layout: &mut TrainableLayout, model: &ModelOutline, vla: &VlaSettings, dims: SampleDims) {
    if dims.sensor_window > 0 {
        let shape = SensorShape {
            window: dims.sensor_window,
            channels: dims.sensor_channels,
            tokens: vla.sensor.tokens.max(1),
            width: vla.sensor.width,
            outputs: vla.expert.width,
        };
        SensorEncoder::register(layout, shape);
    }
    let shape = ExpertShape::of(vla, model.hidden_size, dims);
    // Targets that mean nothing were refused before anything is counted.
    let split = Split::of(vla, &model.modules).unwrap_or_default();
    let learning = Learning::of(vla.expert.train, split.expert.as_ref());
    ActionExpert::register(layout, shape, learning);
}
