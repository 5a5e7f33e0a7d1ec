//! Weights of a model directory: one safetensors file or many, mapped, read tensor by tensor.
//!
//! ```text
//! Checkpoint::open      finds the files, checks every header, knows every tensor under one name
//! Checkpoint::matrix    one tensor: shape checked against config.json, as float32 or bfloat16, in the file's
//!                       own layout
//! Checkpoint::quantized the same in 4 or 8 bits
//! Checkpoint::locate    where a tensor lies, for Checkpoint::fetch: the same while training runs, where
//!                       faults are errors
//! ```
//!
//! Files of one family may spell names in several ways. Inside, only the canonical names of its rules exist.

use std::{
    collections::{BTreeSet, HashMap},
    fs::File,
    io::ErrorKind,
    ops::Range,
    path::{Path, PathBuf},
    sync::Arc,
};

use burn::tensor::{AllocationProperty, Bytes, DType, TensorData};
use coxswain_nn::{
    dtypes::{Packing, WeightsDtype},
    kernels::quantized::QuantizedMatrix,
    pulse,
};
use coxswain_proto::{bounded, limits::MAX_METADATA_BYTES};
use memmap2::Mmap;
use safetensors::{Dtype, SafeTensorError, SafeTensors, tensor::Metadata};
use serde_json::Value;

use super::{
    error::{BEYOND_FLOAT16, ModelError, UnreadableWeights},
    fields::Fields,
    mapping,
    reading::{InFile, InMap, Stamp, converted, is_within, widened},
    rules::Rules,
};

/// A model directory, and what names mean in its family.
#[derive(Clone, Copy, Debug)]
pub struct CheckpointDir<'a> {
    /// The directory.
    pub path: &'a Path,
    /// The family's rules.
    pub rules: Rules,
}

/// A mapped safetensors file whose header has been checked.
struct Shard {
    path: PathBuf,
    file: File,
    stamp: Stamp,
    map: Arc<Mmap>,
    header: Metadata,
    data_start: usize,
}

/// Where a tensor lies, once its name, shape and type have been checked.
#[derive(Clone, Debug)]
pub struct TensorLocation {
    shard: usize,
    /// The file's spelling.
    name: String,
    shape: Vec<usize>,
    stored: Dtype,
    /// Bytes in the file.
    range: Range<usize>,
}

/// The weights of a model directory.
pub struct Checkpoint {
    dir: PathBuf,
    shards: Vec<Shard>,
    /// What names mean in its family.
    pub rules: Rules,
    /// Canonical name to shard number and the file's own spelling.
    tensors: HashMap<String, (usize, String)>,
    /// Tensors have no values; what is asked for is looked up in the headers, where there are files.
    hollow: bool,
}

impl Checkpoint {
    /// The weight files of `dir`, for a backend whose tensors have values or have none. One without them
    /// needs no files: to plan, a directory with a configuration is enough.
    pub fn open_for(dir: &Path, rules: Rules, values: bool) -> Result<Self, ModelError> {
        match Self::open(dir, rules) {
            Ok(found) => Ok(Self { hollow: !values, ..found }),
            Err(ModelError::Io { source, .. }) if !values && source.kind() == ErrorKind::NotFound => {
                Ok(Self { dir: dir.into(), shards: Vec::new(), rules, tensors: HashMap::new(), hollow: true })
            }
            Err(error) => Err(error),
        }
    }

    /// Checks, of a tensor without values, that it is in the headers, where there are any, in this shape.
    fn look_up(&self, name: &str, expected: &[usize]) -> Result<(), ModelError> {
        if self.shards.is_empty() { Ok(()) } else { self.locate(name, expected).map(drop) }
    }

    /// Maps the weight files of `dir` and checks their headers; no weight is read yet.
    pub fn open(dir: &Path, rules: Rules) -> Result<Self, ModelError> {
        let single = dir.join("model.safetensors");
        let index = dir.join("model.safetensors.index.json");
        // The order of Transformers: saving a model whole leaves the index of earlier shards behind.
        let paths = if single.is_file() {
            vec![single]
        } else if index.is_file() {
            indexed_files(dir, &index)?
        } else {
            return Err(ModelError::Io {
                path: single,
                source: std::io::ErrorKind::NotFound.into(),
                remedy: "the directory must hold model.safetensors, or model.safetensors.index.json and its shards (convert .bin files with Transformers' save_pretrained)",
            });
        };
        let shards = paths.iter().map(|path| Shard::open(path)).collect::<Result<Vec<_>, _>>()?;
        let mut tensors = HashMap::new();
        for (number, shard) in shards.iter().enumerate() {
            for name in shard.header.tensors().into_keys() {
                let twice = tensors.insert((rules.canonical)(&name), (number, name.clone()));
                if let Some((other, spelling)) = twice {
                    return Err(ModelError::Safetensors {
                        path: shard.path.clone(),
                        problem: format!(
                            "tensor `{name}` is also in {} as `{spelling}`",
                            shards[other].path.display()
                        ),
                    });
                }
            }
        }
        Ok(Self { dir: dir.into(), shards, rules, tensors, hollow: false })
    }

