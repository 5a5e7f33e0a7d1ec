//! What a rank of a run will hold: from configuration, headers and the file of chats. No weight is read.
//!
//! What a step holds and computes is counted by running it on the backend that knows sizes alone.

use std::path::Path;

use coxswain_data::DataError;
use coxswain_models::qwen2_5_vl::{
    Trains,
    config::QwenConfig,
    error::ModelError,
    modules::{FrozenBytes, frozen_tensors, head_tensor, modules},
    pass::streamed_during,
};
use coxswain_nn::{
    dtypes::{ActivationsDtype, WeightsDtype},
    kernels::sizes::{Account, Sizes},
    lora::{LoraPlan, TrainedModules},
    next_token::chunk_rows,
    params::Trainables,
};
use coxswain_proto::{
    config::SettingsError,
    human,
    ids::Step,
    memory::Category,
    run_spec::{Offload, Recompute, RunSpec},
};
use coxswain_task::{
    TaskError,
    dry_run::{PassCost, Passes},
    memory::{Ask, Place, Prediction, Subject, Suggestion},
};
use serde_json::{Value, json};

use super::{
    config::SftSettings,
    data::{ChatBatch, ChatOutline},
    model::{ChatModel, ChatStepError, HEAD_STAGE, LoadError},
};
use crate::vla_flow::memory::{Frozen, adapters, in_full, of_process};

