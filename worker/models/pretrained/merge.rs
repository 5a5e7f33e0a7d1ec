//! A checkpoint whose adapted matrices are `W + s B A`, and in which what trained in full is as it was
//! trained: what programs take that know no adapters.
//!
//! Files, names, types and the order of tensors stay those of the checkpoint that was adapted, or all are in
//! one file, under other names. Only adapted matrices and trained tensors have other values, rounded to the
//! type they had. A matrix is merged when it
//! is written, so that one at a time is in memory.

use std::{
    borrow::Cow,
    fs::{self, File},
    io,
    path::{Path, PathBuf},
};

use coxswain_nn::{
    lora::{
        LoraError, LoraPlan,
        linear::{magnitude_key, peft_keys},
    },
    params::TrainableLayout,
};
use coxswain_proto::bounded;
use half::{bf16, f16};
use rayon::prelude::*;
use safetensors::{Dtype, SafeTensors, View, tensor::TensorView};

use super::{checkpoint::Checkpoint, error::ModelError, mapping, rules::Rules};

/// Beside the weights: configuration, tokenizer, processor, chat template. Readmes are of the other model.
const COPIED: [&str; 4] = ["json", "jinja", "txt", "model"];
/// The file of a whole model.
const WHOLE: &str = "model.safetensors";
/// Names the shards.
pub const INDEX: &str = "model.safetensors.index.json";

/// What was trained of a model, with its values.
#[derive(Clone, Copy)]
pub struct TrainedModel<'a> {
    /// What names mean in the model's family.
    pub rules: Rules,
    /// The tensor that is the LM head's weight as well, if there is such a one.
    pub tied: Option<&'a str>,
    /// If given, one file is written of all shards, in which tensors have the names that this makes of
    /// theirs.
    pub joined: Option<fn(&str) -> String>,
    /// Which linears are adapted.
    pub plan: Option<&'a LoraPlan>,
    /// Where the values lie of their matrices, and of what trained in full.
    pub layout: &'a TrainableLayout,
    /// All trainables.
    pub values: &'a [f32],
}

/// The LM head's tensor. A file may have it although it is tied, as a copy of the embedding.
const HEAD: &str = "lm_head.weight";
/// What to do where the export cannot be written.
const SPACE: &str = "check that the output directory is writable and has space";

/// Writes the model of `dir` with what was trained merged to `out`, whole or not at all. `out` must not
/// exist.
pub fn write_merged(dir: &Path, out: &Path, trained: TrainedModel<'_>) -> Result<(), ModelError> {
    let failed = |path: &Path, remedy: &'static str| {
        let path = path.to_owned();
        move |source: io::Error| ModelError::Io { path, source, remedy }
    };
    if out.exists() {
        let taken = io::Error::from(io::ErrorKind::AlreadyExists);
        return Err(failed(out, "remove it, or name another directory")(taken));
    }
    let mut name = out.file_name().unwrap_or_default().to_owned();
    name.push(".part");
    let staged = out.with_file_name(name);
    // Left behind by a process that was killed.
    let _ = fs::remove_dir_all(&staged);
    fs::create_dir_all(&staged).map_err(failed(&staged, SPACE))?;
    let written = write_files(dir, &staged, trained)
        .and_then(|()| fs::rename(&staged, out).map_err(failed(out, SPACE)));
    if written.is_err() {
        // The first error is the one to report.
        let _ = fs::remove_dir_all(&staged);
    }
    written
}

fn write_files(dir: &Path, out: &Path, trained: TrainedModel<'_>) -> Result<(), ModelError> {
    let head = trained.plan.is_some_and(|plan| plan.adapter("lm_head").is_some());
    if head && trained.tied.is_some() {
        let problem = "matches `lm_head`, which shares its weight with the token embeddings (tie_word_embeddings): merging the adapter would change them too; use the PEFT directory instead";
        let field = "lora.targets".into();
        return Err(LoraError::Setting { field, problem: problem.into() }.into());
    }
    let checkpoint = Checkpoint::open(dir, trained.rules)?;
    let shards: Vec<&Path> = checkpoint.files().collect();
    if trained.joined.is_some() {
        write_weights(&shards, &out.join(WHOLE), trained)?;
    } else {
        for shard in &shards {
            write_weights(&[shard], &out.join(shard.file_name().unwrap_or_default()), trained)?;
        }
    }
    let io = |path: &Path, remedy| {
        let path = path.to_owned();
        move |source| ModelError::Io { path, source, remedy }
    };
    for entry in fs::read_dir(dir).map_err(io(dir, "name a model directory"))? {
        let path = entry.map_err(io(dir, "name a model directory"))?.path();
        let copied = path.extension().is_some_and(|end| COPIED.iter().any(|copied| *end == **copied));
        let name = path.file_name().unwrap_or_default();
        // A whole model has no index, though one may lie beside it.
        let whole = shards.len() == 1 || trained.joined.is_some();
        if copied && path.is_file() && !(whole && name == INDEX) {
            fs::copy(&path, out.join(name)).map_err(io(&path, SPACE))?;
        }
    }
    Ok(())
}