    /// The mapped files.
    pub fn files(&self) -> impl Iterator<Item = &Path> {
        self.shards.iter().map(|shard| shard.path.as_path())
    }

    /// The canonical names of all tensors, in no order.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.tensors.keys().map(String::as_str)
    }

    /// Whether the tensor is there, under its canonical name.
    pub fn contains(&self, name: &str) -> bool {
        self.tensors.contains_key(name)
    }

    /// Bytes that a tensor takes beside the mapped file when it is kept as `dtype`: 0 where it is used as it
    /// lies there. None if the checkpoint has no such tensor.
    pub fn copied_bytes(&self, name: &str, dtype: WeightsDtype) -> Option<u64> {
        let (number, spelling) = self.tensors.get(name)?;
        Some(self.at(*number, spelling)?.copied_bytes(dtype))
    }

    /// Bytes of all tensors as stored.
    pub fn stored_bytes(&self) -> u64 {
        self.shards.iter().map(|shard| (shard.map.len() - shard.data_start) as u64).sum()
    }

    /// A tensor as it is stored: type, shape and bytes, in the mapped file.
    pub fn stored(&self, name: &str) -> Result<(Dtype, &[usize], &[u8]), ModelError> {
        let (number, spelling) = self.tensors.get(name).ok_or_else(|| ModelError::MissingTensor {
            path: self.dir.clone(),
            tensor: name.into(),
            expected: vec![],
        })?;
        let shard = &self.shards[*number];
        let info = shard.header.info(spelling).expect("names were taken from this header");
        let (start, end) = info.data_offsets;
        Ok((info.dtype, &info.shape, &shard.map[shard.data_start + start..shard.data_start + end]))
    }

    /// The tensor `name` holds values that are not finite.
    pub fn not_finite(&self, name: &str) -> ModelError {
        let stored = self.tensors.get(name);
        let (path, tensor) =
            stored.map_or((&self.dir, name), |(shard, spelling)| (&self.shards[*shard].path, spelling));
        ModelError::NotFinite { path: path.clone(), tensor: tensor.into() }
    }

    /// A tensor that multiplies activations, kept as `dtype`. `expected` is its shape in the file; the result
    /// is flattened to `shape`.
    ///
    /// Where the file's type is the wanted one the result borrows the mapped file: nothing is copied.
    pub fn matrix(
        &self,
        name: &str,
        expected: &[usize],
        shape: &[usize],
        dtype: WeightsDtype,
    ) -> Result<TensorData, ModelError> {
        if self.hollow {
            self.look_up(name, expected)?;
            return Ok(TensorData {
                bytes: Bytes::from_bytes_vec(Vec::new()),
                shape: shape.into(),
                dtype: kept_as(dtype),
            });
        }
        let at = self.locate(name, expected)?;
        let shard = &self.shards[at.shard];
        let bytes = match at.copied_bytes(dtype) {
            0 => shard.share(at.range),
            _ => {
                let Ok(bytes) = converted(&InMap { map: &shard.map, range: at.range }, at.stored, dtype);
                bytes
            }
        };
        if !is_within(dtype, &bytes) {
            return Err(ModelError::BeyondFloat16 { path: shard.path.clone(), tensor: at.name });
        }
        Ok(TensorData::from_bytes(bytes, shape.to_vec(), kept_as(dtype)))
    }

    /// The weight of a linear layer, `[o, i]`, in few bits. Plain reads: neither the weight nor its part of
    /// the mapped file is ever whole in memory.
    pub fn quantized(
        &self,
        name: &str,
        shape: [usize; 2],
        packing: Packing,
    ) -> Result<QuantizedMatrix, ModelError> {
        if self.hollow {
            self.look_up(name, &shape)?;
            return Ok(QuantizedMatrix::hollow(packing, shape));
        }
        let at = self.locate(name, &shape)?;
        let Shard { file, path, .. } = &self.shards[at.shard];
        let element = at.range.len() / shape.iter().product::<usize>().max(1);
        let read = |first: usize, to: &mut [f32]| {
            pulse::beat();
            let start = (at.range.start + first * element) as u64;
            let piece = InFile { file, start, len: to.len() * element };
            widened(&piece, at.stored).map(|values| to.copy_from_slice(&values))
        };
        let matrix = QuantizedMatrix::quantize(packing, shape, read).map_err(|source| ModelError::Io {
            path: path.clone(),
            source,
            remedy: "the file must not change while the model is loaded",
        })?;
        if !matrix.is_finite() {
            return Err(self.not_finite(name));
        }
        Ok(matrix)
    }

    /// A bias or a gain; always float32.
    pub fn vector(&self, name: &str, len: usize) -> Result<TensorData, ModelError> {
        self.matrix(name, &[len], &[len], WeightsDtype::Float32)
    }

    /// Where the tensor lies, if it is there in this shape and in a type that can be read.
    pub fn locate(&self, name: &str, expected: &[usize]) -> Result<TensorLocation, ModelError> {
        let (number, spelling) = self.tensors.get(name).ok_or_else(|| ModelError::MissingTensor {
            path: self.dir.clone(),
            tensor: name.into(),
            expected: expected.into(),
        })?;
        let path = &self.shards[*number].path;
        let at = self.at(*number, spelling).expect("names were taken from this header");
        if at.shape != expected {
            return Err(ModelError::WrongShape {
                path: path.clone(),
                tensor: at.name,
                found: at.shape,
                expected: expected.into(),
            });
        }
        if !matches!(at.stored, Dtype::F32 | Dtype::BF16 | Dtype::F16) {
            return Err(ModelError::UnsupportedDtype {
                path: path.clone(),
                tensor: at.name,
                found: format!("{:?}", at.stored),
            });
        }
        Ok(at)
    }

    /// A tensor that was located, as [`Checkpoint::matrix`] gives it: the same bits, but a file that cannot
    /// be read any more, or is not what it was, is an error. `share`: the result may borrow the mapped file;
    /// else it is a copy in any case.
    pub fn fetch(
        &self,
        at: &TensorLocation,
        dtype: WeightsDtype,
        share: bool,
    ) -> Result<TensorData, UnreadableWeights> {
        let shard = &self.shards[at.shard];
        let in_file = InFile { file: &shard.file, start: at.range.start as u64, len: at.range.len() };
        let bytes = shard.stamp.hold(&shard.file).and_then(|()| match at.copied_bytes(dtype) {
            0 if share => Ok(shard.share(at.range.clone())),
            _ => converted(&in_file, at.stored, dtype),
        });
        let bytes = bytes.map_err(|error| self.unreadable(at, &error.to_string()))?;
        if !is_within(dtype, &bytes) {
            return Err(self.unreadable(at, BEYOND_FLOAT16));
        }
        Ok(TensorData::from_bytes(bytes, at.shape.clone(), kept_as(dtype)))
    }

    /// Elements of a tensor that was located, as [`Checkpoint::fetch`] gives them, into `to`.
    pub fn fetch_part(
        &self,
        at: &TensorLocation,
        dtype: WeightsDtype,
        elements: Range<usize>,
        to: &mut [u8],
    ) -> Result<(), UnreadableWeights> {
        let shard = &self.shards[at.shard];
        let stored = at.range.len() / at.elements().max(1);
        let start = (at.range.start + elements.start * stored) as u64;
        let in_file = InFile { file: &shard.file, start, len: elements.len() * stored };
        let bytes = shard.stamp.hold(&shard.file).and_then(|()| converted(&in_file, at.stored, dtype));
        let bytes = bytes.map_err(|error| self.unreadable(at, &error.to_string()))?;
        if !is_within(dtype, &bytes) {
            return Err(self.unreadable(at, BEYOND_FLOAT16));
        }
        to.copy_from_slice(&bytes);
        Ok(())
    }

    /// The error of a tensor that was located and cannot be read.
    pub fn unreadable(&self, at: &TensorLocation, problem: &str) -> UnreadableWeights {
        let path = self.shards[at.shard].path.clone();
        UnreadableWeights { path, tensor: at.name.clone(), problem: problem.into() }
    }

    fn at(&self, number: usize, spelling: &str) -> Option<TensorLocation> {
        let shard = &self.shards[number];
        let info = shard.header.info(spelling)?;
        let (start, end) = info.data_offsets;
        Some(TensorLocation {
            shard: number,
            name: spelling.to_owned(),
            shape: info.shape.clone(),
            stored: info.dtype,
            range: shard.data_start + start..shard.data_start + end,
        })
    }
}

