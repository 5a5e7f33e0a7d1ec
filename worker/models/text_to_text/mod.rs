//! The seam between tasks and models that read a text with an encoder and write another with a decoder: what
//! a family offers, and what a task asks of a model that was loaded.

use std::path::{Path, PathBuf};

use coxswain_data::DataError;
use coxswain_nn::{
    dtypes::FrozenDtype,
    kernels::Tape,
    lora::Module,
    next_token::TokenTargets,
    params::{GradientSums, TrainableLayout, Trainables},
    recompute::Retention,
};

use crate::pretrained::{
    error::ModelError,
    family::ModelTypes,
    frozen::FrozenTensor,
    job::{ForwardJob, Lap},
    prompts::DropoutKeys,
    rules::Rules,
    trains::Trains,
};

/// A family of models, as far as no device is needed. Directories are Hugging Face's.
pub trait TextFamily: ModelTypes {
    /// What `config.json` of a model says, and its weights' headers where there are any.
    fn outline(&self, dir: &Path) -> Result<TextModelOutline, ModelError>;

    /// The file of a model directory that its tokenizer is in; none if it has none.
    fn tokenizer_file(&self, dir: &Path) -> Option<PathBuf>;

    /// What makes token ids of text.
    fn tokenizer(&self, dir: &Path) -> Result<Box<dyn TextTokenizer>, DataError>;
}

/// A family on one kind of device.
pub trait TextFamilyOn<B: Tape<Base = B>>: TextFamily {
    /// Reads a model, matrices kept as `dtype`. What trains is registered in `layout`, in the order of its
    /// modules.
    fn load(
        &self,
        dir: &Path,
        dtype: FrozenDtype,
        trains: Trains<'_>,
        layout: &mut TrainableLayout,
        device: &B::Device,
    ) -> Result<Box<dyn TextToText<B>>, ModelError>;

    /// One forward pass from file to file, for comparison with other implementations.
    fn forward(&self, job: &ForwardJob<'_>, device: &B::Device) -> Result<(), ModelError>;
}

/// A model as its configuration has it.
#[derive(Clone, Debug)]
pub struct TextModelOutline {
    /// What names mean in its family.
    pub rules: Rules,
    /// All named modules, in the order in which Transformers has them.
    pub modules: Vec<Module>,
    /// All tensors that training loads, in the order of modules, as if none trained.
    pub tensors: Vec<FrozenTensor>,
    /// The tensor that is the head's weight as well, if there is such a one.
    pub tied: Option<String>,
    /// Rows of the table of token embeddings.
    pub vocab_size: usize,
    /// Tokens that are no text.
    pub special: SpecialIds,
    /// Every size that values depend on, as text.
    pub sizes: String,
}

/// Tokens that are no text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SpecialIds {
    /// Fills up shorter rows.
    pub pad: u32,
    /// Ends a text.
    pub eos: u32,
    /// What the decoder begins with.
    pub decoder_start: u32,
}

/// A checkpoint's tokenizer. Errors say what is wrong with the text.
pub trait TextTokenizer: Send + Sync {
    /// The file that it is in.
    fn path(&self) -> &Path;

    /// Ids of a text with the end after them, at most `most` of them.
    fn ids(&self, text: &str, most: usize) -> Result<Vec<u32>, String>;

    /// The text of ids, without special tokens.
    fn text(&self, ids: &[u32]) -> Result<String, String>;
}

/// Texts of a micro-batch, padded on the right.
#[derive(Clone, Copy, Debug)]
pub struct Texts<'a> {
    /// Rows.
    pub batch: usize,
    /// Sources, `[b, s]`.
    pub source: &'a [u32],
    /// Whether a token of a source is seen, `[b, s]`: padding is not.
    pub seen: &'a [bool],
    /// What the decoder reads, `[b, t]`.
    pub target: &'a [u32],
}

/// A micro-batch, and how it is run.
#[derive(Clone, Copy)]
pub struct TextPass<'a, B: Tape<Base = B>> {
    /// What the model reads.
    pub texts: Texts<'a>,
    /// What it is to write.
    pub targets: &'a TokenTargets,
    /// Values of what trains.
    pub trainables: &'a Trainables<B>,
    /// What the forward pass keeps.
    pub retention: Retention,
    /// Whose rows they are, in a training pass whose adapters drop some of what they read.
    pub dropout: Option<DropoutKeys<'a>>,
}

/// Loss and greatest logit of each token that is predicted, as the head gives them.
pub type TokenRows = Vec<[f32; 2]>;
/// Chooses a row's next token from its logits, `[vocab]`: the row, how many tokens it has, and those. None if
/// there is nothing to choose from.
pub type Choice<'c> = &'c mut dyn FnMut(usize, usize, &[f32]) -> Option<u32>;

/// A row for which no token could be chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the logits of an answer are not finite: the weights are unusable")]
pub struct NoToken {
    /// Which.
    pub row: usize,
}

/// The token with the largest logit; of equal ones the first. None if none is finite, or one is not a number.
pub fn likeliest(logits: &[f32]) -> Option<u32> {
    let mut largest = None;
    for (id, &logit) in (0..).zip(logits) {
        if logit.is_nan() {
            return None;
        }
        if largest.is_none_or(|(_, most)| logit > most) {
            largest = Some((id, logit));
        }
    }
    largest.filter(|(_, logit)| logit.is_finite()).map(|(id, _)| id)
}

/// A model whose weights are frozen, but for what trains.
pub trait TextToText<B: Tape<Base = B>> {
    /// What its configuration says.
    fn outline(&self) -> &TextModelOutline;

    /// A micro-batch, ready to train on.
    fn run<'a>(&'a self, pass: TextPass<'a, B>) -> Box<dyn TextRun<B> + 'a>;

    /// Losses of a micro-batch, without a trace.
    fn losses(&self, pass: TextPass<'_, B>) -> TokenRows;

    /// Answers to the sources, each up to its end, which it includes, or to `most` tokens.
    fn write(
        &self,
        trainables: &Trainables<B>,
        texts: &Texts<'_>,
        most: usize,
        choose: Choice<'_>,
    ) -> Result<Vec<Vec<u32>>, NoToken>;
}

/// One micro-batch through a model.
pub trait TextRun<B: Tape<Base = B>> {
    /// Runs it; the head's gradient, if it trains, is added to `grads`. `head` names the stage of the head.
    fn forward(
        &self,
        grads: &mut dyn GradientSums<B>,
        lap: Lap<'_>,
        head: &'static str,
    ) -> (TokenRows, Box<dyn TextTrace<B> + '_>);
}

/// What a forward pass has kept.
pub trait TextTrace<B: Tape<Base = B>> {
    /// Carries the gradient of the losses' sum back; gradients of what trains are added to `grads`.
    fn backward(self: Box<Self>, grads: &mut dyn GradientSums<B>, lap: Lap<'_>);
}
