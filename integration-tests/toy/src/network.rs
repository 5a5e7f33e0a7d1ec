//! The network: two layers, trained by squared error.
//!
//! ```text
//! rows (+ noise) [b, i]  ─ hidden: gelu(W_1 x + b_1) ─▶  [b, w]  ─ head: W_2 h + b_2 ─▶  [b, 1]
//! ```
//!
//! Each layer is a segment: it is recorded and differentiated by itself, and is a stage whose time is told.

use std::path::Path;

use burn::tensor::{Tensor, TensorData};
use coxswain_nn::{
    dense::{Dense, DenseShape},
    files::{replace, write_tensors},
    kernels::Tape,
    memory,
    params::{GradientSums, Group, ParamScope, TrainableLayout, Trainables},
    recompute::segment::{Input, RecordedSegment, Segment},
    rng::{Key, Purpose},
};
use coxswain_proto::{
    report::{Merge, Metric},
    run_spec::{Recompute, RunSpec},
};
use coxswain_task::{
    Artifact, Batch, Evaluation, Fault, MicroLoss, Module, Objective, Pass, Samples, StageClock, TaskError,
};

use crate::{batch::Rows, settings::Settings};

/// What trains; `optimizer.lr.network` is its rate.
const NETWORK: Group = Group("network");

// Stages, as their times are shown.
const HIDDEN: &str = "hidden";
const HEAD: &str = "head";

const ARTIFACT: Artifact = Artifact { path: "network.safetensors", what: "the network's weights" };

/// The largest error of a step, told as `residual/max`.
fn residual(errors: &[f64]) -> Metric {
    let value = errors.iter().fold(0.0_f64, |largest, error| largest.max(error.abs()));
    Metric { name: "residual/max".into(), unit: "1".into(), value, merge: Merge::Max }
}

/// The first layer. Its input is the rows.
struct HiddenLayer(Dense);

impl<B: Tape<Base = B>> Segment<B> for HiddenLayer {
    fn run<T: Tape<Base = B>>(&self, params: &ParamScope<'_, T>, inputs: &[Tensor<T, 2>]) -> Tensor<T, 2> {
        T::gelu_tanh(self.0.apply(params, inputs[0].clone()))
    }
}

/// The second layer. Its input is what the first one gives.
struct Head(Dense);

impl<B: Tape<Base = B>> Segment<B> for Head {
    fn run<T: Tape<Base = B>>(&self, params: &ParamScope<'_, T>, inputs: &[Tensor<T, 2>]) -> Tensor<T, 2> {
        self.0.apply(params, inputs[0].clone())
    }
}

/// The network of a run, and how it is trained.
pub struct Regression<B: Tape<Base = B>> {
    hidden: HiddenLayer,
    head: Head,
    inputs: usize,
    noise: f32,
    seed: u64,
    recompute: bool,
    device: B::Device,
}

/// Everything that trains in the network of these settings.
pub fn layout(settings: &Settings) -> (TrainableLayout, [Dense; 2]) {
    let mut layout = TrainableLayout::default();
    let (inputs, width) = (settings.data.inputs.len(), settings.network.width);
    let hidden = Dense::register(&mut layout, NETWORK, "hidden", DenseShape::xavier(inputs, width));
    let head = Dense::register(&mut layout, NETWORK, "head", DenseShape::xavier(width, 1));
    (layout, [hidden, head])
}

impl<B: Tape<Base = B>> Regression<B> {
    /// The network of a run, and the layout of what trains in it.
    pub fn new(spec: &RunSpec, device: &B::Device) -> (Self, TrainableLayout) {
        let settings = Settings::of(spec);
        let (layout, [hidden, head]) = layout(&settings);
        let network = Self {
            hidden: HiddenLayer(hidden),
            head: Head(head),
            inputs: settings.data.inputs.len(),
            noise: settings.network.noise as f32,
            seed: spec.run.seed,
            recompute: spec.train.recompute != Recompute::None,
            device: device.clone(),
        };
        (network, layout)
    }

    /// The rows as training sees them. What is added to one depends on seed, step and row alone: not on who
    /// computes it, beside which others, or for which time.
    fn noisy(&self, rows: &Rows) -> Tensor<B, 2> {
        let mut inputs = rows.inputs.clone();
        let mut draws = vec![0.0; self.inputs];
        for (inputs, &sample) in inputs.chunks_exact_mut(self.inputs).zip(&rows.indices) {
            let key = Key { seed: self.seed, purpose: Purpose::Task, step: rows.step.0, sample, repeat: 0 };
            key.draws().normal(&mut draws);
            inputs.iter_mut().zip(&draws).for_each(|(input, draw)| *input += self.noise * draw);
        }
        self.upload(inputs, self.inputs)
    }

    fn upload(&self, values: Vec<f32>, columns: usize) -> Tensor<B, 2> {
        let shape = [values.len() / columns, columns];
        Tensor::from_data(TensorData::new(values, shape), &self.device)
    }