impl TensorLocation {
    /// Bytes that it takes beside the mapped file when it is kept as `dtype`: 0 where it is used as it lies
    /// there.
    pub fn copied_bytes(&self, dtype: WeightsDtype) -> u64 {
        let kept = match dtype {
            WeightsDtype::Float32 => Dtype::F32,
            WeightsDtype::Bfloat16 => Dtype::BF16,
            WeightsDtype::Float16 => Dtype::F16,
        };
        // Maps begin at a page, so the place in the file decides the alignment.
        let aligned = self.range.start.is_multiple_of(align_of::<f32>());
        if self.stored == kept && aligned { 0 } else { self.kept_bytes(dtype) }
    }

    /// Bytes of its elements as `dtype`.
    pub fn kept_bytes(&self, dtype: WeightsDtype) -> u64 {
        dtype.bytes() * self.elements() as u64
    }

    /// How many numbers it has.
    pub fn elements(&self) -> usize {
        self.shape.iter().product()
    }

    /// Axes.
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }
}

/// A tensor's type as burn names it.
pub(super) fn kept_as(dtype: WeightsDtype) -> DType {
    match dtype {
        WeightsDtype::Float32 => DType::F32,
        WeightsDtype::Bfloat16 => DType::BF16,
        WeightsDtype::Float16 => DType::F16,
    }
}

