//! What a rank of a run will hold: from configuration, headers and the file of pairs. No weight is read.
//!
//! What a step holds and computes is counted by running it on the backend that knows sizes alone.

use std::path::Path;

use coxswain_data::DataError;
use coxswain_models::{
    qwen2_5_vl::{Trains, error::ModelError},
    t5::{
        T5Config,
        config::SpecialIds,
        modules::{modules, tensors},
    },
};
use coxswain_nn::{
    dtypes::{ActivationsDtype, WeightsDtype},
    kernels::sizes::{Account, Sizes},
    lora::{LoraPlan, ModuleKind, TrainedModules},
    next_token::chunk_rows,
    params::Trainables,
};
use coxswain_proto::{
    config::SettingsError,
    human,
    ids::Step,
    memory::Category,
    run_spec::{Recompute, RunSpec},
};
use coxswain_task::{
    TaskError,
    dry_run::{PassCost, Passes},
    memory::{Ask, Place, Prediction, Subject, Suggestion},
};
use serde_json::{Value, json};

use super::{
    config::Seq2SeqSettings,
    data::{PairBatch, PairOutline, PairSample},
    model::{HEAD_STAGE, NonFiniteLoss, PairLoadError, PairModel},
};
use crate::vla_flow::memory::{Frozen, of_process};

