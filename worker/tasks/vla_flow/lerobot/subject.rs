//! What training a policy of LeRobot's will take, from sizes alone.

use coxswain_models::{
    Shelf,
    pretrained::{
        adapters::TunedModules,
        error::ModelError,
        frozen::{FrozenTensor, frozen_tensors, head_tensor},
    },
};
use coxswain_nn::{
    kernels::sizes::{Sizes, SizesDevice},
    params::{Group, ParamSpec, TrainableLayout, Trainables},
};
use coxswain_policies::{KeptTokens, Policy, PolicyFiles};
use coxswain_proto::{
    human,
    memory::Category,
    run_spec::{CacheDtype, CacheMode, RunSpec},
};
use coxswain_task::{
    CachedFeatures, Pass, TaskError,
    dry_run::{PassCost, Passes},
    memory::{Ask, Place, Prediction, Subject, Suggestion},
};
use serde_json::{Value, json};

use super::{
    features::shape,
    objective::check,
    parts::{drops, frozen},
    passes::PolicyPasses,
};
use crate::{
    savings::Savings,
    vla_flow::{
        EXPERT,
        base::PolicyBase,
        config::{Augmentation, TapSetting, VlaSettings},
        data::{MicroBatch, Outline},
        memory::{PredictionError, exact_bytes, of_process, stored_bytes},
    },
};

/// A run that starts from a policy directory, and the sizes of its data.
pub struct PolicySubject {
    spec: RunSpec,
    settings: VlaSettings,
    base: PolicyBase,
    models: Shelf<Sizes>,
    outline: Outline,
    tuned: TunedModules,
    frozen: Vec<FrozenTensor>,
    layout: TrainableLayout,
    passes: Passes<(String, CountedPass)>,
}

/// A pass that is counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum CountedPass {
    /// A pass of training, from pixels.
    Live,
    /// A pass of training from kept features.
    Kept,
    /// What computes features.
    Filling,
}

impl PolicySubject {
    /// Reads configuration and metadata of everything that the run names.
    pub fn from_spec(
        spec: &RunSpec,
        base: PolicyBase,
        models: Shelf<Sizes>,
    ) -> Result<Self, PredictionError> {
        let outline = Outline::from_spec(spec, models)?;
        Self::with_passes(spec.clone(), base, models, outline, Passes::default())
    }

    fn with_passes(
        spec: RunSpec,
        base: PolicyBase,
        models: Shelf<Sizes>,
        outline: Outline,
        passes: Passes<(String, CountedPass)>,
    ) -> Result<Self, PredictionError> {
        let settings = VlaSettings::from_spec(&spec)?;
        let tuned = check(&base, &settings, &spec, outline.dims)?;
        let (frozen, layout) = (frozen(&base, &tuned), TrainableLayout::default());
        let mut subject = Self { spec, settings, base, models, outline, tuned, frozen, layout, passes };
        let account = Place::Host { threads: 1 }.account();
        subject.layout = subject.load(account.device())?.1;
        Ok(subject)
    }

    fn load(&self, device: &SizesDevice) -> Result<(Box<dyn Policy<Sizes>>, TrainableLayout), ModelError> {
        let mut layout = TrainableLayout::default();
        let PolicyBase { directory, backbone, kind, .. } = &self.base;
        let dtype = self.settings.model.weights_dtype;
        let files = PolicyFiles { directory, backbone, dtype };
        let policy = kind.load(files, &self.tuned, self.models, &mut layout, device)?;
        Ok((policy, layout))
    }

    /// A training pass over so many of the longest samples, as the run's steps are once features are kept.
    fn pass(&self, ask: Ask) -> PassCost {
        let kept = self.spec.cache.mode != CacheMode::Off;
        self.counted(if kept { CountedPass::Kept } else { CountedPass::Live }, ask.micro_batch, ask.place)
    }

    fn counted(&self, kind: CountedPass, micro_batch: u64, place: Place) -> PassCost {
        let at = if place == Place::Gpu { "GPU" } else { "CPU" };
        let Self { settings, spec, .. } = self;
        let key = (format!("{at} {:?} {settings:?} {:?}", self.kept(), spec.train.recompute), kind);
        let run = |rows| self.run_pass(rows as usize, kind, place);
        self.passes.at(&key, micro_batch, run).unwrap_or_default()
    }

