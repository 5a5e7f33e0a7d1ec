//! A checkpoint with random weights and the exact shapes of another one: for speed and memory, where a real
//! one of that size is not at hand and must not be committed.
//!
//! Only `config.json` of the model that it is to be like is needed. Tensors are drawn and written chunk by
//! chunk, into shards as Transformers writes them: memory stays at some megabytes whatever the model's size.
//! Every chunk's draws are keyed by (seed, tensor, chunk), so the same arguments give the same files on any
//! machine.
//!
//! Weights are uniform with the standard deviation of `initializer_range`, norm gains are 1, biases 0. The
//! directory appears by rename when it is complete.
//!
//! It lives with the models, not with the tests, because `cox data make-checkpoint` and `cox selftest` are
//! commands of the product, and because what it writes follows from a family's own list of modules and token
//! ids, so that the two cannot drift apart.
//!
//! What this does not do: make a model that knows anything.

use std::{
    collections::BTreeMap,
    fs::{self, File},
    io::{BufWriter, Write},
    path::{Path, PathBuf},
};

use coxswain_nn::dtypes::WeightsDtype;
use half::{bf16, f16};
use rayon::prelude::*;
use serde_json::{Map, Value, json};

use super::{
    config_file,
    error::ModelError,
    tokens::{self, TokenIds},
};
use coxswain_nn::{
    lora::{Module, ModuleKind},
    rng::{Key, Purpose},
};

/// Elements drawn by one thread at a time.
const CHUNK: usize = 1 << 16;
/// Chunks in memory at a time.
const CHUNKS: usize = 64;
/// Transformers' own default is 5 GB; this one leaves room in a 4 GiB `tmpfs`.
const SHARD_BYTES: u64 = 3 << 30;
/// Files of the model it is like: how images and chats become its input, as any version of Transformers keeps
/// it.
const PROCESSOR_FILES: [&str; 5] = [
    "preprocessor_config.json",
    "processor_config.json",
    "generation_config.json",
    "chat_template.json",
    "chat_template.jinja",
];

/// What to make.
#[derive(Clone, Debug)]
pub struct SyntheticCheckpoint<'a> {
    /// Directory whose `config.json` gives the shapes; its tokenizer and preprocessor are copied.
    pub like: &'a Path,
    /// Directory of the tokenizer, if it is not there; special token ids of `config.json` then become this
    /// one's.
    pub tokenizer: Option<&'a Path>,
    /// Directory to make; must not exist.
    pub out: &'a Path,
    /// Type in the files.
    pub dtype: WeightsDtype,
    /// Keys every draw.
    pub seed: u64,
}

/// What was made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SyntheticSummary {
    /// Tensors.
    pub tensors: usize,
    /// Elements in all.
    pub parameters: u64,
    /// Bytes of all shards.
    pub bytes: u64,
    /// Files of weights.
    pub shards: usize,
}

/// A tensor to be written.
pub(crate) struct DrawnTensor {
    pub(crate) name: String,
    shape: Vec<usize>,
    fill: Fill,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Fill {
    Constant(f32),
    Uniform(f32),
}

impl DrawnTensor {
    pub(crate) fn len(&self) -> usize {
        self.shape.iter().product()
    }
}

impl SyntheticCheckpoint<'_> {
    /// Makes it, of these modules. `token_ids` has the keys of `config.json` that name tokens, and those
    /// tokens.
    pub fn write(&self, modules: &[Module], token_ids: TokenIds<'_>) -> Result<SyntheticSummary, ModelError> {
        if self.out.exists() {
            return Err(io(
                self.out,
                std::io::ErrorKind::AlreadyExists.into(),
                "name a directory that does not exist",
            ));
        }
        let (_, mut json) = config_file::read(self.like)?;
        let name = self.out.file_name().unwrap_or_default().to_string_lossy();
        let partial = self.out.with_file_name(format!(".{name}.partial-{}", std::process::id()));
        let made = self.fill(&partial, modules, token_ids, &mut json);
        let published = made.and_then(|made| {
            let rename = fs::rename(&partial, self.out);
            rename
                .map_err(|source| io(self.out, source, "name a directory that can be written"))
                .map(|()| made)
        });
        if published.is_err() {
            // What is left of a failed attempt is of no use; the failure itself is returned.
            let _ = fs::remove_dir_all(&partial);
        }
        published
    }

