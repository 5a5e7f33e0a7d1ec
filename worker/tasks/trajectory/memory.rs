//! What a rank of a run will hold: from configuration, headers and names of files. No weight and no image is
//! read.
//!
//! What a step holds and computes is counted by running it on the backend that knows sizes alone. Nothing of
//! it grows with the number of batches.

use std::{path::Path, sync::Arc};

use coxswain_feature_store::{SampleKey, index_bytes};
use coxswain_models::{
    Shelf,
    pretrained::{blocks::InMemory, directory, error::ModelError, frozen::FrozenBytes},
    vision_language::ModelOutline,
};
use coxswain_nn::{
    dtypes::WeightsDtype,
    kernels::sizes::{Account, Sizes},
    params::{TrainableLayout, Trainables},
};
use coxswain_proto::{
    human,
    ids::Step,
    limits::FEATURES_WAITING,
    memory::Category,
    run_spec::{CacheMode, Offload, Recompute, RunSpec},
};
use coxswain_task::{
    CachedFeatures, Pass, TaskError,
    dry_run::{PassCost, Passes},
    memory::{Ask, Place, Prediction, Subject, Suggestion},
};
use serde_json::{Value, json};

use super::{
    config::TrajectorySettings,
    data::{ImageBatch, list},
    extractor::TrajectoryShape,
    model::TrajectoryModel,
};
use crate::{
    savings::{Savings, of_settings},
    vla_flow::memory::{FrozenStorage, of_process},
};

/// Bytes of a value.
const FLOAT: u64 = 4;
/// Bytes of an image's name: its path, its digest, and its key where features are kept.
const NAME: u64 = 160;

/// What a pass does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum TrajectoryPass {
    /// Trains, beginning with pixels.
    Live,
    /// Trains, beginning with kept trajectories.
    Kept,
    /// Computes trajectories to be kept.
    Filling,
}

/// Sizes of a run.
#[derive(Clone, Debug)]
pub struct TrajectorySizes {
    spec: RunSpec,
    settings: TrajectorySettings,
    models: Shelf<Sizes>,
    model: Arc<ModelOutline>,
    shape: TrajectoryShape,
    images: u64,
    frozen: FrozenStorage,
    /// Elements that are frozen of the tower, constants of the network, and that train.
    elements: [u64; 3],
    trained: TrainableLayout,
    /// By the keys that change what a pass holds.
    passes: Passes<(String, TrajectoryPass)>,
}

impl TrajectorySizes {
    /// Reads configuration and headers of the checkpoint, and lists the images.
    pub fn from_spec(spec: &RunSpec, models: Shelf<Sizes>) -> Result<Self, TaskError> {
        let settings = TrajectorySettings::from_spec(spec).map_err(TaskError::bad_input)?;
        let listing = list(Path::new(&spec.data.path), &settings.data).map_err(TaskError::bad_input)?;
        Self::with_passes(spec, models, settings, listing.places.len() as u64, Passes::default())
    }

    fn with_passes(
        spec: &RunSpec,
        models: Shelf<Sizes>,
        settings: TrajectorySettings,
        images: u64,
        passes: Passes<(String, TrajectoryPass)>,
    ) -> Result<Self, TaskError> {
        let dir = directory::outline(&settings.extractor.path).map_err(ModelError::from);
        let dir = &dir.map_err(TaskError::bad_input)?;
        let model = models.vision_language.of(dir).and_then(|family| family.outline(dir));
        let model = Arc::new(model.map_err(TaskError::bad_input)?);
        let shape = TrajectoryShape::from_settings(&settings, &model)?;
        let tensors: Vec<_> = shape.frozen(&model).collect();
        let frozen = FrozenStorage::from_headers(dir, model.rules, &tensors).map_err(TaskError::bad_input)?;
        let held = tensors.iter().map(|tensor| tensor.elements as u64).sum();
        let mut sizes = Self {
            spec: spec.clone(),
            settings,
            models,
            model,
            shape,
            images,
            frozen,
            elements: [held, 0, 0],
            trained: TrainableLayout::default(),
            passes,
        };
        let (_, layout) = sizes.hollow(&Account::open())?;
        sizes.elements = [held, (layout.whole_len() - layout.len()) as u64, layout.len() as u64];
        sizes.trained = layout;
        sizes.pass(1, TrajectoryPass::Live)?;
        Ok(sizes)
    }

