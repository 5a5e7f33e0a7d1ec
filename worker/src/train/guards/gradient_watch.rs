//! Proof that what should train does.

use coxswain_nn::{
    kernels::flat::Flat,
    params::{FlatGrads, TrainableLayout},
};

use crate::zero::Rates;

/// Watches that every trainable gets a gradient, over the first steps of a run.
///
/// Three steps must have been taken before silence means a fault: an output layer and every `lora_B` may
/// start at zero, so in the first step only the output layer has a gradient, in the second everything but
/// `lora_A`, in the third everything. Groups whose learning rate is 0 are not meant to train, and are not
/// watched; a task whose other groups learn through one alone refuses a rate of 0 for that one.
///
/// What some trainables' silence means is for people to judge: a few samples may have what these learn from,
/// such as chats with images, and none of them may have come yet. Silence of all means that nothing learns.
#[derive(Clone, Debug)]
pub struct GradientWatch {
    /// Numbers of the parameters that had no gradient other than zero so far.
    silent: Vec<usize>,
    /// Parameters that are watched.
    all: usize,
    /// Steps that were taken.
    steps: usize,
    /// Whether gradients were seen since the last step that was taken: a step that is voted down, or broken
    /// off because a rank was lost, is tried again and counts once.
    seen: bool,
}

/// Some trainables never got a gradient.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{} of {all} trainable tensors got no gradient in the first {steps} steps of this rank (the first: \
     `{}`): the samples do not use them, or they are not part of the loss, or their inputs are \
     zero; if they are never to train, remove them from lora.targets or model.train",
    names.len(),
    names[0]
)]
pub struct SilentTrainables {
    /// Names.
    pub names: Vec<String>,
    /// Tensors that are to learn.
    pub all: usize,
    /// Steps watched.
    pub steps: usize,
}

impl SilentTrainables {
    /// Whether nothing learns.
    pub fn is_all(&self) -> bool {
        self.names.len() == self.all
    }
}

impl GradientWatch {
    /// Steps that have to be taken before [`GradientWatch::verdict`] may find a fault.
    pub const STEPS: usize = 3;

    /// Nothing seen yet of what has a rate other than 0 in `peak`.
    pub fn new(layout: &TrainableLayout, peak: &Rates) -> Self {
        let trains = |&number: &usize| peak.of(layout.params()[number].group) > 0.0;
        let silent: Vec<_> = (0..layout.params().len()).filter(trains).collect();
        Self { all: silent.len(), silent, steps: 0, seen: false }
    }

    /// Takes note of the gradients of one try of a step, before they are reduced over ranks or cleared. A
    /// step in which this rank had no samples is passed over.
    pub fn observe<F: Flat>(&mut self, layout: &TrainableLayout, grads: &FlatGrads<F>) {
        if !layout.params().iter().any(|param| grads.touched(param)) {
            return;
        }
        self.seen = true;
        self.silent.retain(|&number| {
            let param = &layout.params()[number];
            !grads.touched(param)
                || grads.values().read(param.range()).iter().all(|&g| g == 0.0 || !g.is_finite())
        });
    }

    /// True once nothing is left to watch for.
    pub fn is_over(&self) -> bool {
        self.silent.is_empty()
    }

    /// A step was taken: once enough were taken, an error names those that have had no gradient. Nothing is
    /// watched after that.
    pub fn verdict(&mut self, layout: &TrainableLayout) -> Result<(), SilentTrainables> {
        self.steps += usize::from(std::mem::take(&mut self.seen));
        if self.is_over() || self.steps < Self::STEPS {
            return Ok(());
        }
        let silent = std::mem::take(&mut self.silent).into_iter();
        let names = silent.map(|number| layout.params()[number].name.clone()).collect();
        Err(SilentTrainables { names, all: self.all, steps: self.steps })
    }
}
