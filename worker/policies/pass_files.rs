//! What one pass of a policy reads from a file, and the file that its results are written to.
//!
//! ```text
//! in    observation.images.*    [b, 3, h, w], in 0..1; NAME_padding_mask [b], 0 without this camera
//!       observation.state       [b, state], as recorded
//!       action, action_is_pad   [b, chunk, action] and [b, chunk], as recorded
//!       noise, time             [b, chunk, padded] and [b]
//!       `tasks` in the metadata, a JSON list of b texts
//! out   loss, losses, velocity, actions.normalized, actions, grad.NAME
//! ```

use std::{
    collections::BTreeMap,
    io,
    path::{Path, PathBuf},
};

use coxswain_models::pretrained::error::ModelError;
use coxswain_nn::files::{floats, replace};
use coxswain_proto::{bounded, limits::MAX_METADATA_BYTES};
use safetensors::{
    Dtype, SafeTensors,
    tensor::{TensorView, serialize_to_file},
};

/// Tensors by name, each with its shape.
type NamedTensors = BTreeMap<String, (Vec<usize>, Vec<f32>)>;

/// What a pass takes, by LeRobot's names.
#[derive(Clone, Debug)]
pub struct PassInputs {
    path: PathBuf,
    tensors: NamedTensors,
    /// Each row's task.
    pub tasks: Vec<String>,
}

impl PassInputs {
    /// Reads a file.
    pub fn from_file(path: &Path) -> Result<Self, ModelError> {
        let source = |source| ModelError::Io { path: path.into(), source, remedy: "name a safetensors file" };
        let bytes = bounded::read(path, MAX_METADATA_BYTES).map_err(source)?;
        let garbled = |error: safetensors::SafeTensorError| ModelError::Safetensors {
            path: path.into(),
            problem: error.to_string(),
        };
        let file = SafeTensors::deserialize(&bytes).map_err(garbled)?;
        let (_, header) = SafeTensors::read_metadata(&bytes).map_err(garbled)?;
        let mut inputs = Self { path: path.into(), tensors: NamedTensors::new(), tasks: Vec::new() };
        for (name, view) in file.tensors() {
            let numbers = floats(&view).or_else(|| match view.dtype() {
                Dtype::BOOL | Dtype::U8 => Some(view.data().iter().map(|byte| f32::from(*byte)).collect()),
                _ => None,
            });
            let wanted = "expected F32, BF16 or F16, or BOOL for masks";
            let numbers =
                numbers.ok_or_else(|| inputs.wrong(&name, format!("{:?}; {wanted}", view.dtype())))?;
            inputs.tensors.insert(name, (view.shape().to_vec(), numbers));
        }
        let tasks = header.metadata().as_ref().and_then(|all| serde_json::from_str(all.get("tasks")?).ok());
        inputs.tasks = tasks.ok_or_else(|| {
            inputs.wrong("tasks", "missing; expected a JSON list of texts in the file's metadata".into())
        })?;
        match inputs.tasks.is_empty() {
            true => Err(inputs.wrong("tasks", "an empty list; expected a text for each row".into())),
            false => Ok(inputs),
        }
    }

    /// An error about one of them.
    pub fn wrong(&self, field: &str, problem: String) -> ModelError {
        ModelError::Config { path: self.path.clone(), field: field.into(), problem }
    }

    /// Rows.
    pub fn rows(&self) -> usize {
        self.tasks.len()
    }

    /// Whether it is there.
    pub fn has(&self, name: &str) -> bool {
        self.tensors.contains_key(name)
    }

    /// A tensor whose shape is so many rows of this one.
    pub fn rows_of(&self, name: &str, shape: &[usize]) -> Result<&[f32], ModelError> {
        let wanted = [&[self.rows()], shape].concat();
        match self.tensors.get(name) {
            Some((found, values)) if *found == wanted => Ok(values),
            Some((found, _)) => Err(self.wrong(name, format!("shape {found:?}; expected {wanted:?}"))),
            None => {
                let there = self.tensors.keys().map(String::as_str).collect::<Vec<_>>().join(", ");
                Err(self.wrong(name, format!("missing; expected shape {wanted:?}. The file has: {there}")))
            }
        }
    }

    /// Height and width of images, and their values.
    pub fn images(&self, name: &str) -> Result<([usize; 2], &[f32]), ModelError> {
        let (shape, values) = &self.tensors[name];
        match shape[..] {
            [rows, 3, height, width] if rows == self.rows() && height * width > 0 => {
                Ok(([height, width], values))
            }
            _ => Err(self.wrong(name, format!("shape {shape:?}; expected [{}, 3, h, w]", self.rows()))),
        }
    }
}

/// What a pass gives.
#[derive(Default)]
pub struct PassResults(NamedTensors);

impl PassResults {
    /// Adds a tensor.
    pub fn add(&mut self, name: impl Into<String>, shape: &[usize], values: Vec<f32>) {
        self.0.insert(name.into(), (shape.to_vec(), values));
    }

    /// Writes all to a file, whole or not at all.
    pub fn write(&self, out: &Path) -> Result<(), ModelError> {
        let bytes = |values: &[f32]| values.iter().flat_map(|value| value.to_le_bytes()).collect::<Vec<_>>();
        let all: Vec<_> = self.0.iter().map(|(name, (shape, values))| (name, shape, bytes(values))).collect();
        let views = all.iter().map(|(name, shape, bytes)| {
            let view = TensorView::new(Dtype::F32, (*shape).clone(), bytes);
            (name.as_str(), view.expect("shapes are those of the values"))
        });
        replace(out, |staged| serialize_to_file(views, None, staged).map_err(io::Error::other)).map_err(
            |source| ModelError::Io {
                path: out.into(),
                source,
                remedy: "check that the directory exists, is writable, and has space",
            },
        )
    }
}