    fn fill(
        &self,
        dir: &Path,
        modules: &[Module],
        token_ids: TokenIds<'_>,
        json: &mut Value,
    ) -> Result<SyntheticSummary, ModelError> {
        let writable = |source| io(dir, source, "name a directory that can be written");
        fs::create_dir_all(dir).map_err(writable)?;
        let tokenizer = self.tokenizer.unwrap_or(self.like);
        for (from, names) in [
            (self.like, &PROCESSOR_FILES[..]),
            (tokenizer, &["tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt"][..]),
        ] {
            for file in names.iter().map(|name| from.join(name)).filter(|file| file.is_file()) {
                let copied = fs::copy(&file, dir.join(file.file_name().unwrap_or_default()));
                copied.map_err(|source| io(&file, source, "make it readable"))?;
            }
        }
        if self.tokenizer.is_some() {
            tokens::adopt(json, token_ids, &tokenizer.join("tokenizer.json"))?;
        }
        let name = self.dtype.name();
        for key in
            ["torch_dtype", "dtype"].into_iter().filter(|key| json.get(key).is_some()).collect::<Vec<_>>()
        {
            json[key] = Value::from(name);
        }
        let deviation = json.get("initializer_range").and_then(Value::as_f64).unwrap_or(0.02);
        let config_file = dir.join("config.json");
        fs::write(&config_file, format!("{json:#}"))
            .map_err(|source| io(&config_file, source, "make room"))?;
        let entries = entries(modules, deviation as f32);
        self.write_shards(dir, &entries)
    }

    fn write_shards(&self, dir: &Path, entries: &[DrawnTensor]) -> Result<SyntheticSummary, ModelError> {
        let width = self.width();
        let shards = shards(entries, width);
        let count = shards.len();
        let file_of = |number: usize| match count {
            1 => "model.safetensors".to_owned(),
            _ => format!("model-{:05}-of-{count:05}.safetensors", number + 1),
        };
        let mut made = SyntheticSummary { tensors: entries.len(), parameters: 0, bytes: 0, shards: count };
        let mut map = BTreeMap::new();
        for (number, range) in shards.into_iter().enumerate() {
            let path = dir.join(file_of(number));
            let full = |source| io(&path, source, "check that the directory is writable and has space");
            let mut file = BufWriter::new(File::create(&path).map_err(full)?);
            let header = header(&entries[range.clone()], self.dtype, width);
            file.write_all(&(header.len() as u64).to_le_bytes()).map_err(full)?;
            file.write_all(&header).map_err(full)?;
            for (at, entry) in range.clone().zip(&entries[range]) {
                self.write_tensor(&mut file, at as u64, entry).map_err(full)?;
                made.parameters += entry.len() as u64;
                map.insert(entry.name.clone(), Value::from(file_of(number)));
            }
            let file = file.into_inner().map_err(|error| full(error.into_error()))?;
            file.sync_all().map_err(full)?;
            made.bytes += file.metadata().map_err(full)?.len();
        }
        if count > 1 {
            let total = made.parameters * width as u64;
            let index = json!({"metadata": {"total_size": total}, "weight_map": map});
            let path = dir.join("model.safetensors.index.json");
            fs::write(&path, format!("{index:#}")).map_err(|source| io(&path, source, "make room"))?;
        }
        Ok(made)
    }

    fn write_tensor(&self, file: &mut impl Write, number: u64, entry: &DrawnTensor) -> std::io::Result<()> {
        let len = entry.len();
        let chunks = len.div_ceil(CHUNK);
        for first in (0..chunks).step_by(CHUNKS) {
            let parts: Vec<Vec<u8>> = (first..chunks.min(first + CHUNKS))
                .into_par_iter()
                .map(|chunk| {
                    let size = CHUNK.min(len - chunk * CHUNK);
                    self.values(entry.fill, [number, chunk as u64], size)
                })
                .collect();
            parts.iter().try_for_each(|part| file.write_all(part))?;
        }
        Ok(())
    }

