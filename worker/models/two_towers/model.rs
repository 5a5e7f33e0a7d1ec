//! The whole model: two towers, the token embedding, and a head where it is asked for.

use std::{path::Path, sync::Arc};

use super::{
    embed::Embedding,
    rope::RopeIndex,
    sizes::{TowersConfig, TowersSizes},
    text::TextModel,
    vision::VisionTower,
};
use crate::{
    pretrained::{
        blocks::TablePlace,
        checkpoint::Checkpoint,
        error::{ModelError, TokenError},
        loader::{Loader, check_blocks, check_dtype},
        prompts::Rows,
        trains::Trains,
    },
    vision_language::{LoadOptions, ModelOutline},
};
use burn::tensor::Tensor;
use coxswain_nn::{
    kernels::{ModelBackend, Tape, flat::Lookups, precision},
    lora::LoraLinear,
    params::{GradientSums, ParamScope, TrainableLayout, Trainables},
};

/// A model whose weights are frozen, but for what trains.
pub struct TwoTowers<B: ModelBackend, V: VisionTower<B>> {
    /// Sizes.
    pub sizes: TowersSizes,
    /// Pixels to image features.
    pub vision: V,
    /// Decoder layers.
    pub text: TextModel<B>,
    /// The sizes as tasks see them.
    pub outline: ModelOutline,
    embedding: Embedding<B>,
    head: Option<LoraLinear<B>>,
}

impl<B: ModelBackend, V: VisionTower<B>> TwoTowers<B, V> {
    /// Reads a model directory. What trains is registered in `layout` in the order of modules: patch
    /// embedding, vision blocks, mergers, token embedding, decoder layers, final norm, head.
    pub fn load<'a>(
        dir: &Path,
        options: impl Into<LoadOptions>,
        trains: impl Into<Trains<'a>>,
        layout: &mut TrainableLayout,
        device: &B::Device,
    ) -> Result<Self, ModelError> {
        let (options, trains) = (options.into(), trains.into());
        let (config, rules) = (V::Config::read(dir)?, V::Config::RULES);
        let LoadOptions { dtype, blocks, .. } = options;
        let checkpoint = Arc::new(Checkpoint::open_for(dir, rules, B::VALUES)?);
        if B::VALUES {
            check_dtype::<B>(dtype)?;
            check_blocks::<B>(blocks)?;
        }
        precision::follow(dtype.dense());
        let (checkpoint, in_flight) = (&checkpoint, Default::default());
        let mut loader = Loader { checkpoint, dtype, blocks, trains, layout, device, in_flight, within: "" };
        Self::assemble(&config, &mut loader, options)
    }

    /// Reads what `loader` names, of a model of this configuration.
    pub fn assemble(
        config: &V::Config,
        loader: &mut Loader<'_, B>,
        options: LoadOptions,
    ) -> Result<Self, ModelError> {
        let (sizes, outline) = (config.sizes(), config.outline());
        let vision = V::load(loader, config.vision())?;
        let embedding = Embedding::load(loader, &sizes, options.table)?;
        let text = TextModel::load(loader, &sizes.text)?;
        let adapted = loader.trains.lora.is_some_and(|plan| plan.adapter("lm_head").is_some());
        let head = (options.head || adapted).then(|| embedding.head(loader, &sizes)).transpose()?;
        Ok(Self { sizes, vision, text, outline, embedding, head })
    }

    /// Where the table of token embeddings is.
    pub fn embedding_place(&self) -> TablePlace {
        self.embedding.place()
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
        RopeIndex::new(&self.sizes, ids_bs, rows, grids)
    }

    /// Token embeddings, `[n, d]`. Ids must have passed [`TwoTowers::rope_index`].
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

    /// The head; none if the model was loaded without it.
    pub fn head(&self) -> Option<&LoraLinear<B>> {
        self.head.as_ref()
    }

    fn check_tokens(&self, ids_bs: &[u32], rows: Rows<'_>) -> Result<(), TokenError> {
        let vocab = self.sizes.text.vocab_size;
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
