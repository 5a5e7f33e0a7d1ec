//! Files that appear whole or not at all, and trainables in them.

use std::{
    collections::HashMap,
    fs::{self, File},
    io,
    path::{Path, PathBuf},
};

use coxswain_proto::in_place;
use half::{bf16, f16};
use safetensors::{
    Dtype, SafeTensorError,
    tensor::{TensorInfo, TensorView},
};

use crate::{
    params::{ParamSpec, TrainableLayout},
    pulse,
    tensor_file::{OpenFile, ReadAt, TensorFile},
};

/// Lets `write` make a file beside `path`, brings it to the disk, and renames it into place. Nothing is left
/// behind on failure.
pub fn replace(path: &Path, write: impl FnOnce(&Path) -> io::Result<()>) -> io::Result<()> {
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(".tmp");
    let staged: PathBuf = path.with_file_name(name);
    let result = in_place::vacate(&staged)
        .and_then(|()| write(&staged))
        .and_then(|()| {
            let file = File::open(&staged)?;
            pulse::allow(file.metadata()?.len());
            file.sync_all()
        })
        .and_then(|()| fs::rename(&staged, path));
    result.inspect_err(|_| {
        let _ = fs::remove_file(&staged);
    })
}

/// One tensor of a file.
#[derive(Clone, Debug, PartialEq)]
pub struct StoredTensor {
    /// The name that a layout has for it.
    pub name: String,
    /// Row-major.
    pub shape: Vec<usize>,
    /// Elements.
    pub values: Vec<f32>,
}

/// Reads all tensors of a safetensors file of float32, bfloat16 or float16, in the order of their names.
pub fn read_tensors(path: &Path) -> io::Result<Vec<StoredTensor>> {
    let file = TensorFile::new(OpenFile::open(path)?)?;
    let mut tensors = Vec::new();
    // One after another: the file is never there as a whole beside what is made of it.
    for (name, info) in file.tensors() {
        let values = read_floats(&file, &name, info)?;
        tensors.push(StoredTensor { shape: info.shape.clone(), name, values });
    }
    tensors.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(tensors)
}

/// The finite elements of one tensor of a file.
pub(crate) fn read_floats<S: ReadAt>(
    file: &TensorFile<S>,
    name: &str,
    info: &TensorInfo,
) -> io::Result<Vec<f32>> {
    let refused = |detail: String| io::Error::new(io::ErrorKind::InvalidData, detail);
    let mut bytes = vec![0; info.data_offsets.1 - info.data_offsets.0];
    file.read(info, 0, &mut bytes)?;
    let view = TensorView::new(info.dtype, info.shape.clone(), &bytes);
    let view = view.map_err(|error| refused(format!("tensor `{name}`: {error}")))?;
    let values = floats(&view).ok_or_else(|| {
        refused(format!("tensor `{name}` is stored as {:?}; expected F32, BF16 or F16", view.dtype()))
    })?;
    if let Some(value) = values.iter().find(|value| !value.is_finite()) {
        return Err(refused(format!(
            "tensor `{name}` holds {value}: training diverged; use an earlier checkpoint"
        )));
    }
    Ok(values)
}

/// The elements of a tensor of one of the usual float types.
pub fn floats(view: &TensorView<'_>) -> Option<Vec<f32>> {
    let bytes = view.data();
    Some(match view.dtype() {
        Dtype::F32 => bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect(),
        Dtype::BF16 => bytes.chunks_exact(2).map(|b| bf16::from_le_bytes([b[0], b[1]]).to_f32()).collect(),
        Dtype::F16 => bytes.chunks_exact(2).map(|b| f16::from_le_bytes([b[0], b[1]]).to_f32()).collect(),
        _ => return None,
    })
}

/// Writes the tensors that `wanted` picks as a safetensors file; constants only if `values` has them.
pub fn write_tensors(
    path: &Path,
    layout: &TrainableLayout,
    values: &[f32],
    wanted: impl Fn(&ParamSpec) -> bool,
) -> io::Result<()> {
    let there = layout.whole().filter(|param| param.range().end <= values.len());
    let views = there.filter(|param| wanted(param)).map(|param| {
        let values = bytemuck::cast_slice(&values[param.offset..param.offset + param.len()]);
        let view = TensorView::new(Dtype::F32, param.shape.clone(), values);
        (param.name.clone(), view.expect("shape and values come from one layout"))
    });
    write_views(path, views, None)
}

/// Writes tensors as a safetensors file, without a copy of them; `note` is a key and its value among the
/// file's metadata.
pub(crate) fn write_views<'a>(
    path: &Path,
    views: impl Iterator<Item = (String, TensorView<'a>)>,
    note: Option<(&str, &str)>,
) -> io::Result<()> {
    let pairs: Vec<_> = [("format", "pt")].into_iter().chain(note).collect();
    // The file has the order of the map, which every map draws anew: equal tensors are to give equal files.
    let metadata = loop {
        let pairs = pairs.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned()));
        let drawn: HashMap<String, String> = pairs.collect();
        if drawn.keys().is_sorted_by(|a, b| a > b) {
            break drawn;
        }
    };
    safetensors::serialize_to_file(views, Some(metadata), path).map_err(|error| match error {
        // As the system said it: of a full disk there is something to say.
        SafeTensorError::IoError(source) => source,
        error => io::Error::other(error),
    })
}