/// A run that cannot be predicted because something it names cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum SizesError {
    /// The checkpoint, or adapter settings that do not fit it.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// The chats.
    #[error(transparent)]
    Data(#[from] DataError),
    /// The run's settings are none of this task's.
    #[error(transparent)]
    Task(#[from] SettingsError),
    /// A model that cannot be built.
    #[error(transparent)]
    Load(#[from] LoadError),
    /// A pass that cannot be run.
    #[error(transparent)]
    Step(#[from] ChatStepError),
}

/// Sizes of a run.
#[derive(Clone, Debug)]
pub struct ChatSizes {
    spec: RunSpec,
    settings: SftSettings,
    config: QwenConfig,
    outline: ChatOutline,
    frozen: Frozen,
    /// Elements that are frozen, of adapters, and that train in full.
    elements: [u64; 3],
    /// By the keys that change what a pass holds.
    passes: Passes<String>,
}

impl ChatSizes {
    /// Reads configuration and headers of everything the run names, and its chats.
    pub fn read(spec: &RunSpec) -> Result<Self, SizesError> {
        let settings = SftSettings::of(spec)?;
        let dir = Path::new(&settings.model.path);
        let config = QwenConfig::read(dir)?;
        let (frozen, elements) = of_weights(&settings, &config)?;
        let outline = ChatOutline::read(spec)?;
        let (spec, passes) = (spec.clone(), Passes::default());
        let sizes = Self { spec, settings, config, outline, frozen, elements, passes };
        sizes.pass(1)?;
        Ok(sizes)
    }

    fn with(&self, change: &dyn Fn(&mut RunSpec)) -> Result<Self, SizesError> {
        let mut sizes = self.clone();
        change(&mut sizes.spec);
        sizes.settings = SftSettings::of(&sizes.spec)?;
        (sizes.frozen, sizes.elements) = of_weights(&sizes.settings, &sizes.config)?;
        Ok(sizes)
    }

    /// Elements that train.
    fn trained(&self) -> u64 {
        self.elements[1] + self.elements[2]
    }

    /// What of repeated blocks is in memory only while they run; none if they are held.
    fn streamed(&self, place: Place) -> Option<&FrozenBytes> {
        (self.spec.memory.offload == Offload::Layers).then(|| self.held(place))
    }

    fn held(&self, place: Place) -> &FrozenBytes {
        self.frozen.bytes(place, self.settings.model.weights_dtype)
    }

    /// A training pass over so many of the longest chats, its frozen weights held: what of streamed ones is
    /// in memory is counted with the weights.
    fn pass(&self, micro_batch: u64) -> Result<PassCost, SizesError> {
        let kind = format!("{:?} {:?}", self.settings, self.spec.train.recompute);
        self.passes.at(&kind, micro_batch, |chats| {
            let account = Account::open();
            let mut held = self.spec.clone();
            if held.memory.offload == Offload::Layers {
                held.memory.offload = Offload::None;
            }
            let (model, layout, values) = ChatModel::<Sizes>::load(&held, account.device())?;
            let trainables = Trainables::new(layout, values, account.device());
            let batch = self.longest(chats as usize);
            let cost = PassCost::of(&account, |grads, clock| {
                model.forward_backward(&trainables, &batch, grads, clock).map(|_| ())
            });
            Ok(cost?)
        })
    }

    /// So many chats as long as the longest, with as much to learn as any, at their ends.
    fn longest(&self, chats: usize) -> ChatBatch {
        let (ChatOutline { tokens, learned, grids, .. }, special) = (&self.outline, &self.config.tokens);
        let vision = &self.config.vision;
        let marks = [special.image, special.video, special.vision_start, special.vision_end];
        let word = (0..).find(|id| !marks.contains(id)).unwrap_or_default();
        let mut ids = Vec::with_capacity(*tokens);
        for &grid in grids {
            ids.push(special.vision_start);
            ids.resize(ids.len() + vision.image_tokens(grid), special.image);
            ids.push(special.vision_end);
        }
        ids.resize((*tokens).max(ids.len() + learned), word);
        let learned: Vec<bool> = (0..ids.len()).map(|at| at + learned >= ids.len()).collect();
        ChatBatch {
            step: Step(1),
            indices: (0..chats as u64).collect(),
            ends: (0..=chats).map(|chat| (chat * ids.len()) as u32).collect(),
            input_ids: ids.repeat(chats),
            learned: learned.repeat(chats),
            pixel_values: vec![0.0; chats * self.outline.patches() * vision.patch_values()],
            image_grids: grids.repeat(chats),
            images_per_chat: vec![grids.len() as u32; chats],
        }
    }

    /// Logits of a chunk on a GPU beyond those that the pass has counted, which is the host's.
    fn further_logits(&self, ask: Ask) -> u64 {
        let vocab = self.config.text.vocab_size;
        let rows = ask.micro_batch as usize * self.outline.learned;
        let [host, device] = [true, false].map(|on_host| chunk_rows(vocab, on_host).min(rows));
        if ask.place == Place::Gpu { 4 * (vocab * (device - host)) as u64 } else { 0 }
    }

    /// One sample as the data threads hand it over.
    fn sample_bytes(&self) -> u64 {
        let pixels = self.outline.patches() * self.config.vision.patch_values();
        (4 * pixels + 5 * self.outline.tokens) as u64
    }
}

/// Bytes of what is frozen, and elements that are frozen, of adapters, and that train in full.
fn of_weights(settings: &SftSettings, config: &QwenConfig) -> Result<(Frozen, [u64; 3]), ModelError> {
    let modules = modules(config);
    let lora = settings.lora.as_ref().map(|lora| LoraPlan::resolve(lora, &modules)).transpose()?;
    let full = TrainedModules::resolve(&settings.model.train, &modules, lora.as_ref())?;
    let mut tensors: Vec<_> = frozen_tensors(config).into_iter().chain(head_tensor(config)).collect();
    let trains = Trains { lora: lora.as_ref(), full: Some(&full) };
    tensors.retain(|tensor| trains.group(&tensor.name).is_none());
    let held = tensors.iter().map(|tensor| tensor.elements as u64).sum();
    let adapted = lora.map_or(0, |plan| adapters(config, &plan));
    let frozen = Frozen::read(Path::new(&settings.model.path), &tensors)?;
    Ok((frozen, [held, adapted, in_full(config, &full)]))
}

impl Subject for ChatSizes {
    fn spec(&self) -> &RunSpec {
        &self.spec
    }

    fn model(&self) -> String {
        format!("{:?} for chats", self.config)
    }

    fn predict(&self, ask: Ask) -> Prediction {
        // One chat ran when this was made; more of the same change nothing but sizes.
        let pass = self.pass(ask.micro_batch).unwrap_or_default();
        let beside = |stage: &str| {
            let blocks = self.streamed(ask.place).map_or(0, |frozen| streamed_during(stage, frozen));
            blocks + if stage == HEAD_STAGE { self.further_logits(ask) } else { 0 }
        };
        let engine = Prediction::of_engine(&self.spec, self.trained(), ask);
        let mut prediction = engine.with_pass(&pass, beside);
        let streamed = self.streamed(ask.place).map_or(0, FrozenBytes::two_blocks);
        let held = self.held(ask.place).in_memory(self.streamed(ask.place).is_some());
        prediction.set(Category::FrozenWeights, held);
        // The step holds streamed blocks when they run; two of them are booked as weights.
        let activations = prediction.forward.max(prediction.backward);
        prediction.set(Category::Activations, activations.saturating_sub(streamed));
        let batch = ask.micro_batch.min(self.spec.train.global_batch as u64) * self.sample_bytes();
        prediction.set(
            Category::Input,
            match ask.place {
                Place::Gpu => batch,
                Place::Host { .. } => (self.spec.data.prefetch.max(1) as u64 + 1) * batch,
            },
        );
        if let Place::Host { threads } = ask.place {
            let process = of_process(self.outline.tokenizer_bytes, threads, pass.scratch);
            prediction.set(Category::Framework, process);
        }
        prediction
    }

    fn beside_gpu(&self, ask: Ask) -> u64 {
        Prediction::of_engine_beside_gpu(&self.spec, self.trained(), ask)
    }

    fn suggestions(&self, ask: Ask) -> Vec<Suggestion> {
        let now = self.predict(ask).peak() as i64;
        let mut suggestions = Vec::new();
        let mut add = |what: &str, setting: &str, remark: &str, peak: Option<u64>| {
            let saves = peak.map_or(0, |peak| now - peak as i64);
            if saves > 0 {
                let (what, setting, remark) = (what.into(), setting.into(), remark.into());
                suggestions.push(Suggestion { what, setting, saves, remark });
            }
        };
        let changed =
            |change: &dyn Fn(&mut RunSpec)| self.with(change).ok().map(|sizes| sizes.predict(ask).peak());
        let with = |change: &dyn Fn(&mut SftSettings)| {
            let mut settings = self.settings.clone();
            change(&mut settings);
            changed(&|spec| spec.set_settings(&settings))
        };
        let bfloat16 = with(&|settings| settings.model.weights_dtype = WeightsDtype::Bfloat16);
        let remark = "rounds the frozen weights";
        add("frozen weights in bf16", "model.weights_dtype=bfloat16", remark, bfloat16);
        for (mode, name) in [(Recompute::Selective, "selective"), (Recompute::Full, "full")] {
            let peak = changed(&|spec| spec.train.recompute = mode);
            let remark = "runs blocks again in the backward pass";
            add("layer recompute", &format!("train.recompute={name}"), remark, peak);
        }
        if self.spec.train.recompute != Recompute::None {
            let rounded = with(&|settings| settings.model.activations_dtype = ActivationsDtype::Bfloat16);
            let remark = "rounds what blocks hand on and recompute keeps";
            add("activations kept in bf16", "model.activations_dtype=bfloat16", remark, rounded);
        }
        if ask.micro_batch > 1 {
            let half = ask.micro_batch / 2;
            let peak = self.predict(Ask { micro_batch: half, ..ask }).peak();
            let remark = "same global batch, accumulation doubles";
            add("half the micro-batch", &format!("train.micro_batch={half}"), remark, Some(peak));
        }
        suggestions
    }

    fn describe(&self) -> Vec<(&'static str, String)> {
        let (frozen, trained) = (self.elements[0], self.trained());
        let share = 100.0 * trained as f64 / (frozen + trained).max(1) as f64;
        let dtype = match self.settings.model.weights_dtype {
            WeightsDtype::Float32 => "float32",
            WeightsDtype::Bfloat16 => "bfloat16",
        };
        let ChatOutline { tokens, learned, estimated, .. } = self.outline;
        let patches = self.outline.patches();
        let estimated = if estimated { " (estimated)" } else { "" };
        let model = format!(
            "{} parameters frozen in {dtype}, {} trained in float32 ({share:.2} %)",
            human::grouped(frozen),
            human::grouped(trained)
        );
        let sample =
            format!("{tokens} tokens{estimated}, {learned} learned, {patches} image patches (the longest)");
        vec![("model", model), ("sample", sample)]
    }

    fn precision(&self) -> Option<&'static str> {
        match (self.settings.model.activations_dtype, self.spec.train.recompute) {
            (ActivationsDtype::Float32, _) => None,
            (ActivationsDtype::Bfloat16, Recompute::None) => Some("activations rounded to bfloat16"),
            (ActivationsDtype::Bfloat16, _) => Some("activations kept in bfloat16"),
        }
    }

    fn to_json(&self) -> Value {
        let ([frozen, lora, base], outline) = (self.elements, &self.outline);
        json!({
            "parameters": {"pretrained": frozen + base, "trainable": lora + base, "lora": lora, "base": base},
            "sample": {
                "tokens": outline.tokens,
                "learned": outline.learned,
                "estimated": outline.estimated,
                "patches": outline.patches(),
            },
        })
    }

    fn changed(&self, change: &dyn Fn(&mut RunSpec)) -> Result<Box<dyn Subject>, TaskError> {
        Ok(Box::new(self.with(change).map_err(TaskError::bad_input)?))
    }
}