    fn run_pass(&self, rows: usize, kind: CountedPass, place: Place) -> Result<PassCost, PredictionError> {
        let account = place.account();
        let (policy, layout) = self.load(account.device())?;
        let trainables = Trainables::new(layout, Vec::new(), account.device());
        let passes = PolicyPasses {
            policy,
            image: self.base.outline.image_token,
            seed: 0,
            recompute: self.spec.train.recompute,
            drops: drops(&self.settings),
            action: self.outline.dims.action,
            loss: self.settings.expert.loss,
            kept: self.kept(),
            kept_width: self.kept().width(&self.base.outline),
            device: *account.device(),
        };
        let mut batch = self.longest(rows);
        if kind == CountedPass::Filling {
            let (features, cost) = PassCost::of_forward(&account, || passes.features(&trainables, &batch));
            features?;
            return Ok(cost);
        }
        let width = passes.kept_width;
        let values = vec![0.0; rows * self.feature_values() as usize];
        batch.features = (kind == CountedPass::Kept).then_some(CachedFeatures { width, values });
        let cost = PassCost::of(&account, |grads, clock| {
            passes.forward_backward(&trainables, &batch, grads, clock).map(|_| ())
        });
        Ok(cost?)
    }

    /// What is kept of samples, if anything is.
    fn kept(&self) -> KeptTokens {
        self.base.kept(&self.spec)
    }

    /// Values of one sample's features.
    fn feature_values(&self) -> u64 {
        let Outline { images, prompt_tokens, .. } = &self.outline;
        shape(&self.base, self.kept()).values(&vec![0; *prompt_tokens], images) as u64
    }

    /// What keeping features would save, for each kind of them that the run allows.
    fn add_cache(&self, savings: &mut Savings<'_>, ask: Ask) {
        let changes = self.settings.data.augmentation != Augmentation::Off;
        if self.spec.cache.mode != CacheMode::Off || changes {
            return;
        }
        let mut known = None;
        for (tap, setting) in
            [(TapSetting::Auto, "cache.mode=exact"), (TapSetting::Final, "cache.mode=exact cache.tap=final")]
        {
            let mut spec = self.spec.clone();
            (spec.cache.mode, spec.cache.tap) = (CacheMode::Exact, tap.into());
            let (base, outline) = (self.base.clone(), self.outline.clone());
            let kept = Self::with_passes(spec, base, self.models, outline, self.passes.clone());
            let Some(kept) = kept.ok().filter(|kept| known.replace(kept.kept()) != Some(kept.kept())) else {
                continue;
            };
            let faster = self.pass(ask).flops.total() as f64 / kept.pass(ask).flops.total().max(1) as f64;
            let width = kept.kept().width(&kept.base.outline) as u64;
            let of_sample = stored_bytes(kept.spec.cache.dtype, kept.feature_values() / width, width);
            let store = human::bytes(kept.outline.frames * of_sample);
            let what = match kept.kept() {
                KeptTokens::Images(_) => "features of images cached",
                KeptTokens::Prompt => "hidden states cached",
                KeptTokens::KeysValues => "keys and values cached",
            };
            let losses = match kept.spec.cache.dtype {
                CacheDtype::Float32 => "losses stay the same",
                _ => "what is cached is rounded",
            };
            let remark = format!("{losses}, steps are at most {faster:.1} x faster; {store} on disk");
            savings.offer(what, setting, remark, kept.predict(ask).peak());
        }
    }

    /// Peak of activations while the features of one encoder batch are computed.
    fn fill_peak(&self, ask: Ask) -> u64 {
        if self.spec.cache.mode == CacheMode::Off {
            return 0;
        }
        let batch = self.spec.cache.encoder_batch.map_or(ask.micro_batch, |batch| batch as u64);
        // At the end they are in a tensor and in host memory.
        let peak = self.counted(CountedPass::Filling, batch, ask.place).peak(Pass::Forward, |_| 0);
        peak.max(8 * batch * self.feature_values())
    }

    /// Host memory for kept features.
    fn cache_bytes(&self, ask: Ask) -> u64 {
        match self.spec.cache.mode {
            CacheMode::Off => 0,
            _ => exact_bytes(&self.spec.cache, self.outline.frames, ask.micro_batch, self.feature_values()),
        }
    }