impl Shard {
    fn open(path: &Path) -> Result<Self, ModelError> {
        let unreadable = |source| ModelError::Io {
            path: path.into(),
            source,
            remedy: "every file that model.safetensors.index.json names must be in the model directory",
        };
        let file = bounded::open(path).map_err(unreadable)?;
        let (stamp, map) = Stamp::from_file(&file)
            .and_then(|stamp| Ok((stamp, mapping::map(&file)?)))
            .map_err(unreadable)?;
        if PICKLED.iter().any(|begins| map.starts_with(begins)) {
            return Err(ModelError::Io {
                path: path.into(),
                source: std::io::Error::new(ErrorKind::InvalidData, "a PyTorch pickle, not safetensors"),
                remedy: "load the model in Transformers and save it with save_pretrained",
            });
        }
        let (header_len, header) = SafeTensors::read_metadata(&map).map_err(|error| {
            ModelError::Safetensors { path: path.into(), problem: describe(&error, map.len()) }
        })?;
        // The length of the header precedes it, in 8 bytes.
        Ok(Self { path: path.into(), file, stamp, map: Arc::new(map), header, data_start: 8 + header_len })
    }

    /// The given part of the map as a tensor's storage. It must be aligned for its elements.
    fn share(&self, part: Range<usize>) -> Bytes {
        let whole = bytes::Bytes::from_owner(MapOwner(self.map.clone()));
        Bytes::from_shared(whole.slice(part), AllocationProperty::File)
    }
}

/// Keeps a map alive for as long as a tensor borrows from it.
struct MapOwner(Arc<Mmap>);

impl AsRef<[u8]> for MapOwner {
    fn as_ref(&self) -> &[u8] {
        &self.0
    }
}

/// What files of PyTorch's pickles begin with: a zip archive, or the pickle itself.
const PICKLED: [&[u8]; 2] = [b"PK\x03\x04", b"\x80\x02"];

/// What is wrong with a header, in words.
fn describe(error: &SafeTensorError, file_len: usize) -> String {
    match error {
        SafeTensorError::MetadataIncompleteBuffer => {
            format!("the header does not match the file's {file_len} bytes: the file is truncated or garbled")
        }
        SafeTensorError::HeaderTooSmall | SafeTensorError::InvalidHeaderLength => {
            format!("no valid safetensors header in {file_len} bytes: the file is truncated or garbled")
        }
        SafeTensorError::HeaderTooLarge => {
            "its first bytes are not a safetensors header (a Git LFS pointer or an HTML page?)".into()
        }
        other => format!("not a valid safetensors file ({other})"),
    }
}

/// The shards that an index names, in order of name.
fn indexed_files(dir: &Path, index: &Path) -> Result<Vec<PathBuf>, ModelError> {
    let text = bounded::read_text(index, MAX_METADATA_BYTES).map_err(|source| ModelError::Io {
        path: index.into(),
        source,
        remedy: "make the file readable",
    })?;
    let json: Value =
        serde_json::from_str(&text).map_err(|source| ModelError::Json { path: index.into(), source })?;
    let fields = Fields::new(index, &json)?;
    let Some(Value::Object(map)) = fields.get("weight_map") else {
        return Err(fields.error("weight_map", "missing, or not a map from tensor names to file names"));
    };
    let mut names = BTreeSet::new();
    for (tensor, file) in map {
        let plain = file.as_str().filter(|name| Path::new(name).components().count() == 1);
        names.insert(plain.ok_or_else(|| {
            fields.error(&format!("weight_map.{tensor}"), format!("{file}; expected a file name, not a path"))
        })?);
    }
    if names.is_empty() {
        return Err(fields.error("weight_map", "names no file"));
    }
    Ok(names.into_iter().map(|name| dir.join(name)).collect())
}
