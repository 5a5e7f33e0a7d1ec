//! What a rank of a run will hold, from the run file alone: the network's own pass, run where tensors are
//! sizes, and the signals and spectra that lie in host memory beside it.

use std::convert::Infallible;

use coxswain_nn::{
    dtypes::ActivationsDtype,
    kernels::sizes::{Account, Sizes},
    params::{TrainableLayout, Trainables},
    recompute::Retention,
};
use coxswain_proto::{
    config::SettingsError,
    human,
    memory::Category,
    run_spec::{Recompute, RunSpec},
};
use coxswain_task::{
    Pass, TaskError,
    dry_run::{PassCost, Passes},
    memory::{Ask, Place, Prediction, Subject, Suggestion},
};
use serde_json::{Value, json};

use super::{
    config::SeparationSettings,
    data::CHANNELS,
    network::{MASKS, Separator, SeparatorShape},
    objective::{LOSS, shape},
};
use crate::{
    savings::{Savings, of_settings},
    vla_flow::memory::of_process,
};

/// Sizes of a run.
#[derive(Clone, Debug)]
pub struct SeparatorSizes {
    spec: RunSpec,
    settings: SeparationSettings,
    shape: SeparatorShape,
    trained: TrainableLayout,
    /// By the keys that change what a pass holds.
    passes: Passes<String>,
}

impl SeparatorSizes {
    /// Sizes by a run's settings. Its data is not looked at: every segment is as long as the run file says.
    pub fn from_spec(spec: &RunSpec) -> Result<Self, SettingsError> {
        Self::with_passes(spec.clone(), Passes::default())
    }

    fn with_passes(spec: RunSpec, passes: Passes<String>) -> Result<Self, SettingsError> {
        let settings = SeparationSettings::from_spec(&spec)?;
        let shape = shape(&settings);
        let mut layout = TrainableLayout::default();
        Separator::register(&mut layout, shape.clone());
        Ok(Self { spec, settings, shape, trained: layout, passes })
    }

    fn with(&self, change: &dyn Fn(&mut RunSpec)) -> Result<Self, SettingsError> {
        let mut spec = self.spec.clone();
        change(&mut spec);
        Self::with_passes(spec, self.passes.clone())
    }

    /// Frames of a segment.
    fn frames(&self) -> u64 {
        (1 + self.settings.data.segment() / self.settings.network.hop) as u64
    }

    /// Bytes of one spectrum of a segment's channel.
    fn spectrum(&self) -> u64 {
        8 * self.frames() * (self.settings.network.n_fft / 2 + 1) as u64
    }

    /// Signals that are estimated of a segment.
    fn signals(&self) -> u64 {
        (self.shape.stems * CHANNELS) as u64
    }

    /// A training pass over so many segments, without what lies beside tensors.
    fn pass(&self, micro_batch: u64) -> PassCost {
        let kind = format!("{:?} {:?}", self.settings, self.spec.train.recompute);
        let run = |segments: u64| {
            let (account, size) = (Account::open(), [segments as usize, self.frames() as usize]);
            let mut layout = TrainableLayout::default();
            let separator = Separator::register(&mut layout, self.shape.clone());
            let trainables = Trainables::<Sizes>::new(layout, Vec::new(), account.device());
            let retention = Retention {
                recompute: self.spec.train.recompute,
                activations: self.settings.network.activations_dtype,
            };
            let run = separator.run(&trainables, retention, size);
            let zeros = |values: usize| vec![0.0; size[0] * size[1] * values];
            let bands = 0..self.shape.bands.len();
            PassCost::of(&account, |grads, clock| {
                clock.enter(Pass::Forward);
                let inputs = bands.map(|band| zeros(self.shape.inputs(band))).collect();
                let (_, kept) = run.forward(inputs, &mut |stage| clock.lap(stage));
                clock.lap(LOSS);
                clock.enter(Pass::Backward);
                let slope = |band| zeros(self.shape.outputs(band));
                run.backward(kept, slope, grads, &mut |stage| clock.lap(stage));
                Ok::<_, Infallible>(())
            })
        };
        let Ok(cost) = self.passes.at(&kind, micro_batch, run);
        cost
    }

