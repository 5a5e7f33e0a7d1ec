//! A sample in a safetensors file, as `cox data sample` leaves it for other programs.

use std::{
    collections::{BTreeMap, HashMap},
    path::Path,
};

use coxswain_data::DataError;
use coxswain_nn::files::replace;
use safetensors::{Dtype, tensor::TensorView};

/// A tensor over its bytes.
pub fn tensor(dtype: Dtype, shape: Vec<usize>, bytes: &[u8]) -> TensorView<'_> {
    TensorView::new(dtype, shape, bytes).expect("shapes are taken from the values")
}

/// A row of integers, `[1, n]`.
pub fn row(values: &[i64]) -> TensorView<'_> {
    tensor(Dtype::I64, vec![1, values.len()], bytemuck::cast_slice(values))
}

/// Writes the file, whole or not at all; with a header of texts if there is one.
pub fn write(
    out: &Path,
    tensors: BTreeMap<&str, TensorView<'_>>,
    header: Option<HashMap<String, String>>,
) -> Result<(), DataError> {
    let written = |path: &Path| safetensors::serialize_to_file(&tensors, header, path);
    replace(out, |path| written(path).map_err(std::io::Error::other)).map_err(DataError::io(out, "write"))
}