    fn hollow(&self, account: &Account) -> Result<(TrajectoryModel<Sizes>, TrainableLayout), TaskError> {
        let mut held = self.spec.clone();
        // What of streamed blocks is in memory is counted with the weights.
        if held.memory.offload == Offload::Layers {
            held.memory.offload = Offload::None;
        }
        TrajectoryModel::load(&held, self.models, account.device())
    }

    /// A pass over so many images.
    fn pass(&self, images: u64, kind: TrajectoryPass) -> Result<PassCost, TaskError> {
        let of = (format!("{:?} {:?}", self.settings, self.spec.train.recompute), kind);
        self.passes.at(&of, images, |images| {
            let account = Account::open();
            let (model, layout) = self.hollow(&account)?;
            let values = vec![0.0; layout.whole_len()];
            let trainables = Trainables::new(layout, values, account.device());
            let batch = self.batch(images as usize, kind);
            if kind == TrajectoryPass::Filling {
                let (features, cost) = PassCost::of_forward(&account, || model.features(&batch));
                return features.map(|_| cost).map_err(TaskError::from);
            }
            PassCost::of(&account, |grads, clock| {
                model.forward_backward(&trainables, &batch, grads, clock).map(drop)
            })
            .map_err(TaskError::from)
        })
    }

    fn batch(&self, images: usize, kind: TrajectoryPass) -> ImageBatch {
        let zeros = |values: u64| vec![0.0; values as usize];
        let kept = kind == TrajectoryPass::Kept;
        let image = Arc::new(if kept { Vec::new() } else { zeros(self.pixels()) });
        ImageBatch {
            step: Step(1),
            indices: (0..images as u64).collect(),
            positions: self.shape.positions,
            pixel_values: vec![image; images],
            features: kept.then(|| CachedFeatures {
                width: self.shape.dim,
                values: zeros(images as u64 * self.values()),
            }),
        }
    }

    fn patches(&self) -> u64 {
        self.shape.grid.iter().map(|&side| u64::from(side)).product()
    }

    /// Values of an image's patches.
    fn pixels(&self) -> u64 {
        self.patches() * self.model.patches.columns() as u64
    }

    /// Values of an image's trajectories.
    fn values(&self) -> u64 {
        (self.shape.positions * self.shape.width()) as u64
    }

    fn keeps(&self) -> bool {
        self.spec.cache.mode != CacheMode::Off
    }

    fn encoder_batch(&self, ask: Ask) -> u64 {
        self.spec.cache.encoder_batch.map_or(ask.micro_batch, |batch| batch as u64)
    }

    fn bytes(&self, place: Place) -> &FrozenBytes {
        self.frozen.bytes(place, self.settings.extractor.weights_dtype)
    }

    /// What is held for kept features: names, the index of the store, features that wait to be written and
    /// those that are.
    fn cache_bytes(&self, ask: Ask) -> u64 {
        if !self.keeps() {
            return 0;
        }
        let names = (size_of::<Option<SampleKey>>() + size_of::<SampleKey>()) as u64 * self.images;
        let waiting = (FEATURES_WAITING as u64 + 1) * self.encoder_batch(ask) * FLOAT * self.values();
        names + index_bytes(self.images) + waiting
    }

    /// Micro-batches as the data threads hand them over: the one that runs, and those read ahead, ready or
    /// being read (a sample is not copied into its micro-batch). What runs has kept trajectories instead of
    /// pixels, where they are kept; the first epoch reads pixels ahead anyway.
    fn input_bytes(&self, ask: Ask) -> u64 {
        let batch = FLOAT * ask.micro_batch.min(self.spec.train.global_batch as u64);
        let running = batch * if self.keeps() { self.values() } else { self.pixels() };
        let ahead = batch * self.pixels().max(if self.keeps() { self.values() } else { 0 });
        match ask.place {
            // Counted with the activations.
            Place::Gpu => 0,
            Place::Host { .. } => {
                running + self.spec.data.prefetch.max(1) as u64 * ahead + NAME * self.images
            }
        }
    }

    fn with(&self, change: &dyn Fn(&mut RunSpec)) -> Result<Self, TaskError> {
        let mut spec = self.spec.clone();
        change(&mut spec);
        let settings = TrajectorySettings::from_spec(&spec).map_err(TaskError::bad_input)?;
        Self::with_passes(&spec, self.models, settings, self.images, self.passes.clone())
    }
}

impl Subject for TrajectorySizes {
    fn spec(&self) -> &RunSpec {
        &self.spec
    }

