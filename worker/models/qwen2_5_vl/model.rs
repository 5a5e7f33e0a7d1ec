//! The whole model: two towers, the token embedding, and a head where it is asked for.

use std::{path::Path, sync::Arc};

use burn::tensor::Tensor;
use coxswain_nn::dtypes::{FrozenDtype, WeightsDtype};

use super::{
    blocks::{BlockWeights, InMemory, TablePlace},
    checkpoint::Checkpoint,
    config::QwenConfig,
    embed::Embedding,
    error::{ModelError, TokenError, UnreadableWeights},
    loader::{Loader, check_blocks, check_dtype},
    prompts::Rows,
    rope::RopeIndex,
    stack::SharedBlocks,
    text::TextModel,
    trains::Trains,
    vision::VisionTower,
};
use coxswain_nn::{
    kernels::{ModelBackend, Tape, Weight, flat::Lookups, precision},
    lora::{Adapter, LoraLinear},
    params::{GradientSums, ParamId, ParamScope, TrainableLayout, Trainables},
    sharded::{Cut, Peers},
};

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

/// A Qwen2.5-VL model whose weights are frozen, but for what trains.
pub struct QwenVl<B: ModelBackend> {
    /// Sizes.
    pub config: QwenConfig,
    /// Pixels to image features.
    pub vision: VisionTower<B>,
    /// Decoder layers.
    pub text: TextModel<B>,
    embedding: Embedding<B>,
    head: Option<LoraLinear<B>>,
}

impl<B: ModelBackend> QwenVl<B> {
    /// Reads a model directory. What trains is registered in `layout` in the order of modules: patch
    /// embedding, vision blocks, merger, token embedding, decoder layers, final norm, head.
    pub fn load<'a>(
        dir: &Path,
        options: impl Into<LoadOptions>,
        trains: impl Into<Trains<'a>>,
        layout: &mut TrainableLayout,
        device: &B::Device,
    ) -> Result<Self, ModelError> {
        let (options, trains) = (options.into(), trains.into());
        let config = QwenConfig::read(dir)?;
        let LoadOptions { dtype, blocks, table, .. } = options;
        let checkpoint = Arc::new(if B::VALUES { Checkpoint::open(dir)? } else { Checkpoint::hollow(dir) });
        if B::VALUES {
            check_dtype::<B>(dtype)?;
            check_blocks::<B>(blocks)?;
            precision::follow(dtype.dense());
        }
        let (checkpoint, in_flight) = (&checkpoint, Default::default());
        let mut loader = Loader { checkpoint, dtype, blocks, trains, layout, device, in_flight };
        let vision = VisionTower::load(&mut loader, &config.vision)?;
        let embedding = Embedding::load(&mut loader, &config, table)?;
        let text = TextModel::load(&mut loader, &config.text)?;
        let adapted = trains.lora.is_some_and(|plan| plan.adapter("lm_head").is_some());
        let head = (options.head || adapted).then(|| embedding.head(&mut loader, &config)).transpose()?;
        Ok(Self { config, vision, text, embedding, head })
    }

    /// Most bytes of streamed blocks that were in memory at once so far: never those of both towers.
    pub fn most_streamed(&self) -> u64 {
        self.vision.blocks.most_streamed().max(self.text.layers.most_streamed())
    }

    /// What of the repeated blocks is in memory.
    pub fn in_memory(&self) -> InMemory {
        self.text.layers.in_memory()
    }

    /// Where the table of token embeddings is.
    pub fn table_place(&self) -> TablePlace {
        self.embedding.place()
    }

    /// The blocks of both towers, vision first, if ranks share them out.
    pub fn shared_blocks(&self) -> Option<SharedBlocks> {
        let towers = [self.vision.blocks.shared(), self.text.layers.shared()];
        Some(SharedBlocks::new(towers.into_iter().collect::<Option<_>>()?))
    }

    /// Holds the parts of `cut` from now on, and asks `peers` for the others; nothing happens if blocks are
    /// not shared out.
    pub fn share_out(&self, cut: Cut, peers: &Arc<dyn Peers>) -> Result<(), UnreadableWeights> {
        self.shared_blocks().map_or(Ok(()), |blocks| blocks.share_out(cut, peers))
    }

    /// Positions, and the rows that image features replace, for ids `[b, s]` and the images of all rows in
    /// order.
    pub fn rope_index(
        &self,
        ids_bs: &[u32],
        rows: Rows<'_>,
        grids: &[[u32; 3]],
    ) -> Result<RopeIndex, TokenError> {
        self.check_tokens(ids_bs, rows)?;
        RopeIndex::new(&self.config, ids_bs, rows, grids)
    }

    /// Token embeddings, `[n, d]`. Ids must have passed [`QwenVl::rope_index`].
    pub fn embed_tokens<T: Tape<Base = B>>(&self, params: &ParamScope<'_, T>, ids: &[u32]) -> Tensor<T, 2> {
        self.embedding.lookup(params, ids)
    }

    /// Whether the token embedding trains.
    pub fn embedding_trains(&self) -> bool {
        self.embedding.trains()
    }

    /// Adds the gradient of the token embedding, if it trains, given that of the first layer's input,
    /// `[n, d]`.
    pub fn embed_tokens_backward(
        &self,
        trainables: &Trainables<B>,
        lookups: &Lookups,
        dx_nd: Tensor<B, 2>,
        grads: &mut dyn GradientSums<B>,
    ) {
        self.embedding.backward(trainables, lookups, dx_nd, grads);
    }

    /// Logits of normed hidden states, `[n, d]` to `[n, vocab]`; none if the model was loaded without its
    /// head.
    pub fn lm_head<T: Tape<Base = B>>(
        &self,
        params: &ParamScope<'_, T>,
        x_nd: Tensor<T, 2>,
    ) -> Option<Tensor<T, 2>> {
        self.head.as_ref().map(|head| head.forward(params, x_nd))
    }

    /// The head's weight, `[vocab, d]`; none if the model was loaded without its head.
    pub fn head_weight<T: Tape<Base = B>>(&self, params: &ParamScope<'_, T>) -> Option<Tensor<T, 2>> {
        match self.head.as_ref()?.weight_on_tape(params) {
            Weight::Dense(weight_vd) => Some(weight_vd),
            // A head is never quantized.
            Weight::Quantized(_) | Weight::Packed(_) => None,
        }
    }

    /// The parameter that the head's weight is, if it trains.
    pub fn trained_head(&self) -> Option<ParamId> {
        self.head.as_ref().and_then(LoraLinear::trained_weight)
    }

    /// The head's adapter, if it has one.
    pub fn head_adapter(&self) -> Option<&Adapter> {
        self.head.as_ref().and_then(LoraLinear::adapter)
    }

    fn check_tokens(&self, ids_bs: &[u32], rows: Rows<'_>) -> Result<(), TokenError> {
        let vocab = self.config.text.vocab_size;
        let [_, seq] = rows.axes(ids_bs.len());
        match ids_bs.iter().position(|&id| id as usize >= vocab) {
            Some(at) => Err(TokenError::Vocabulary {
                row: at / seq.max(1),
                position: at % seq.max(1),
                id: ids_bs[at].into(),
                vocab,
            }),
            None => Ok(()),
        }
    }
}
