//! Token embeddings, the head, and where image features enter the sequence.
//!
//! The table is looked up outside of any block, so its gradient has no tape either: the gradient of the first
//! layer's input, row by row ([`Embedding::backward`]), but for rows that image features replace.
//!
//! A table that stays in host memory ([`TablePlace::Host`]) is looked up there; the rows go to the device.

use std::path::Path;

use burn::tensor::{Bytes, DType, Int, Tensor, TensorData};

use super::sizes::TowersSizes;
use crate::pretrained::{
    blocks::TablePlace, checkpoint::Checkpoint, error::ModelError, loader::Loader, rules::Rules,
};
use coxswain_nn::{
    kernels::{ModelBackend, Tape, flat::Lookups, upload},
    lora::LoraLinear,
    params::{BaseWeight, GradientSums, ParamScope, Trainables},
};

/// The tensor that the table of token embeddings is.
const TABLE: &str = "model.language_model.embed_tokens.weight";
/// The tensor that a head of its own is.
const HEAD: &str = "lm_head.weight";

/// The table of token embeddings, `[vocab, d]`.
pub struct Embedding<B: ModelBackend> {
    table_vd: Table<B>,
    device: B::Device,
}

enum Table<B: ModelBackend> {
    Device(BaseWeight<B, 2>),
    /// Frozen; without bytes where tensors have no values.
    Host(TensorData),
}

impl<B: ModelBackend> Embedding<B> {
    /// Loads `model.language_model.embed_tokens`.
    pub fn load(
        loader: &mut Loader<'_, B>,
        sizes: &TowersSizes,
        place: TablePlace,
    ) -> Result<Self, ModelError> {
        let shape = [sizes.text.vocab_size, sizes.text.hidden_size];
        let table_vd = match (loader.trained_table(TABLE, shape), place) {
            (Some(_), TablePlace::Host) => return Err(ModelError::OffloadedTable("trains")),
            (Some(id), TablePlace::Device) => Table::Device(BaseWeight::Trained(id)),
            (None, TablePlace::Device) => Table::Device(loader.matrix(TABLE, shape)?.into()),
            (None, TablePlace::Host) => Table::Host(loader.on_host(TABLE, shape)?),
        };
        Ok(Self { table_vd, device: loader.device.clone() })
    }

    /// Rows of the table as float32, `[n, d]`. Ids must lie in the vocabulary; see `TwoTowers::rope_index`.
    pub fn lookup<T: Tape<Base = B>>(&self, params: &ParamScope<'_, T>, ids: &[u32]) -> Tensor<T, 2> {
        let table_vd = match &self.table_vd {
            // Looked up before it is on a tape: a whole table has no business there.
            Table::Device(BaseWeight::Frozen(table_vd)) => {
                return lifted(table_vd.clone().select(0, indices::<B>(ids, &self.device)));
            }
            Table::Host(table_vd) => return lifted(upload::<B, 2>(rows_of(table_vd, ids), &self.device)),
            Table::Device(BaseWeight::Trained(id)) => params.get::<2>(*id),
        };
        let device = table_vd.device();
        table_vd.select(0, indices::<T>(ids, &device))
    }

    /// Whether the table trains.
    pub fn trains(&self) -> bool {
        self.on_device().is_some_and(BaseWeight::trains)
    }

    /// Where the table is.
    pub fn place(&self) -> TablePlace {
        if self.on_device().is_some() { TablePlace::Device } else { TablePlace::Host }
    }

    fn on_device(&self) -> Option<&BaseWeight<B, 2>> {
        match &self.table_vd {
            Table::Device(table_vd) => Some(table_vd),
            Table::Host(_) => None,
        }
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
        if let Some(table) = self.on_device().and_then(BaseWeight::trained) {
            grads.add_rows(trainables.layout().get(table), lookups, drows_nd);
        }
    }

    /// The head: the table itself when the embeddings are tied, else `lm_head`. `[n, d]` to `[n, vocab]`.
    pub fn head(&self, loader: &mut Loader<'_, B>, sizes: &TowersSizes) -> Result<LoraLinear<B>, ModelError> {
        let shape = [sizes.text.hidden_size, sizes.text.vocab_size];
        if sizes.tied {
            let table_vd = self.on_device().ok_or(ModelError::OffloadedTable("is also the head's weight"))?;
            let adapter = loader.adapter("lm_head", shape);
            return Ok(LoraLinear::new(table_vd.clone(), None, adapter));
        }
        loader.linear("lm_head", shape, false)
    }
}

/// Whether the weights have a head of other values than the table, which Transformers then takes, whatever
/// `config.json` says. Weights that are missing or broken are told of when they are read.
pub fn has_own_head(dir: &Path, rules: Rules) -> bool {
    let Ok(weights) = Checkpoint::open(dir, rules) else { return false };
    let [head, table] = [HEAD, TABLE].map(|tensor| weights.stored(tensor));
    let own = matches!((head, table), (Ok(head), Ok(table)) if head != table);
    if own {
        tracing::warn!(
            model = %dir.display(),
            "using the separate LM head in the weights, although config.json ties it to the token embeddings"
        );
    }
    own
}

/// Looked up on a plain backend, as float32 on a tape.
fn lifted<T: Tape>(rows_nd: Tensor<T::Base, 2>) -> Tensor<T, 2> {
    T::lift(if rows_nd.dtype() == DType::F32 { rows_nd } else { rows_nd.cast(DType::F32) })
}

/// Rows of a table in host memory, `[n, d]`, as it has them.
fn rows_of(table_vd: &TensorData, ids: &[u32]) -> TensorData {
    let (width, dtype) = (table_vd.shape[1], table_vd.dtype);
    let bytes = match (table_vd.bytes.is_empty(), dtype.size()) {
        (true, _) => Bytes::from_bytes_vec(Vec::new()),
        (_, 4) => Bytes::from_elems(rows_in(&table_vd.bytes, width, ids, u32::from_ne_bytes)),
        _ => Bytes::from_elems(rows_in(&table_vd.bytes, width, ids, u16::from_ne_bytes)),
    };
    TensorData { bytes, shape: [ids.len(), width].into(), dtype }
}

fn rows_in<E, const N: usize>(table: &[u8], width: usize, ids: &[u32], element: fn([u8; N]) -> E) -> Vec<E> {
    let mut rows = Vec::with_capacity(ids.len() * width);
    for &id in ids {
        let row = &table[id as usize * width * N..][..width * N];
        rows.extend(row.as_chunks::<N>().0.iter().map(|bytes| element(*bytes)));
    }
    rows
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

    /// `x_nd` with `stream_md` added to its image rows, in order.
    pub fn add<T: Tape>(&self, x_nd: Tensor<T, 2>, stream_md: Tensor<T, 2>) -> Tensor<T, 2> {
        if self.is_empty() {
            return x_nd;
        }
        let (device, [m, d]) = (x_nd.device(), stream_md.dims());
        // Every other row reads a row of zeros behind the stream's.
        let n = self.sources.len();
        let added = self.sources.iter().map(|&source| (source as usize).checked_sub(n).unwrap_or(m) as u32);
        let added = indices::<T>(&added.collect::<Vec<_>>(), &device);
        let zeros_1d = Tensor::zeros([1, d], (&device, stream_md.dtype()));
        x_nd + Tensor::cat(vec![stream_md, zeros_1d], 0).select(0, added)
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.rows.len()
    }

    /// The image rows of `x_nd`, `[m, d]`: what the gradient of `scatter`, or of `add`,
    /// sends to the features.
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