/// Writes the tensors of these files to one.
fn write_weights(files: &[&Path], out: &Path, trained: TrainedModel<'_>) -> Result<(), ModelError> {
    let io = |path: &Path, remedy| {
        let path: PathBuf = path.into();
        move |source| ModelError::Io { path, source, remedy }
    };
    let unreadable = |path: &Path, error: safetensors::SafeTensorError| ModelError::Safetensors {
        path: path.into(),
        problem: error.to_string(),
    };
    let map = |path: &&Path| {
        let map = bounded::open(path).and_then(|file| mapping::map(&file));
        map.map_err(io(path, "the model directory must not change during the export"))
    };
    let maps = files.iter().map(map).collect::<Result<Vec<_>, _>>()?;
    let (mut tensors, mut about) = (Vec::new(), None);
    for (path, map) in files.iter().zip(&maps) {
        let (_, header) = SafeTensors::read_metadata(map).map_err(|error| unreadable(path, error))?;
        about = about.or_else(|| header.metadata().clone());
        let file = SafeTensors::deserialize(map).map_err(|error| unreadable(path, error))?;
        tensors.extend(file.tensors().into_iter().map(|(name, stored)| {
            let canonical = (trained.rules.canonical)(&name);
            let tensor = trained.tied.filter(|_| canonical == HEAD).unwrap_or(&canonical);
            let update = update_of(tensor, trained);
            (trained.joined.map_or(name.clone(), |named| named(&name)), MergedTensor { stored, update })
        }));
    }
    safetensors::serialize_to_file(tensors, about, out).map_err(|error| match error {
        safetensors::SafeTensorError::IoError(source) => io(out, SPACE)(source),
        error => unreadable(out, error),
    })?;
    let synced = File::open(out).and_then(|file| file.sync_all());
    synced.map_err(io(out, SPACE))
}

/// What was trained of the tensor of this canonical name: itself, or the adapter of the linear whose weight
/// it is.
fn update_of<'a>(tensor: &str, trained: TrainedModel<'a>) -> Option<Update<'a>> {
    let TrainedModel { plan, layout, values, .. } = trained;
    if let Some(id) = layout.find(tensor) {
        return Some(Update::Whole(&values[layout.get(id).range()]));
    }
    let module = tensor.strip_suffix(".weight")?;
    let spec = plan?.adapter(module)?;
    let of = |key: String| {
        let param = layout.find(&key).map(|id| layout.get(id));
        &values[param.expect("the layout was made with this plan").range()]
    };
    let ([a_ri, b_or], magnitude_o) =
        (peft_keys(module).map(of), spec.dora.then(|| of(magnitude_key(module))));
    Some(Update::LowRank { a_ri, b_or, magnitude_o, rank: spec.rank, scale: spec.scale as f32 })
}

/// What becomes of a tensor.
enum Update<'a> {
    /// These values take its place.
    Whole(&'a [f32]),
    /// `s B A` is added, of which `B` is `[out, r]` and `A` `[r, in]`; with magnitudes each row is then
    /// scaled to its own.
    LowRank { a_ri: &'a [f32], b_or: &'a [f32], magnitude_o: Option<&'a [f32]>, rank: usize, scale: f32 },
}

/// A tensor as it is written.
struct MergedTensor<'a> {
    stored: TensorView<'a>,
    update: Option<Update<'a>>,
}

impl View for MergedTensor<'_> {
    fn dtype(&self) -> Dtype {
        self.stored.dtype()
    }

    fn shape(&self) -> &[usize] {
        self.stored.shape()
    }

    fn data(&self) -> Cow<'_, [u8]> {
        let Some(update) = &self.update else { return Cow::Borrowed(self.stored.data()) };
        let bytes = self.stored.data();
        Cow::Owned(match self.stored.dtype() {
            Dtype::F32 => update.merged(bytes, f32::from_le_bytes, f32::to_le_bytes),
            Dtype::BF16 => {
                update.merged(bytes, |b| bf16::from_le_bytes(b).to_f32(), |w| bf16::from_f32(w).to_le_bytes())
            }
            Dtype::F16 => {
                update.merged(bytes, |b| f16::from_le_bytes(b).to_f32(), |w| f16::from_f32(w).to_le_bytes())
            }
            // Other types are refused when the model is loaded.
            _ => bytes.to_vec(),
        })
    }

    fn data_len(&self) -> usize {
        self.stored.data().len()
    }
}

impl Update<'_> {
    /// The tensor, whose elements are `N` bytes, as it was trained.
    fn merged<const N: usize>(
        &self,
        weight_oi: &[u8],
        read: impl Fn([u8; N]) -> f32 + Sync,
        write: impl Fn(f32) -> [u8; N] + Sync,
    ) -> Vec<u8> {
        let (a_ri, b_or, magnitude_o, rank, scale) = match *self {
            Self::Whole(values) => return values.iter().flat_map(|&value| write(value)).collect(),
            Self::LowRank { a_ri, b_or, magnitude_o, rank, scale } => (a_ri, b_or, magnitude_o, rank, scale),
        };
        let inputs = a_ri.len() / rank;
        let mut out = vec![0; weight_oi.len()];
        let rows = out.par_chunks_mut(inputs * N).zip(weight_oi.par_chunks(inputs * N));
        rows.zip(b_or.par_chunks(rank)).enumerate().for_each(|(row, ((out, weight_i), b_r))| {
            let mut update_i = vec![0.0f32; inputs];
            for (b, a_i) in b_r.iter().zip(a_ri.chunks_exact(inputs)) {
                update_i.iter_mut().zip(a_i).for_each(|(sum, a)| *sum += b * a);
            }
            let mut merged_i = update_i;
            for (merged, weight) in merged_i.iter_mut().zip(weight_i.as_chunks::<N>().0) {
                *merged = read(*weight) + scale * *merged;
            }
            let factor = magnitude_o.map_or(1.0, |magnitude_o| {
                magnitude_o[row] / merged_i.iter().map(|merged| merged * merged).sum::<f32>().sqrt()
            });
            for (out, merged) in out.as_chunks_mut::<N>().0.iter_mut().zip(merged_i) {
                *out = write(merged * factor);
            }
        });
        out
    }
}
