//! The whole model, read from its directory.

use std::{path::Path, sync::Arc};

use burn::tensor::{DType, Tensor};
use coxswain_models::{
    pretrained::{
        blocks::TablePlace,
        checkpoint::Checkpoint,
        error::ModelError,
        loader::{Loader, check_blocks, check_dtype},
        stack::Stack,
        trains::Trains,
    },
    vision_language::{LoadOptions, ModelOutline},
};
use coxswain_nn::{
    kernels::{ModelBackend, Tape, precision},
    lora::LoraLinear,
    params::{BaseWeight, ParamScope, TrainableLayout},
};

use super::{
    block::Block,
    config::Config,
    modules::patches,
    outline::outline,
    rows::indices,
    rules::{HEAD, NORM, RULES, TABLE},
};

/// A quilt whose weights are frozen, but for what trains.
pub struct Quilt<B: ModelBackend> {
    /// Sizes.
    pub config: Config,
    /// The sizes as tasks see them.
    pub outline: ModelOutline,
    /// From pixels of a patch to a token.
    pub patches: LoraLinear<B>,
    /// Token embeddings, `[vocab, d]`.
    pub table_vd: BaseWeight<B, 2>,
    /// Blocks, first to last.
    pub blocks: Stack<B, Block<B>>,
    /// After the last block.
    pub norm_d: BaseWeight<B, 1>,
    /// None if it was not asked for.
    pub head: Option<LoraLinear<B>>,
    /// Where the weights are.
    pub device: B::Device,
}

impl<B: ModelBackend> Quilt<B> {
    /// Reads a model directory. What trains is registered in `layout` in the order of modules.
    pub fn load(
        dir: &Path,
        options: LoadOptions,
        trains: Trains<'_>,
        layout: &mut TrainableLayout,
        device: &B::Device,
    ) -> Result<Self, ModelError> {
        let LoadOptions { dtype, blocks, table, head } = options;
        let config = Config::read(dir)?;
        if table == TablePlace::Host {
            return Err(ModelError::OffloadedTable("is looked up on the device in this family"));
        }
        let checkpoint = Checkpoint::open_for(dir, RULES, B::VALUES)?;
        if B::VALUES {
            check_dtype::<B>(dtype)?;
            check_blocks::<B>(blocks)?;
        }
        precision::follow(dtype.dense());
        let (checkpoint, in_flight) = (&Arc::new(checkpoint), Default::default());
        let mut loader = Loader { checkpoint, dtype, blocks, trains, layout, device, in_flight, within: "" };
        let (width, projection) = (config.hidden_size, patches(&config));
        let patches = loader.linear(&projection.module, projection.features, projection.bias)?;
        let (table, shape) = (format!("{TABLE}.weight"), [config.vocab_size, width]);
        let table_vd = match loader.trained_table(&table, shape) {
            Some(id) => BaseWeight::Trained(id),
            None => loader.matrix(&table, shape)?.into(),
        };
        let blocks = Stack::load(&mut loader, &config, config.layers)?;
        let norm_d = loader.gain(&format!("{NORM}.weight"), width)?;
        let adapted = trains.lora.is_some_and(|plan| plan.adapter(HEAD).is_some());
        let head = (head || adapted).then(|| loader.linear(HEAD, [width, config.vocab_size], false));
        let (outline, head, device) = (outline(&config), head.transpose()?, device.clone());
        Ok(Self { config, outline, patches, table_vd, blocks, norm_d, head, device })
    }

    /// Token embeddings as float32, `[n, d]`. Ids must lie in the vocabulary.
    pub fn embedded<T: Tape<Base = B>>(&self, params: &ParamScope<'_, T>, ids: &[u32]) -> Tensor<T, 2> {
        match &self.table_vd {
            // Looked up before it is on a tape: a whole table has no business there.
            BaseWeight::Frozen(table_vd) => {
                let rows_nd = table_vd.clone().select(0, indices::<B>(ids, &self.device));
                T::lift(if rows_nd.dtype() == DType::F32 { rows_nd } else { rows_nd.cast(DType::F32) })
            }
            BaseWeight::Trained(id) => {
                let table_vd = params.get::<2>(*id);
                let device = table_vd.device();
                table_vd.select(0, indices::<T>(ids, &device))
            }
        }
    }

    /// The norm after the last block.
    pub fn normed<T: Tape<Base = B>>(&self, params: &ParamScope<'_, T>, x_nd: Tensor<T, 2>) -> Tensor<T, 2> {
        T::rms_norm(x_nd, self.norm_d.on_tape(params), self.config.norm_eps)
    }
}
