//! What of the policy is frozen and what trains, and proof that what should train does.

use std::collections::BTreeMap;

use coxswain_proto::vla_flow::{LearningRates, WeightsDtype};

use super::Policy;
use crate::{
    kernels::Tape,
    kernels::flat::Flat,
    model::qwen::modules::{FrozenBytes, frozen_tensors},
    params::{FlatGrads, Group, TrainableLayout},
};

/// One row of the start-up table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModuleRow {
    /// A part of the policy: `vision`, `language`, `streamed` of either, or a group of trainables below one of them.
    pub module: String,
    /// Tensors.
    pub tensors: usize,
    /// Elements.
    pub parameters: usize,
    /// Whether it trains.
    pub trains: bool,
    /// How it is kept: `float32`, `bfloat16`, or both.
    pub dtype: &'static str,
    /// Bytes on the device, without gradients and optimizer state; of what is streamed as many as are there at once.
    pub bytes: u64,
}

/// Tensors, elements and bytes of a part.
#[derive(Clone, Copy, Debug, Default)]
struct Tally {
    tensors: usize,
    parameters: usize,
    bytes: u64,
}

impl Tally {
    fn add(&mut self, elements: usize, bytes: u64) {
        self.tensors += 1;
        self.parameters += elements;
        self.bytes += bytes;
    }

    fn row(self, module: impl Into<String>, trains: bool, dtype: &'static str) -> ModuleRow {
        let Self { tensors, parameters, bytes } = self;
        ModuleRow { module: module.into(), tensors, parameters, trains, dtype, bytes }
    }
}

impl<B: Tape<Base = B>> Policy<B> {
    /// Rows of the start-up table: frozen parts first, then what trains.
    pub fn trainable_report(&self, layout: &TrainableLayout, frozen: WeightsDtype) -> Vec<ModuleRow> {
        let name = match frozen {
            WeightsDtype::Float32 => "float32",
            WeightsDtype::Bfloat16 => "bfloat16",
        };
        let [vision, language, streamed] = self.frozen_tallies(frozen);
        let mut rows = vec![vision.row("vision", false, name), language.row("language", false, name)];
        if streamed.tensors > 0 {
            rows.push(streamed.row("streamed", false, name));
        }
        let mut groups: BTreeMap<(Group, &str), Tally> = BTreeMap::new();
        for param in layout.params() {
            groups
                .entry((param.group, part(&param.name)))
                .or_default()
                .add(param.len(), 4 * param.len() as u64);
        }
        rows.extend(groups.into_iter().map(|((group, part), tally)| {
            let module = if part.is_empty() { group.to_string() } else { format!("{part}.{group}") };
            tally.row(module, true, "float32")
        }));
        rows
    }

    /// Frozen weights of the vision tower, of the language model, and of blocks of either that are streamed, from the model's sizes. An LM
    /// head is not held, unless it is the embedding table.
    fn frozen_tallies(&self, dtype: WeightsDtype) -> [Tally; 3] {
        let tensors = frozen_tensors(&self.model.config);
        let mut tallies = [Tally::default(); 3];
        for tensor in &tensors {
            let [vision, language, streamed] = &mut tallies;
            let tally = match tensor.block() {
                Some(_) if self.streamed => streamed,
                _ if tensor.of_vision() => vision,
                _ => language,
            };
            tally.add(tensor.elements, tensor.kept_bytes(dtype));
        }
        let together = FrozenBytes::of(&tensors, |tensor| tensor.kept_bytes(dtype)).two_blocks();
        tallies[2].bytes = tallies[2].bytes.min(together);
        tallies
    }
}

/// The frozen part that a trainable belongs to; empty for parts of its own.
fn part(name: &str) -> &'static str {
    if name.contains(".visual.") {
        "vision"
    } else if name.contains(".language_model.") {
        "language"
    } else {
        ""
    }
}

/// Watches that every trainable gets a gradient, over the first steps of a run.
///
/// Three steps must have been taken before silence means a fault: the expert's output layer and every `lora_B` start at zero, so
/// in the first step only the output layer has a gradient, in the second everything but `lora_A`, in the third everything. Groups whose
/// learning rate is 0 are not meant to train, and are not watched; the expert's is never 0, since nothing has a gradient before its output
/// layer has moved.
#[derive(Clone, Debug)]
pub struct GradientWatch {
    /// Numbers of the parameters that had no gradient other than zero so far.
    silent: Vec<usize>,
    /// Steps that were taken.
    steps: usize,
    /// Whether gradients were seen since the last step that was taken: a step that is voted down, or broken off because a rank was
    /// lost, is tried again and counts once.
    seen: bool,
}

/// Some trainables never got a gradient.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{} of {total} trainable tensors got no gradient in the first {steps} steps, beginning with `{}`: they are not part of the loss, or their inputs are constant zero; take them out of lora.targets, or look for a feature that is always zero",
    names.len(),
    names[0]
)]
pub struct SilentTrainables {
    /// Their names.
    pub names: Vec<String>,
    /// All trainable tensors.
    pub total: usize,
    /// Steps watched.
    pub steps: usize,
}

impl GradientWatch {
    /// Steps that have to be taken before [`GradientWatch::verdict`] may find a fault.
    pub const STEPS: usize = 3;

    /// Nothing seen yet of what has a rate other than 0 in `peak`.
    pub fn new(layout: &TrainableLayout, peak: &LearningRates) -> Self {
        let trains = |&number: &usize| layout.params()[number].group.rate(peak) > 0.0;
        Self { silent: (0..layout.params().len()).filter(trains).collect(), steps: 0, seen: false }
    }

    /// Takes note of the gradients of one try of a step, before they are reduced over ranks or cleared. A step in which this rank had no
    /// samples is passed over.
    pub fn observe<F: Flat>(&mut self, layout: &TrainableLayout, grads: &FlatGrads<F>) {
        if !layout.params().iter().any(|param| grads.touched(param)) {
            return;
        }
        self.seen = true;
        self.silent.retain(|&number| {
            let param = &layout.params()[number];
            !grads.touched(param) || grads.values().read(param.range()).iter().all(|&g| g == 0.0)
        });
    }

    /// True once nothing is left to watch for.
    pub fn all_heard(&self) -> bool {
        self.silent.is_empty()
    }

    /// A step was taken: an error if some trainable has had no gradient and enough steps were taken.
    pub fn verdict(&mut self, layout: &TrainableLayout) -> Result<(), SilentTrainables> {
        self.steps += usize::from(std::mem::take(&mut self.seen));
        if self.all_heard() || self.steps < Self::STEPS {
            return Ok(());
        }
        let names = self.silent.iter().map(|&number| layout.params()[number].name.clone()).collect();
        Err(SilentTrainables { names, total: layout.params().len(), steps: self.steps })
    }
}