    fn longest(&self, rows: usize) -> MicroBatch {
        let Outline { dims, images, prompt_tokens, .. } = &self.outline;
        let seen = images.len() * self.base.outline.image_tokens();
        let mut ids = vec![self.base.outline.image_token; seen];
        ids.resize((*prompt_tokens).max(seen + 1), 0);
        MicroBatch::of_zeros(rows, &ids, images, *dims)
    }

    /// Parameters of the whole policy that do not train.
    fn frozen(&self) -> usize {
        let tensors = self.base.modules();
        let tensors =
            frozen_tensors(self.base.kind.rules(), &tensors).into_iter().chain(head_tensor(&tensors));
        let full = tensors.filter(|tensor| self.tuned.trains().group(&tensor.name).is_none());
        full.map(|tensor| tensor.elements).sum()
    }

    fn trained(&self, group: Group) -> usize {
        self.layout.params().iter().filter(|param| param.group == group).map(ParamSpec::len).sum()
    }
}

impl Subject for PolicySubject {
    fn spec(&self) -> &RunSpec {
        &self.spec
    }

    fn layout(&self) -> &TrainableLayout {
        &self.layout
    }

    fn model(&self) -> String {
        format!("{:?} {:?}", self.base.kind, self.base.outline.layer)
    }

    fn predict(&self, ask: Ask) -> Prediction {
        let pass = self.pass(ask);
        let mut prediction = Prediction::of_engine(&self.spec, &self.layout, ask).with_pass(&pass, |_| 0);
        prediction.forward = prediction.forward.max(self.fill_peak(ask));
        prediction.set(Category::Activations, prediction.forward.max(prediction.backward));
        let dtype = self.settings.model.weights_dtype;
        let frozen = self.frozen.iter().map(|tensor| tensor.kept_bytes(dtype)).sum();
        prediction.set(Category::FrozenWeights, frozen);
        if ask.place != Place::Gpu {
            prediction.set(Category::Cache, self.cache_bytes(ask));
        }
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
        let engine = Prediction::of_engine_beside_gpu(&self.spec, &self.layout, ask);
        engine + self.cache_bytes(ask)
    }

    fn suggestions(&self, ask: Ask) -> Vec<Suggestion> {
        let mut savings = Savings::new(self, ask);
        savings.add_recompute("recomputes the expert's layers in the backward pass");
        savings.add_micro_batch();
        self.add_cache(&mut savings, ask);
        savings.into_suggestions()
    }

    fn describe(&self) -> Vec<(&'static str, String)> {
        let (frozen, trained) =
            (human::grouped(self.frozen() as u64), human::grouped(self.layout.len() as u64));
        let groups = self.layout.groups().into_iter();
        let groups: Vec<_> =
            groups.map(|group| format!("{group} {}", human::grouped(self.trained(group) as u64))).collect();
        let dtype = self.settings.model.weights_dtype.name();
        let Outline { prompt_tokens, patches, dims, .. } = &self.outline;
        vec![
            ("model", format!("{frozen} parameters frozen in {dtype}, {trained} trained in float32")),
            ("trains", groups.join(", ")),
            (
                "sample",
                format!("{prompt_tokens} prompt tokens, {patches} image patches, {} actions", dims.horizon),
            ),
        ]
    }

    fn epoch_len(&self) -> Option<u64> {
        self.outline.epoch
    }

    fn to_json(&self) -> Value {
        json!({
            "parameters": {
                "pretrained": self.frozen(),
                "trainable": self.layout.len(),
                "lora": self.trained(Group::LORA),
                "base": self.trained(Group::BASE),
                "expert": self.trained(EXPERT),
            },
            "sample": {"prompt_tokens": self.outline.prompt_tokens, "patches": self.outline.patches},
        })
    }

    fn changed(&self, change: &dyn Fn(&mut RunSpec)) -> Result<Box<dyn Subject>, TaskError> {
        let mut spec = self.spec.clone();
        change(&mut spec);
        let (base, outline) = (self.base.clone(), self.outline.clone());
        let changed = Self::with_passes(spec, base, self.models, outline, self.passes.clone());
        Ok(Box::new(changed.map_err(TaskError::bad_input)?))
    }
}