/// A run that cannot be predicted because something it names cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum PairSizesError {
    /// The checkpoint, or adapter settings that do not fit it.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// The pairs.
    #[error(transparent)]
    Data(#[from] DataError),
    /// The run's settings are none of this task's.
    #[error(transparent)]
    Task(#[from] SettingsError),
    /// A model that cannot be built.
    #[error(transparent)]
    Load(#[from] PairLoadError),
    /// A pass that cannot be run.
    #[error(transparent)]
    Step(#[from] NonFiniteLoss),
}

/// Elements of a run's model.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct PairElements {
    frozen: u64,
    lora: u64,
    base: u64,
}

/// Sizes of a run.
#[derive(Clone, Debug)]
pub struct PairSizes {
    spec: RunSpec,
    settings: Seq2SeqSettings,
    config: T5Config,
    outline: PairOutline,
    frozen: Frozen,
    elements: PairElements,
    /// By the keys that change what a pass holds.
    passes: Passes<String>,
}

impl PairSizes {
    /// Reads configuration and headers of everything the run names, and its pairs.
    pub fn read(spec: &RunSpec) -> Result<Self, PairSizesError> {
        let settings = Seq2SeqSettings::of(spec)?;
        let config = T5Config::read(Path::new(&settings.model.path))?;
        let (frozen, elements) = of_weights(&settings, &config)?;
        let outline = PairOutline::read(spec)?;
        let (spec, passes) = (spec.clone(), Passes::default());
        let sizes = Self { spec, settings, config, outline, frozen, elements, passes };
        sizes.pass(1)?;
        Ok(sizes)
    }

    fn with(&self, change: &dyn Fn(&mut RunSpec)) -> Result<Self, PairSizesError> {
        let mut sizes = self.clone();
        change(&mut sizes.spec);
        sizes.settings = Seq2SeqSettings::of(&sizes.spec)?;
        (sizes.frozen, sizes.elements) = of_weights(&sizes.settings, &sizes.config)?;
        if sizes.settings.data != self.settings.data {
            sizes.outline = PairOutline::read(&sizes.spec)?;
        }
        Ok(sizes)
    }

    /// Elements that train.
    fn trained(&self) -> u64 {
        self.elements.lora + self.elements.base
    }

    /// A training pass over so many of the longest pairs.
    fn pass(&self, micro_batch: u64) -> Result<PassCost, PairSizesError> {
        let kind = format!("{:?} {:?} {:?}", self.settings, self.spec.train.recompute, self.outline);
        self.passes.at(&kind, micro_batch, |pairs| {
            let account = Account::open();
            let (model, layout, values) = PairModel::<Sizes>::load(&self.spec, account.device())?;
            let trainables = Trainables::new(layout, values, account.device());
            let batch = self.longest(pairs as usize);
            let cost = PassCost::of(&account, |grads, clock| {
                model.forward_backward(&trainables, &batch, grads, clock).map(|_| ())
            });
            Ok(cost?)
        })
    }

    /// So many pairs with the longest source and the longest target; of several the last is a token shorter,
    /// because pairs of different lengths need a mask.
    fn longest(&self, pairs: usize) -> PairBatch {
        let SpecialIds { pad, eos, decoder_start } = self.config.special;
        let ids = |len: usize| vec![eos; len];
        let mut samples: Vec<_> = (0..pairs as u64)
            .map(|index| PairSample {
                index,
                source: ids(self.outline.source),
                target: ids(self.outline.target),
            })
            .collect();
        if let [_, .., last] = &mut samples[..] {
            last.source.truncate(self.outline.source.saturating_sub(1).max(1));
        }
        PairBatch::of(Step(1), &samples.iter().collect::<Vec<_>>(), [pad, decoder_start])
    }

    /// Logits of a chunk on a GPU beyond those that the pass has counted, which is the host's.
    fn further_logits(&self, ask: Ask) -> u64 {
        let vocab = self.config.vocab_size;
        let rows = ask.micro_batch as usize * self.outline.target;
        let [host, device] = [true, false].map(|on_host| chunk_rows(vocab, on_host).min(rows));
        if ask.place == Place::Gpu { 4 * (vocab * (device - host)) as u64 } else { 0 }
    }

    /// One sample as the data threads hand it over.
    fn sample_bytes(&self) -> u64 {
        (5 * self.outline.source + 12 * self.outline.target) as u64
    }
}

/// Bytes of what is frozen, and how many elements there are of what.
fn of_weights(settings: &Seq2SeqSettings, config: &T5Config) -> Result<(Frozen, PairElements), ModelError> {
    let modules = modules(config);
    let lora = settings.lora.as_ref().map(|lora| LoraPlan::resolve(lora, &modules)).transpose()?;
    let full = TrainedModules::resolve(&settings.model.train, &modules, lora.as_ref())?;
    let trains = Trains { lora: lora.as_ref(), full: Some(&full) };
    let (trained, frozen): (Vec<_>, Vec<_>) =
        tensors(config).into_iter().partition(|tensor| trains.group(&tensor.name).is_some());
    let adapted = modules.iter().filter_map(|module| match module.kind {
        ModuleKind::Linear { inputs, outputs, .. } => lora
            .as_ref()?
            .adapter(&module.name)
            .map(|adapter| adapter.rank * (inputs + outputs) + if adapter.dora { outputs } else { 0 }),
        _ => None,
    });
    let elements = PairElements {
        frozen: frozen.iter().map(|tensor| tensor.elements as u64).sum(),
        lora: adapted.sum::<usize>() as u64,
        base: trained.iter().map(|tensor| tensor.elements as u64).sum(),
    };
    Ok((Frozen::read(Path::new(&settings.model.path), &frozen)?, elements))
}

impl Subject for PairSizes {
    fn spec(&self) -> &RunSpec {
        &self.spec
    }

    fn model(&self) -> String {
        format!("{:?} for pairs", self.config)
    }

    fn predict(&self, ask: Ask) -> Prediction {
        // One pair ran when this was made; more of the same change nothing but sizes.
        let pass = self.pass(ask.micro_batch).unwrap_or_default();
        let beside = |stage: &str| if stage == HEAD_STAGE { self.further_logits(ask) } else { 0 };
        let engine = Prediction::of_engine(&self.spec, self.trained(), ask);
        let mut prediction = engine.with_pass(&pass, beside);
        let held = self.frozen.bytes(ask.place, self.settings.model.weights_dtype).in_memory(false);
        prediction.set(Category::FrozenWeights, held);
        prediction.set(Category::Activations, prediction.forward.max(prediction.backward));
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
        let with = |change: &dyn Fn(&mut Seq2SeqSettings)| {
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
        let half = (self.outline.source / 2).max(2);
        let shorter = with(&|settings| settings.data.max_source_tokens = half);
        let remark = "sources lose their end";
        add("half the source", &format!("data.max_source_tokens={half}"), remark, shorter);
        if ask.micro_batch > 1 {
            let half = ask.micro_batch / 2;
            let peak = self.predict(Ask { micro_batch: half, ..ask }).peak();
            let remark = "same global batch, accumulation doubles";
            add("half the micro-batch", &format!("train.micro_batch={half}"), remark, Some(peak));
        }
        suggestions
    }

    fn describe(&self) -> Vec<(&'static str, String)> {
        let (frozen, trained) = (self.elements.frozen, self.trained());
        let share = 100.0 * trained as f64 / (frozen + trained).max(1) as f64;
        let dtype = match self.settings.model.weights_dtype {
            WeightsDtype::Float32 => "float32",
            WeightsDtype::Bfloat16 => "bfloat16",
        };
        let PairOutline { source, target, estimated, .. } = self.outline;
        let estimated = if estimated { " (estimated)" } else { "" };
        let model = format!(
            "{} parameters frozen in {dtype}, {} trained in float32 ({share:.2} %)",
            human::grouped(frozen),
            human::grouped(trained)
        );
        let sample = format!("{source} tokens become {target}{estimated} (the longest)");
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
        let (PairElements { frozen, lora, base }, outline) = (self.elements, &self.outline);
        json!({
            "parameters": {"pretrained": frozen + base, "trainable": lora + base, "lora": lora, "base": base},
            "sample": {"source": outline.source, "target": outline.target, "estimated": outline.estimated},
        })
    }

    fn changed(&self, change: &dyn Fn(&mut RunSpec)) -> Result<Box<dyn Subject>, TaskError> {
        Ok(Box::new(self.with(change).map_err(TaskError::bad_input)?))
    }
}