    /// Host memory beside tensors in a stage of a pass over so many segments: spectra of the mixtures in
    /// all; masks where they are made, and spectra of their gradients as soon as those are there.
    fn beside(&self, stage: &str, segments: u64, threads: u64) -> u64 {
        let mixtures = segments * CHANNELS as u64 * self.spectrum();
        let masks = segments * self.signals() * self.spectrum();
        // Of each signal that is being judged: itself, its frames added up, and what they are of.
        let signal = 4 * (2 * self.settings.data.segment() + self.settings.network.n_fft) as u64;
        mixtures
            + match stage {
                LOSS => 2 * masks + threads.min(segments * self.signals()) * signal,
                MASKS => masks,
                _ => 0,
            }
    }
}

impl Subject for SeparatorSizes {
    fn spec(&self) -> &RunSpec {
        &self.spec
    }

    fn layout(&self) -> &TrainableLayout {
        &self.trained
    }

    fn model(&self) -> String {
        format!("a separator of {:?} and {:?}", self.settings.network, self.shape.stems)
    }

    fn predict(&self, ask: Ask) -> Prediction {
        let pass = self.pass(ask.micro_batch);
        let beside = |stage: &str| match ask.place {
            // Signals and spectra stay with the host.
            Place::Gpu => 0,
            Place::Host { threads } => self.beside(stage, ask.micro_batch, threads),
        };
        let engine = Prediction::of_engine(&self.spec, &self.trained, ask);
        let mut prediction = engine.with_pass(&pass, beside);
        prediction.set(Category::Activations, prediction.forward.max(prediction.backward));
        let signals = CHANNELS as u64 + self.signals();
        let batch = 4 * ask.micro_batch * signals * self.settings.data.segment() as u64;
        if let Place::Host { threads } = ask.place {
            let ahead = self.spec.data.prefetch.max(1) as u64 + 1;
            prediction.set(Category::Input, ahead * batch);
            prediction.set(Category::Framework, of_process(0, threads, pass.scratch));
        }
        prediction
    }

    fn beside_gpu(&self, ask: Ask) -> u64 {
        let signals = Prediction::of_engine_beside_gpu(&self.spec, &self.trained, ask);
        signals + self.beside(LOSS, ask.micro_batch, 1)
    }

    fn suggestions(&self, ask: Ask) -> Vec<Suggestion> {
        let mut savings = Savings::new(self, ask);
        savings.add_recompute("recomputes blocks and masks in the backward pass");
        if self.spec.train.recompute != Recompute::None {
            let rounded = of_settings(&self.settings, |settings| {
                settings.network.activations_dtype = ActivationsDtype::Bfloat16;
            });
            let setting = "network.activations_dtype=bfloat16".into();
            let remark = "rounds block outputs and saved activations";
            savings.add("activations kept in bf16", setting, remark, rounded);
        }
        savings.add_micro_batch();
        let seconds = self.settings.data.segment_seconds / 2.0;
        let shorter = of_settings(&self.settings, |settings| settings.data.segment_seconds = seconds);
        let setting = format!("data.segment_seconds={seconds}");
        let remark = "each segment covers half as much of a track";
        savings.add("segments of half the length", setting, remark, shorter);
        savings.into_suggestions()
    }

    fn describe(&self) -> Vec<(&'static str, String)> {
        let trained = format!("{} parameters trained in float32", human::grouped(self.trained.len() as u64));
        let sample = format!(
            "{} s of stereo at {} Hz: {} frames of {} bands",
            self.settings.data.segment_seconds,
            self.settings.data.sample_rate,
            self.frames(),
            self.shape.bands.len()
        );
        vec![("model", trained), ("sample", sample)]
    }

    fn precision(&self) -> Option<&'static str> {
        match (self.settings.network.activations_dtype, self.spec.train.recompute) {
            (ActivationsDtype::Float32, _) => None,
            (ActivationsDtype::Bfloat16, Recompute::None) => Some("activations rounded to bfloat16"),
            (ActivationsDtype::Bfloat16, _) => Some("activations kept in bfloat16"),
        }
    }

    fn to_json(&self) -> Value {
        json!({
            "parameters": {"trainable": self.trained.len()},
            "sample": {"frames": self.frames(), "bands": self.shape.bands.len()},
        })
    }

    fn changed(&self, change: &dyn Fn(&mut RunSpec)) -> Result<Box<dyn Subject>, TaskError> {
        Ok(Box::new(self.with(change).map_err(TaskError::bad_input)?))
    }
}
