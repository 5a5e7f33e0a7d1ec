//! The whole model: table, encoder, decoder, head.

use std::{cell::Cell, path::Path, sync::Arc};

use burn::tensor::{DType, Int, Tensor, TensorData};
use coxswain_nn::{
    dtypes::FrozenDtype,
    kernels::{ModelBackend, Tape, precision},
    params::{BaseWeight, ParamId, ParamScope, TrainableLayout, Trainables},
};

use super::{
    block::T5Block, buckets::Buckets, config::T5Config, context::PositionBias, modules::bias_table,
    outline::outline, rules::RULES,
};
use crate::{
    pretrained::{
        blocks::BlockWeights,
        checkpoint::Checkpoint,
        error::ModelError,
        loader::{Loader, check_dtype},
        trains::Trains,
    },
    text_to_text::TextModelOutline,
};

/// Encoder or decoder.
pub struct T5Stack<B: ModelBackend> {
    /// Blocks, first to last.
    pub blocks: Vec<T5Block<B>>,
    /// The gain of the norm behind them.
    pub norm_d: BaseWeight<B, 1>,
    /// What each bucket of relative positions adds to the scores of each head, `[buckets, heads]`: one table
    /// for all blocks.
    table_nh: BaseWeight<B, 2>,
    buckets: Buckets,
}

impl<B: Tape<Base = B>> T5Stack<B> {
    fn load(
        loader: &mut Loader<'_, B>,
        config: &T5Config,
        stack: &str,
        layers: usize,
    ) -> Result<Self, ModelError> {
        let (name, shape) = (bias_table(stack), [config.buckets[0], config.heads]);
        let table_nh = match loader.trained_table(&name, shape) {
            Some(id) => BaseWeight::Trained(id),
            None => in_float32(loader.matrix(&name, shape)?).into(),
        };
        let blocks = (0..layers).map(|index| T5Block::load(loader, config, stack, index));
        let blocks = blocks.collect::<Result<_, _>>()?;
        let norm_d = loader.gain(&format!("{stack}.final_layer_norm.weight"), config.d_model)?;
        let [count, max_distance] = config.buckets;
        let buckets = Buckets { count, max_distance, both_ways: stack == "encoder" };
        Ok(Self { blocks, norm_d, table_nh, buckets })
    }

    /// What is added to the scores of texts of so many tokens, for a pass that trains or for any other.
    pub fn bias(&self, params: &ParamScope<'_, B>, len: usize, training: bool) -> PositionBias<B> {
        match self.table_nh.trained().filter(|_| training) {
            Some(table) => PositionBias::Trained { table, buckets: self.buckets, len },
            None => PositionBias::Known(self.buckets.bias(self.table_nh.on_tape(params), len)),
        }
    }

    /// Whether what its blocks add to their scores trains.
    pub fn bias_trains(&self) -> bool {
        self.table_nh.trains()
    }

    /// Whether anything of its blocks trains.
    pub fn blocks_train(&self) -> bool {
        self.bias_trains() || self.blocks.iter().any(T5Block::trains)
    }
}

/// A T5 model whose weights are frozen, but for what trains.
pub struct T5<B: ModelBackend> {
    /// Sizes.
    pub config: T5Config,
    /// The sizes as tasks see them.
    pub outline: TextModelOutline,
    /// What reads the source.
    pub encoder: T5Stack<B>,
    /// What writes the target.
    pub decoder: T5Stack<B>,
    /// The head's weight, `[vocab, d]`: the table itself, or a matrix of its own.
    pub head_vd: BaseWeight<B, 2>,
    table_vd: BaseWeight<B, 2>,
    /// Where the weights are.
    pub device: B::Device,
}

impl<B: Tape<Base = B>> T5<B> {
    /// Reads a model directory, matrices kept as `dtype`. What trains is registered in `layout` in the order
    /// of modules.
    pub fn load(
        dir: &Path,
        dtype: impl Into<FrozenDtype>,
        trains: Trains<'_>,
        layout: &mut TrainableLayout,
        device: &B::Device,
    ) -> Result<Self, ModelError> {
        let (dtype, config) = (dtype.into(), T5Config::from_dir(dir)?);
        let checkpoint = Arc::new(Checkpoint::open_for(dir, RULES, B::VALUES)?);
        if B::VALUES {
            check_dtype::<B>(dtype)?;
        }
        precision::follow(dtype.dense());
        let (checkpoint, in_flight, blocks) = (&checkpoint, Cell::default(), BlockWeights::Held);
        let mut loader = Loader { checkpoint, dtype, blocks, trains, layout, device, in_flight, within: "" };
        let shape = [config.vocab_size, config.d_model];
        let table_vd = match loader.trained_table(&config.table, shape) {
            Some(id) => BaseWeight::Trained(id),
            None => loader.matrix(&config.table, shape)?.into(),
        };
        let encoder = T5Stack::load(&mut loader, &config, "encoder", config.encoder_layers)?;
        let decoder = T5Stack::load(&mut loader, &config, "decoder", config.decoder_layers)?;
        let head_vd = match &config.head {
            Some(head) => match loader.trained(head, &shape) {
                Some(id) => BaseWeight::Trained(id),
                None => loader.matrix(head, shape)?.into(),
            },
            None => table_vd.clone(),
        };
        let outline = outline(&config);
        Ok(Self { config, outline, encoder, decoder, head_vd, table_vd, device: device.clone() })
    }

    /// Rows of the table as float32, `[n, d]`. Ids must lie in the vocabulary.
    pub fn embed(&self, trainables: &Trainables<B>, ids: &[u32]) -> Tensor<B, 2> {
        let table_vd = self.table_vd.on_tape(&ParamScope::<B>::frozen(trainables));
        in_float32(table_vd.select(0, self.indices(ids)))
    }

    /// The parameter that the table is, if it trains.
    pub fn trained_table(&self) -> Option<ParamId> {
        self.table_vd.trained()
    }

    /// Rows by number, on the model's device.
    fn indices(&self, rows: &[u32]) -> Tensor<B, 1, Int> {
        let rows: Vec<i32> = rows.iter().map(|&row| row as i32).collect();
        let len = rows.len();
        Tensor::from_data(TensorData::new(rows, [len]), &self.device)
    }
}

fn in_float32<B: ModelBackend>(x: Tensor<B, 2>) -> Tensor<B, 2> {
    if x.dtype() == DType::F32 { x } else { x.cast(DType::F32) }
}