    /// What the network says of inputs, keeping nothing.
    fn predict(&self, trainables: &Trainables<B>, inputs: Tensor<B, 2>) -> Tensor<B, 2> {
        let params = ParamScope::<B>::frozen(trainables);
        let hidden = self.hidden.run(&params, &[inputs]);
        self.head.run(&params, &[hidden])
    }
}

/// By how much predictions are off, row by row.
fn errors<B: Tape<Base = B>>(predicted: Tensor<B, 2>, rows: &Rows) -> Result<Vec<f64>, TaskError> {
    let predicted: Vec<f32> = predicted.into_data().convert::<f32>().into_vec().expect("converted to f32");
    let off = |(message, wanted): (&f32, &f32)| f64::from(*message) - f64::from(*wanted);
    let errors: Vec<f64> = predicted.iter().zip(&rows.targets).map(off).collect();
    match errors.iter().position(|error| !error.is_finite()) {
        None => Ok(errors),
        Some(row) => {
            let (step, row) = (rows.step, rows.indices[row]);
            let message =
                format!("step {step}: the error of row {row} is not finite; lower the learning rate");
            Err(TaskError::new(Fault::Numeric, message))
        }
    }
}

fn loss_of(errors: &[f64]) -> MicroLoss {
    let loss_sum = errors.iter().map(|error| error * error).sum();
    MicroLoss { loss_sum, valid: errors.len() as f64 }
}

impl<B: Tape<Base = B>> Objective<B> for Regression<B> {
    fn forward_backward(
        &self,
        trainables: &Trainables<B>,
        batch: &dyn Batch,
        grads: &mut dyn GradientSums<B>,
        clock: &mut StageClock<'_>,
    ) -> Result<MicroLoss, TaskError> {
        let rows: &Rows = batch.content();
        if batch.is_empty() {
            return Ok(MicroLoss::default());
        }
        clock.enter(Pass::Forward);
        let inputs = self.noisy(rows);
        let record = || RecordedSegment::run(&self.hidden, trainables, vec![Input::constant(inputs.clone())]);
        // Kept for the backward pass, or computed again there.
        let (output, kept) = if self.recompute {
            (self.hidden.run(&ParamScope::<B>::frozen(trainables), std::slice::from_ref(&inputs)), None)
        } else {
            let recorded = record();
            (recorded.output(), Some(recorded))
        };
        clock.lap(HIDDEN);
        memory::check();
        let head = RecordedSegment::run(&self.head, trainables, vec![Input::tracked(output)]);
        let errors = errors(head.output(), rows)?;
        clock.lap(HEAD);
        clock.figure(residual(&errors));

        clock.enter(Pass::Backward);
        let scale = grads.scaled(batch.len() as f64).unwrap_or(1.0);
        let slope = errors.iter().map(|error| 2.0 * *error as f32 * scale).collect();
        let slopes = head.backward(self.upload(slope, 1), grads);
        clock.lap(HEAD);
        memory::check();
        if let Some(slope) = slopes.into_iter().flatten().next() {
            kept.unwrap_or_else(record).backward(slope, grads);
        }
        clock.lap(HIDDEN);
        Ok(loss_of(&errors))
    }

    fn loss(&self, trainables: &Trainables<B>, batch: &dyn Batch) -> Result<MicroLoss, TaskError> {
        let rows: &Rows = batch.content();
        let predicted = self.predict(trainables, self.noisy(rows));
        Ok(loss_of(&errors(predicted, rows)?))
    }

    fn measures(&self) -> &'static [&'static str] {
        &["mse", "mae"]
    }

    fn evaluate(
        &self,
        trainables: &Trainables<B>,
        batch: &dyn Batch,
        _samples: &dyn Samples,
    ) -> Result<Evaluation, TaskError> {
        let rows: &Rows = batch.content();
        let predicted = self.predict(trainables, self.upload(rows.inputs.clone(), self.inputs));
        let errors = errors(predicted, rows)?;
        let MicroLoss { loss_sum, valid } = loss_of(&errors);
        let sums = vec![loss_sum, errors.iter().map(|error| error.abs()).sum()];
        Ok(Evaluation { count: valid, sums, ..Evaluation::default() })
    }

    fn modules(&self, layout: &TrainableLayout) -> Vec<Module> {
        vec![Module {
            module: NETWORK.to_string(),
            tensors: layout.params().len(),
            parameters: layout.len(),
            trains: true,
            dtype: "float32",
            bytes: 4 * layout.len() as u64,
        }]
    }

    fn base(&self) -> &str {
        ""
    }

    fn initial_values(&self, layout: &TrainableLayout) -> Result<Vec<f32>, TaskError> {
        Ok(layout.initial_values(self.seed))
    }

    fn export(
        &self,
        dir: &Path,
        layout: &TrainableLayout,
        values: &[f32],
    ) -> Result<Vec<Artifact>, TaskError> {
        let path = dir.join(ARTIFACT.path);
        let written = replace(&path, |path| write_tensors(path, layout, values, |_| true));
        written.map_err(|error| TaskError::io(format!("write {}: {error}", path.display())))?;
        Ok(vec![ARTIFACT])
    }
}
