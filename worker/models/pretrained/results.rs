//! What `cox model forward` leaves: named tensors in a safetensors file.

use std::{collections::BTreeMap, path::Path};

use burn::tensor::Tensor;
use coxswain_nn::{files, kernels::Tape};
use safetensors::{Dtype, tensor::TensorView};

use super::error::ModelError;

/// Named tensors to be written.
#[derive(Default)]
pub struct Results(BTreeMap<String, (Dtype, Vec<usize>, Vec<u8>)>);

impl Results {
    /// Adds a tensor's elements.
    pub fn tensor<T: Tape, const D: usize>(&mut self, name: &str, tensor: Tensor<T, D>, shape: Vec<usize>) {
        let values = tensor.into_data().convert::<f32>().into_vec::<f32>().expect("converted to f32");
        self.floats(name, &values, shape);
    }

    /// Adds floats.
    pub fn floats(&mut self, name: &str, values: &[f32], shape: Vec<usize>) {
        let bytes = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        self.0.insert(name.into(), (Dtype::F32, shape, bytes));
    }

    /// Adds whole numbers.
    pub fn integers(&mut self, name: &str, values: &[i64], shape: Vec<usize>) {
        let bytes = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        self.0.insert(name.into(), (Dtype::I64, shape, bytes));
    }

    /// Writes the file, whole or not at all.
    pub fn write(&self, out: &Path) -> Result<(), ModelError> {
        let views = self.0.iter().map(|(name, (dtype, shape, bytes))| {
            let view =
                TensorView::new(*dtype, shape.clone(), bytes).expect("shapes were taken from the tensors");
            (name.as_str(), view)
        });
        let bytes = safetensors::serialize(views, None).expect("views of owned tensors always serialize");
        files::replace(out, |staged| std::fs::write(staged, &bytes)).map_err(|source| ModelError::Io {
            path: out.into(),
            source,
            remedy: "check that the directory exists, is writable, and has space",
        })
    }
}
