//! What training a policy of LeRobot's will take, from sizes alone.

use coxswain_models::{Shelf, pretrained::error::ModelError};
use coxswain_nn::{
    kernels::sizes::{Sizes, SizesDevice},
    params::{TrainableLayout, Trainables},
};
use coxswain_policies::smolvla::{PolicyFiles, SmolVla};
use coxswain_proto::{human, ids::Step, memory::Category, run_spec::RunSpec};
use coxswain_task::{
    TaskError,
    dry_run::{PassCost, Passes},
    memory::{Ask, Place, Prediction, Subject, Suggestion},
};
use serde_json::{Value, json};

use super::{objective::check, passes::PolicyPasses};
use crate::{
    savings::Savings,
    vla_flow::{
        base::PolicyBase,
        config::VlaSettings,
        data::{MicroBatch, Outline},
        memory::{PredictionError, of_process},
    },
};

/// A run that starts from a policy directory, and the sizes of its data.
pub struct PolicySubject {
    spec: RunSpec,
    settings: VlaSettings,
    base: PolicyBase,
    models: Shelf<Sizes>,
    outline: Outline,
    trainables: usize,
    passes: Passes<String>,
}

impl PolicySubject {
    /// Reads configuration and metadata of everything that the run names.
    pub fn read(spec: &RunSpec, base: PolicyBase, models: Shelf<Sizes>) -> Result<Self, PredictionError> {
        let settings = VlaSettings::of(spec)?;
        let outline = Outline::read(spec, models)?;
        check(&base, &settings, spec, outline.dims)?;
        let (spec, passes) = (spec.clone(), Passes::default());
        let mut subject = Self { spec, settings, base, models, outline, trainables: 0, passes };
        let account = Place::Host { threads: 1 }.account();
        subject.trainables = subject.load(account.device())?.1.len();
        Ok(subject)
    }

    fn load(&self, device: &SizesDevice) -> Result<(SmolVla<Sizes>, TrainableLayout), ModelError> {
        let mut layout = TrainableLayout::default();
        let PolicyBase { directory, backbone, .. } = &self.base;
        let dtype = self.settings.model.weights_dtype;
        let files = PolicyFiles { directory, backbone, dtype };
        let policy = SmolVla::load(files, self.models, &mut layout, device)?;
        Ok((policy, layout))
    }

    /// A training pass over so many of the longest samples.
    fn pass(&self, ask: Ask) -> PassCost {
        let place = if ask.place == Place::Gpu { "GPU" } else { "CPU" };
        let kind = format!("{place} {:?}", self.spec.train.recompute);
        let run = |rows| self.run_pass(rows as usize, ask.place);
        self.passes.at(&kind, ask.micro_batch, run).unwrap_or_default()
    }

    fn run_pass(&self, rows: usize, place: Place) -> Result<PassCost, PredictionError> {
        let account = place.account();
        let (policy, layout) = self.load(account.device())?;
        let trainables = Trainables::new(layout, Vec::new(), account.device());
        let passes = PolicyPasses {
            policy,
            image: self.base.outline.image_token,
            seed: 0,
            recompute: self.spec.train.recompute,
            action: self.outline.dims.action,
            device: *account.device(),
        };
        let batch = self.longest(rows);
        let cost = PassCost::of(&account, |grads, clock| {
            passes.forward_backward(&trainables, &batch, grads, clock).map(|_| ())
        });
        Ok(cost?)
    }

    fn longest(&self, rows: usize) -> MicroBatch {
        let Outline { dims, images, prompt_tokens, .. } = &self.outline;
        let seen = images.len() * self.base.outline.image_tokens();
        let mut ids = vec![self.base.outline.image_token; seen];
        ids.resize((*prompt_tokens).max(seen + 1), 0);
        MicroBatch {
            step: Step(1),
            sample_indices: (0..rows as u64).collect(),
            valid: vec![0..ids.len() as u32; rows],
            seq_len: ids.len(),
            input_ids: ids.repeat(rows),
            pixel_values: Vec::new(),
            image_shapes: images.repeat(rows),
            images_per_row: vec![images.len() as u32; rows],
            state: vec![0.0; rows * dims.state],
            sensor: Vec::new(),
            actions: vec![0.0; rows * dims.horizon * dims.action],
            action_widths: vec![dims.action; rows],
            action_valid: vec![1.0; rows * dims.horizon],
            features: None,
        }
    }