    /// The bytes of one chunk of a tensor.
    fn values(&self, fill: Fill, [tensor, chunk]: [u64; 2], size: usize) -> Vec<u8> {
        let key = Key { seed: self.seed, purpose: Purpose::Init, step: tensor, sample: chunk, repeat: 1 };
        let mut draws = key.draws();
        let mut next = || match fill {
            Fill::Constant(value) => value,
            Fill::Uniform(bound) => (2.0 * draws.uniform() - 1.0) * bound,
        };
        match self.dtype {
            WeightsDtype::Float32 => (0..size).flat_map(|_| next().to_le_bytes()).collect(),
            WeightsDtype::Bfloat16 => (0..size).flat_map(|_| bf16::from_f32(next()).to_le_bytes()).collect(),
            WeightsDtype::Float16 => (0..size).flat_map(|_| f16::from_f32(next()).to_le_bytes()).collect(),
        }
    }

    fn width(&self) -> usize {
        self.dtype.bytes() as usize
    }
}

/// Every tensor of these modules, under the names that published checkpoints use.
pub(crate) fn entries(modules: &[Module], deviation: f32) -> Vec<DrawnTensor> {
    // A uniform variable within b has the deviation b / sqrt(3).
    let weight = Fill::Uniform(deviation * 3f32.sqrt());
    let tied = modules.iter().any(|module| matches!(module.kind, ModuleKind::Embedding { tied: true, .. }));
    let mut entries = Vec::new();
    for module in modules {
        let mut push = |end: &str, shape: &[usize], fill| {
            let name = format!("{}.{end}", module.old_name);
            entries.push(DrawnTensor { name, shape: shape.to_vec(), fill });
        };
        match module.kind {
            ModuleKind::Linear { head: true, .. } if tied => {}
            ModuleKind::Linear { inputs, outputs, .. } => push("weight", &[outputs, inputs], weight),
            ModuleKind::Convolution { shape, .. } => push("weight", &shape, weight),
            ModuleKind::Embedding { rows, width, .. } => push("weight", &[rows, width], weight),
            ModuleKind::Norm { width, .. } => push("weight", &[width], Fill::Constant(1.0)),
            ModuleKind::Other => {}
        }
        if let Some(len) = module.kind.bias() {
            push("bias", &[len], Fill::Constant(0.0));
        }
    }
    entries
}

/// Consecutive tensors that share a file; a tensor larger than a shard has one to itself.
pub(crate) fn shards(entries: &[DrawnTensor], width: usize) -> Vec<std::ops::Range<usize>> {
    let mut shards = Vec::new();
    let (mut start, mut bytes) = (0, 0u64);
    for (at, entry) in entries.iter().enumerate() {
        let size = (entry.len() * width) as u64;
        if at > start && bytes + size > SHARD_BYTES {
            shards.push(start..at);
            (start, bytes) = (at, 0);
        }
        bytes += size;
    }
    shards.push(start..entries.len());
    shards
}

/// A safetensors header: JSON, filled up with spaces so that the data begins at a multiple of 8.
fn header(entries: &[DrawnTensor], dtype: WeightsDtype, width: usize) -> Vec<u8> {
    let dtype = match dtype {
        WeightsDtype::Float32 => "F32",
        WeightsDtype::Bfloat16 => "BF16",
        WeightsDtype::Float16 => "F16",
    };
    let mut map = Map::new();
    map.insert("__metadata__".into(), json!({"format": "pt"}));
    let mut start = 0;
    for entry in entries {
        let end = start + entry.len() * width;
        map.insert(
            entry.name.clone(),
            json!({"dtype": dtype, "shape": entry.shape, "data_offsets": [start, end]}),
        );
        start = end;
    }
    let mut text = Value::Object(map).to_string().into_bytes();
    text.resize(text.len().next_multiple_of(8), b' ');
    text
}

fn io(path: &Path, source: std::io::Error, remedy: &'static str) -> ModelError {
    ModelError::Io { path: PathBuf::from(path), source, remedy }
}
