//! Token embeddings, the head, and where image features enter the sequence.
//!
//! The table is looked up outside of any block, so its gradient has no tape either: the gradient of the first
//! layer's input, row by row ([`Embedding::backward`]), but for rows that image features replace.

use burn::tensor::{DType, Int, Tensor, TensorData};

use super::{config::QwenConfig, error::ModelError, loader::Loader};
use coxswain_nn::{
    kernels::{ModelBackend, Tape, flat::Lookups},
    lora::LoraLinear,
    params::{BaseWeight, GradientSums, ParamScope, Trainables},
};

/// The tensor's name.
const TABLE: &str = "model.language_model.embed_tokens.weight";

/// The table of token embeddings, `[vocab, d]`.
pub struct Embedding<B: ModelBackend> {
    table_vd: BaseWeight<B, 2>,
    device: B::Device,
}

/// The tensor that is the LM head's weight as well, if this model has such a one.
pub fn tied_to_head(config: &QwenConfig) -> Option<&'static str> {
    config.tie_word_embeddings.then_some(TABLE)
}

impl<B: ModelBackend> Embedding<B> {
    /// Loads `model.language_model.embed_tokens`.
    pub fn load(loader: &mut Loader<'_, B>, config: &QwenConfig) -> Result<Self, ModelError> {
        let shape = [config.text.vocab_size, config.text.hidden_size];
        let table_vd = match loader.trained_table(TABLE, shape) {
            Some(id) => BaseWeight::Trained(id),
            None => loader.matrix(TABLE, shape)?.into(),
        };
        Ok(Self { table_vd, device: loader.device.clone() })
    }

    /// Rows of the table as float32, `[n, d]`. Ids must lie in the vocabulary; see `QwenVl::check_tokens`.
    pub fn lookup<T: Tape<Base = B>>(&self, params: &ParamScope<'_, T>, ids: &[u32]) -> Tensor<T, 2> {
        let table_vd = match &self.table_vd {
            // Looked up before it is on a tape: a whole table has no business there.
            BaseWeight::Frozen(table_vd) => {
                let rows_nd = table_vd.clone().select(0, indices::<B>(ids, &self.device));
                return T::lift(if rows_nd.dtype() == DType::F32 {
                    rows_nd
                } else {
                    rows_nd.cast(DType::F32)
                });
            }
            BaseWeight::Trained(id) => params.get::<2>(*id),
        };
        let device = table_vd.device();
        table_vd.select(0, indices::<T>(ids, &device))
    }

    /// Whether the table trains.
    pub fn trains(&self) -> bool {
        self.table_vd.trains()
    }

    /// Adds the gradient of the table, given that of what was looked up, `[n, d]`; nothing where it is
    /// frozen.
    pub fn backward(
        &self,
        trainables: &Trainables<B>,
        lookups: &Lookups,
        drows_nd: Tensor<B, 2>,
        grads: &mut dyn GradientSums<B>,
    ) {
        if let Some(table) = self.table_vd.trained() {
            grads.add_rows(trainables.layout().get(table), lookups, drows_nd);
        }
    }

    /// The head: the table itself when the embeddings are tied, else `lm_head`. `[n, d]` to `[n, vocab]`.
    pub fn head(&self, loader: &mut Loader<'_, B>, config: &QwenConfig) -> Result<LoraLinear<B>, ModelError> {
        let shape = [config.text.hidden_size, config.text.vocab_size];
        if config.tie_word_embeddings {
            let adapter = loader.adapter("lm_head", shape);
            return Ok(LoraLinear::new(self.table_vd.clone(), None, adapter));
        }
        loader.linear("lm_head", shape, false)
    }
}

/// The rows of a flattened sequence that image features replace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ImageRows {
    rows: Vec<u32>,
    /// For each row of the sequence, its row in `[sequence rows | features]`.
    sources: Vec<u32>,
}

impl ImageRows {
    /// `rows` in order of features, of a sequence of `n` rows.
    pub fn new(rows: Vec<u32>, n: usize) -> Self {
        let mut sources: Vec<u32> = (0..n as u32).collect();
        for (feature, &row) in rows.iter().enumerate() {
            sources[row as usize] = (n + feature) as u32;
        }
        Self { rows, sources }
    }

    /// Image tokens.
    pub fn len(&self) -> usize {
        self.rows.len()
    }

    /// True for a batch without images.
    pub fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }

    /// Where the sequence of these ids reads which rows of a table: nowhere that an image is.
    pub fn lookups(&self, ids: &[u32]) -> Lookups {
        let places = (0..).zip(ids.iter().copied()).zip(&self.sources);
        Lookups::new(places.filter(|((row, _), source)| *row == **source).map(|(lookup, _)| lookup))
    }

    /// `x_nd` with its image rows replaced by `features_md`, in order.
    pub fn scatter<T: Tape>(&self, x_nd: Tensor<T, 2>, features_md: Tensor<T, 2>) -> Tensor<T, 2> {
        if self.is_empty() {
            return x_nd;
        }
        let device = x_nd.device();
        Tensor::cat(vec![x_nd, features_md], 0).select(0, indices::<T>(&self.sources, &device))
    }

    /// The image rows of `x_nd`, `[m, d]`: what the gradient of `scatter` sends to the features.
    pub fn gather<B: ModelBackend>(&self, x_nd: Tensor<B, 2>) -> Tensor<B, 2> {
        let device = x_nd.device();
        x_nd.select(0, indices::<B>(&self.rows, &device))
    }
}

fn indices<B: ModelBackend>(rows: &[u32], device: &B::Device) -> Tensor<B, 1, Int> {
    let rows: Vec<i32> = rows.iter().map(|&row| row as i32).collect();
    let len = rows.len();
    Tensor::from_data(TensorData::new(rows, [len]), device)
}