    fn layout(&self) -> &TrainableLayout {
        &self.trained
    }

    fn model(&self) -> String {
        format!("{:?} of {:?}, {}", self.settings.network, self.shape, self.model.vision.sizes)
    }

    fn predict(&self, ask: Ask) -> Prediction {
        // One image ran when this was made; more of the same change nothing but sizes.
        let pass = |images, kind| self.pass(images, kind).unwrap_or_default();
        let live =
            pass(ask.micro_batch, if self.keeps() { TrajectoryPass::Kept } else { TrajectoryPass::Live });
        let blocks = InMemory::from_spec(&self.spec, ask.cut());
        let engine = Prediction::of_engine(&self.spec, &self.trained, ask);
        let mut prediction = engine.with_pass(&live, |_| 0);
        let mut scratch = live.scratch;
        if self.keeps() {
            let batch = self.encoder_batch(ask);
            let filling = pass(batch, TrajectoryPass::Filling);
            // At the end they are on the device and in host memory; until then there are pixels.
            let held = filling.peak(Pass::Forward, |_| 0).max(2 * FLOAT * batch * self.values());
            let pixels = if ask.place == Place::Gpu { 0 } else { FLOAT * batch * self.pixels() };
            prediction.forward = prediction.forward.max(held + pixels);
            scratch = scratch.max(filling.scratch);
        }
        // Beside the tower: the network where it stays, and the weights of positions' means.
        let constants = FLOAT * (self.elements[1] + self.shape.positions as u64 * self.patches());
        prediction.set(Category::FrozenWeights, self.bytes(ask.place).in_memory(blocks) + constants);
        prediction.set(Category::Activations, prediction.forward.max(prediction.backward));
        prediction.set(Category::Input, self.input_bytes(ask));
        if let Place::Host { threads } = ask.place {
            prediction.set(Category::Cache, self.cache_bytes(ask));
            prediction.set(Category::Framework, of_process(0, threads, scratch));
        }
        prediction
    }

    fn beside_gpu(&self, ask: Ask) -> u64 {
        self.cache_bytes(ask) + Prediction::of_engine_beside_gpu(&self.spec, &self.trained, ask)
    }

    fn suggestions(&self, ask: Ask) -> Vec<Suggestion> {
        let mut savings = Savings::new(self, ask);
        let narrow = of_settings(&self.settings, |settings| {
            settings.extractor.weights_dtype = WeightsDtype::Bfloat16;
        });
        let setting = "extractor.weights_dtype=bfloat16".into();
        savings.add("frozen weights in bf16", setting, "rounds the extractor's weights", narrow);
        let remark = "recomputes the network in the backward pass";
        let full = |spec: &mut RunSpec| spec.train.recompute = Recompute::Full;
        savings.add("recompute", "train.recompute=full".into(), remark, full);
        let remark = "losses stay the same, and the extractor runs once for each image";
        let kept = |spec: &mut RunSpec| spec.cache.mode = CacheMode::Exact;
        savings.add("features cached", "cache.mode=exact".into(), remark, kept);
        savings.add_micro_batch();
        savings.into_suggestions()
    }

    fn describe(&self) -> Vec<(&'static str, String)> {
        let [frozen, constants, trained] = self.elements.map(human::grouped);
        let network = match self.elements[1] {
            0 => format!("{trained} trained in float32"),
            _ => format!("{trained} trained in float32, {constants} constant"),
        };
        let TrajectoryShape { positions, layers, dim, .. } = &self.shape;
        let sample = format!(
            "{positions} positions x {} layers x {dim} values, {} per image; {} images",
            layers.len(),
            human::bytes(FLOAT * self.values()),
            human::grouped(self.images)
        );
        vec![("model", format!("{frozen} parameters frozen in the extractor, {network}")), ("sample", sample)]
    }

    fn epoch_len(&self) -> Option<u64> {
        Some(crate::holdout::trained(self.images, self.settings.data.holdout_every))
    }

    fn to_json(&self) -> Value {
        let ([extractor, constant, trainable], shape) = (self.elements, &self.shape);
        json!({
            "parameters": {"extractor": extractor, "constant": constant, "trainable": trainable},
            "sample": {"positions": shape.positions, "layers": shape.layers, "dim": shape.dim},
            "images": self.images,
        })
    }

    fn changed(&self, change: &dyn Fn(&mut RunSpec)) -> Result<Box<dyn Subject>, TaskError> {
        Ok(Box::new(self.with(change)?))
    }
}