    fn frozen(&self) -> usize {
        self.base.outline.parameters()
    }
}

impl Subject for PolicySubject {
    fn spec(&self) -> &RunSpec {
        &self.spec
    }

    fn model(&self) -> String {
        format!("{:?} {:?}", self.base.config, self.base.outline.layer)
    }

    fn predict(&self, ask: Ask) -> Prediction {
        let pass = self.pass(ask);
        let mut prediction =
            Prediction::of_engine(&self.spec, self.trainables as u64, ask).with_pass(&pass, |_| 0);
        prediction.set(Category::Activations, prediction.forward.max(prediction.backward));
        let bytes = self.settings.model.weights_dtype.dense().bytes();
        prediction.set(Category::FrozenWeights, bytes * self.frozen() as u64);
        if let Place::Host { threads } = ask.place {
            let Outline { patches, dims, tokenizer_bytes, data_bytes, video_bytes, .. } = &self.outline;
            let pixels = patches * self.base.outline.patches.columns() as u64;
            let sample = 4 * (pixels + (dims.state + dims.horizon * (dims.action + 1)) as u64);
            let ahead = self.spec.data.prefetch.max(1) as u64 + 1;
            let read = data_bytes + video_bytes;
            prediction.set(Category::Input, ahead * ask.micro_batch * sample + read);
            prediction.set(Category::Framework, of_process(*tokenizer_bytes, threads, pass.scratch));
        }
        prediction
    }

    fn beside_gpu(&self, ask: Ask) -> u64 {
        Prediction::of_engine_beside_gpu(&self.spec, self.trainables as u64, ask)
    }

    fn suggestions(&self, ask: Ask) -> Vec<Suggestion> {
        let mut savings = Savings::of(self, ask);
        savings.add_recompute("runs the expert's layers again in the backward pass");
        savings.add_micro_batch();
        savings.into_suggestions()
    }

    fn describe(&self) -> Vec<(&'static str, String)> {
        let (frozen, trained) =
            (human::grouped(self.frozen() as u64), human::grouped(self.trainables as u64));
        let dtype = self.settings.model.weights_dtype.name();
        let Outline { prompt_tokens, patches, dims, .. } = &self.outline;
        vec![
            ("model", format!("{frozen} parameters frozen in {dtype}, {trained} trained in float32")),
            ("trains", format!("expert {trained}")),
            (
                "sample",
                format!("{prompt_tokens} prompt tokens, {patches} image patches, {} actions", dims.horizon),
            ),
        ]
    }

    fn to_json(&self) -> Value {
        json!({
            "parameters": {"pretrained": self.frozen(), "trainable": self.trainables, "expert": self.trainables},
            "sample": {"prompt_tokens": self.outline.prompt_tokens, "patches": self.outline.patches},
        })
    }

    fn changed(&self, change: &dyn Fn(&mut RunSpec)) -> Result<Box<dyn Subject>, TaskError> {
        let mut spec = self.spec.clone();
        change(&mut spec);
        let settings = VlaSettings::of(&spec).map_err(TaskError::bad_input)?;
        check(&self.base, &settings, &spec, self.outline.dims).map_err(TaskError::bad_input)?;
        let Self { base, outline, trainables, models, .. } = self;
        let (base, outline) = (base.clone(), outline.clone());
        let passes = self.passes.clone();
        Ok(Box::new(Self { spec, settings, base, models: *models, outline, trainables: *trainables, passes }))
    }
}
