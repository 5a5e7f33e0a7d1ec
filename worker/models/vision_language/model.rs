//! A model on a device, a micro-batch through it, and back.

use std::sync::Arc;

use burn::tensor::Tensor;
use coxswain_nn::{
    dtypes::{FrozenDtype, WeightsDtype},
    kernels::{DropoutRows, Tape},
    lora::LoraLinear,
    params::{GradientSums, Trainables},
    recompute::Retention,
    sharded::{Cut, Peers},
};

use super::{outline::ModelOutline, tap::Tap};
use crate::pretrained::{
    blocks::{BlockWeights, InMemory, TablePlace},
    error::{TokenError, UnreadableWeights},
    frozen::{FrozenBytes, TowerKind},
    job::Lap,
    pictures::ImageShape,
    prompts::{DropoutKeys, Prompts},
    stack::SharedBlocks,
};

/// Vision tower and what joins it to the language model, as their time is shown.
pub const VISION: &str = "vision";
/// Embedding, decoder layers and final norm, as their time is shown.
pub const LANGUAGE: &str = "language";

/// What of streamed blocks is in memory during a stage: the two largest neighbours of the tower that runs.
pub fn streamed_during(stage: &str, frozen: &FrozenBytes) -> u64 {
    match stage {
        VISION => frozen.two_blocks_of(TowerKind::Vision),
        LANGUAGE => frozen.two_blocks_of(TowerKind::Text),
        _ => 0,
    }
}

/// What to load, and how.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LoadOptions {
    /// How matrices are kept in memory.
    pub dtype: FrozenDtype,
    /// Whether logits will be asked for. An untied head is otherwise not read: it is as large as the
    /// embedding table.
    pub head: bool,
    /// Where the weights of repeated blocks are.
    pub blocks: BlockWeights,
    /// Where the table of token embeddings is.
    pub table: TablePlace,
}

impl From<FrozenDtype> for LoadOptions {
    /// Without the head, which the action loss does not need; everything held where the model is.
    fn from(dtype: FrozenDtype) -> Self {
        Self { dtype, head: false, blocks: BlockWeights::Held, table: TablePlace::Device }
    }
}

impl From<WeightsDtype> for LoadOptions {
    fn from(dtype: WeightsDtype) -> Self {
        FrozenDtype::from(dtype).into()
    }
}

/// Why a pass through the model ends early.
#[derive(Debug, thiserror::Error)]
pub enum PassError {
    /// Tokens or images do not fit.
    #[error(transparent)]
    Tokens(#[from] TokenError),
    /// A block's weights cannot be read.
    #[error(transparent)]
    Weights(#[from] UnreadableWeights),
}

/// A vision-language model whose weights are frozen, but for what trains.
pub trait VisionLanguage<B: Tape<Base = B>> {
    /// What its configuration says.
    fn outline(&self) -> &ModelOutline;

    /// What of the repeated blocks is in memory.
    fn in_memory(&self) -> InMemory;

    /// Most bytes of streamed blocks that were in memory at once so far.
    fn most_streamed(&self) -> u64;

    /// Where the table of token embeddings is.
    fn table_place(&self) -> TablePlace;

    /// The blocks of all towers, if ranks share them out.
    fn shared_blocks(&self) -> Option<SharedBlocks>;

    /// Holds the parts of `cut` from now on, and asks `peers` for the others; nothing happens if blocks are
    /// not shared out.
    fn share_out(&self, cut: Cut, peers: &Arc<dyn Peers>) -> Result<(), UnreadableWeights> {
        self.shared_blocks().map_or(Ok(()), |blocks| blocks.share_out(cut, peers))
    }

    /// The LM head; none if the model was loaded without it.
    fn head(&self) -> Option<&LoraLinear<B>>;

    /// A micro-batch, ready to run: positions, masks and tables of what is left to run of it are made.
    fn run<'a>(&'a self, pass: VlPass<'a, B>) -> Result<Box<dyn VlRun<B> + 'a>, TokenError>;

    /// Runs prompts, padded so that each row ends at the last column, to be continued token by token. Gives
    /// the logits of each row's next token, `[b, vocab]`. The model must have been loaded with its head.
    fn decode<'a>(
        &'a self,
        trainables: &'a Trainables<B>,
        retention: Retention,
        prompts: Prompts<'_>,
    ) -> Result<Prefill<'a, B>, PassError>;
}

/// A micro-batch, and how it is run.
#[derive(Clone, Copy)]
pub struct VlPass<'a, B: Tape<Base = B>> {
    /// What the model reads.
    pub prompts: Prompts<'a>,
    /// Features that the pass begins with; pixels if none.
    pub kept: Option<KeptInput<'a>>,
    /// Values of what trains of the model, at least.
    pub trainables: &'a Trainables<B>,
    /// What the forward pass keeps.
    pub retention: Retention,
    /// Whose rows they are, in a training pass whose adapters drop some of what they read.
    pub dropout: Option<DropoutKeys<'a>>,
}

/// Kept features of the samples of a micro-batch, one after another: of each as many rows as
/// [`ModelOutline::rows_at`] says, without padding.
#[derive(Clone, Copy, Debug)]
pub struct KeptInput<'a> {
    /// Where they were taken.
    pub tap: Tap,
    /// Values.
    pub values: &'a [f32],
}

/// One micro-batch through a model.
pub trait VlRun<B: Tape<Base = B>> {
    /// Runs it, and keeps what [`VlTrace::backward`] needs. Gives what is at each of the taps `reads`, which
    /// ascend and do not lie below what the pass begins with; nothing above the last of them runs. Hidden
    /// states are `[n, d]`, padding included.
    fn forward(&self, reads: &[Tap], lap: Lap<'_>) -> Result<Forward<'_, B>, PassError>;

    /// What is at one tap, without a trace.
    fn until(&self, tap: Tap) -> Result<Tensor<B, 2>, PassError>;

    /// Features to be kept: what is at one tap in host memory, of the samples one after another, without
    /// padding.
    fn features(&self, tap: Tap) -> Result<Vec<f32>, PassError>;

    /// The rows of tokens that adapters drop from, where they drop anything.
    fn token_rows(&self) -> Option<&DropoutRows<B>>;
}

/// What a forward pass gives: a tensor for each tap that was read, and its trace.
pub type Forward<'r, B> = (Vec<Tensor<B, 2>>, Box<dyn VlTrace<B> + 'r>);

/// What a forward pass has kept.
pub trait VlTrace<B: Tape<Base = B>> {
    /// Whether the gradient of what was read last is wanted.
    fn trains(&self) -> bool;

    /// Carries the gradients of what was read back, one for each tap; gradients of what trains are added to
    /// `grads`.
    fn backward(
        self: Box<Self>,
        gradients: Vec<Tensor<B, 2>>,
        grads: &mut dyn GradientSums<B>,
        lap: Lap<'_>,
    ) -> Result<(), PassError>;
}

/// Rows that were begun, and the logits of each one's next token, `[b, vocab]`.
pub type Prefill<'a, B> = (Box<dyn Decoder<B> + 'a>, Tensor<B, 2>);

/// Rows of tokens that grow.
pub trait Decoder<B: Tape<Base = B>> {
    /// Adds one token to each row. Gives the logits of the next, `[b, vocab]`. Ids must lie in the
    /// vocabulary.
    fn follow(&mut self, ids: &[u32]) -> Result<Tensor<B, 2>, PassError>;
}

/// The patch embedding and the first blocks of a vision tower, frozen.
pub trait VisionTrunk<B: Tape<Base = B>> {
    /// Every size that values depend on, as text.
    fn sizes(&self) -> String;

    /// Runs images of these shapes, each image's patches by themselves. `look` is given each block's number
    /// and output, `[patches, d]`, while the next one has not run.
    fn run(
        &self,
        pixel_values: &[&[f32]],
        shapes: &[ImageShape],
        look: &mut dyn FnMut(usize, &Tensor<B, 2>),
    ) -> Result<(), PassError>;

    /// Row and column of each patch of an image of this shape, in the order in which they run.
    fn positions(&self, shape: ImageShape) -> Result<Vec<[u32; 2]>, TokenError>;

    /// Most bytes of streamed blocks that were in memory at once so far.
    fn most_streamed(&self) -> u64;
}
