//! PEFT directories: `adapter_config.json`, `adapter_model.safetensors` and a `README.md`, read and written.
//!
//! Tensor names are `base_model.model.<module path>.lora_{A,B}.weight`, module paths in the spelling of
//! Transformers 5 or the older one; the newer is written. The configuration and the tensors must name the
//! same modules: where PEFT warns and goes on with an adapter that is partly zero, we stop.

use std::{
    collections::BTreeMap,
    fs, io,
    path::{Path, PathBuf},
};

use safetensors::{Dtype, SafeTensors, tensor::TensorView};
use serde_json::Value;

use super::{
    error::LoraError,
    linear::peft_keys,
    module::{Module, ModuleKind},
    peft_config::{self, AdapterConfig},
    plan::LoraPlan,
};
use crate::{
    files::{self, StoredTensor},
    params::TrainableLayout,
};

/// File names, as PEFT knows them.
const CONFIG: &str = "adapter_config.json";
const WEIGHTS: &str = "adapter_model.safetensors";

/// PEFT adds the base model's own embedding or head to an adapter that targets them.
const BASE_COPY: &str = ".base_layer.weight";

/// An adapter read from disk.
#[derive(Debug)]
pub struct PeftAdapter {
    plan: LoraPlan,
    /// By key in the newer spelling.
    tensors: BTreeMap<String, Vec<f32>>,
}

impl PeftAdapter {
    /// Reads a PEFT directory for a model with these modules.
    pub fn read(dir: &Path, modules: &[Module]) -> Result<Self, LoraError> {
        let config_path = dir.join(CONFIG);
        let text = fs::read_to_string(&config_path).map_err(|source| LoraError::Io {
            path: config_path.clone(),
            source,
            remedy: "name a directory that PEFT's save_pretrained, or a run's export, has written",
        })?;
        let json: Value = serde_json::from_str(&text).map_err(|error| LoraError::Adapter {
            path: config_path.clone(),
            problem: format!("not valid JSON: {error}"),
        })?;
        let plan = AdapterConfig::from_json(&config_path, &json)?.plan(modules)?;
        let path = dir.join(WEIGHTS);
        let bytes = fs::read(&path).map_err(|source| LoraError::Io {
            path: path.clone(),
            source,
            remedy: "adapters are read from safetensors only; save adapter_model.bin again with a current PEFT",
        })?;
        let file = SafeTensors::deserialize(&bytes).map_err(|error| LoraError::Adapter {
            path: path.clone(),
            problem: format!("not a valid safetensors file ({error}): truncated or garbled; copy it again"),
        })?;
        let tensors = Weights { path: &path, file, modules }.read(&plan)?;
        Ok(Self { plan, tensors })
    }

    /// Which linears it adapts, and how.
    pub fn plan(&self) -> &LoraPlan {
        &self.plan
    }

    /// Its tensors under PEFT's names, module paths in the newer spelling.
    pub fn into_tensors(self) -> Vec<StoredTensor> {
        let shape = |name: &str, values: &Vec<f32>| {
            let module = name.trim_start_matches("base_model.model.");
            let of = |suffix| module.strip_suffix(suffix).and_then(|module| self.plan.adapter(module));
            match (of(".lora_A.weight"), of(".lora_B.weight")) {
                (Some(spec), _) => vec![spec.rank, values.len() / spec.rank],
                (None, Some(spec)) => vec![values.len() / spec.rank, spec.rank],
                (None, None) => vec![values.len()],
            }
        };
        let shapes: Vec<_> = self.tensors.iter().map(|(name, values)| shape(name, values)).collect();
        let tensors = self.tensors.into_iter().zip(shapes);
        tensors.map(|((name, values), shape)| StoredTensor { name, shape, values }).collect()
    }

    /// Puts its values into the flat parameter buffer of a model that was loaded with its plan.
    pub fn fill(&self, layout: &TrainableLayout, values: &mut [f32]) {
        for param in layout.params() {
            if let Some(tensor) = self.tensors.get(&param.name) {
                values[param.offset..param.offset + param.len()].copy_from_slice(tensor);
            }
        }
    }
}

struct Weights<'a> {
    path: &'a Path,
    file: SafeTensors<'a>,
    modules: &'a [Module],
}

impl Weights<'_> {
    fn read(&self, plan: &LoraPlan) -> Result<BTreeMap<String, Vec<f32>>, LoraError> {
        let mut found: BTreeMap<String, TensorView<'_>> = BTreeMap::new();
        for (key, view) in self.file.tensors() {
            if key.ends_with(BASE_COPY) {
                tracing::warn!(file = %self.path.display(), tensor = %key, "copy of a base weight is ignored: the model's own is used");
                continue;
            }
            let name = self.newer_spelling(&key)?;
            if found.insert(name, view).is_some() {
                return Err(self.error(format!("tensor `{key}` is there in both spellings")));
            }
        }
        let mut tensors = BTreeMap::new();
        for (module, spec) in plan.adapters() {
            let (inputs, outputs) = self.sides(module);
            for (key, shape) in peft_keys(module).into_iter().zip([[spec.rank, inputs], [outputs, spec.rank]])
            {
                let view = found.remove(&key).ok_or_else(|| {
                    self.error(format!("no tensor `{key}`, although {CONFIG} targets that module"))
                })?;
                if view.shape() != shape {
                    let problem = format!(
                        "tensor `{key}` has shape {:?}; the model and {CONFIG} (rank {}) ask for {shape:?}",
                        view.shape(),
                        spec.rank
                    );
                    return Err(self.error(problem));
                }
                let values = self.values(&key, &view)?;
                tensors.insert(key, values);
            }
        }
        match found.keys().next() {
            None => Ok(tensors),
            Some(key) => {
                Err(self.error(format!("tensor `{key}` belongs to a module that {CONFIG} does not target")))
            }
        }
    }

    /// `base_model.model.<module>.lora_A.weight` with the module in the newer spelling.
    fn newer_spelling(&self, key: &str) -> Result<String, LoraError> {
        let parts = key.strip_prefix("base_model.model.").and_then(|rest| {
            let module = rest.strip_suffix(".lora_A.weight").or(rest.strip_suffix(".lora_B.weight"))?;
            Some((module, &rest[module.len()..]))
        });
        let Some((module, suffix)) = parts else {
            return Err(self.error(format!(
                "tensor `{key}`; expected base_model.model.<module>.lora_A.weight or lora_B.weight: only plain LoRA on linear layers is supported"
            )));
        };
        match self.modules.iter().find(|m| m.name == module || m.old_name == module) {
            Some(found) => Ok(format!("base_model.model.{}{suffix}", found.name)),
            None => Err(self.error(format!(
                "tensor `{key}` is for a module that the model does not have: an adapter of another model?"
            ))),
        }
    }

    fn sides(&self, module: &str) -> (usize, usize) {
        self.modules
            .iter()
            .find_map(|m| match m.kind {
                ModuleKind::Linear { inputs, outputs, .. } if m.name == module => Some((inputs, outputs)),
                _ => None,
            })
            .expect("a plan only holds linears of the modules it was made from")
    }

    fn values(&self, key: &str, view: &TensorView<'_>) -> Result<Vec<f32>, LoraError> {
        let values = files::floats(view).ok_or_else(|| {
            self.error(format!("tensor `{key}` is stored as {:?}; expected F32, BF16 or F16", view.dtype()))
        })?;
        match values.iter().find(|value| !value.is_finite()) {
            None => Ok(values),
            Some(value) => Err(self.error(format!("tensor `{key}` holds {value}"))),
        }
    }

    fn error(&self, problem: String) -> LoraError {
        LoraError::Adapter { path: self.path.into(), problem }
    }
}

/// What a reader of an adapter is told of it.
#[derive(Clone, Copy, Debug)]
pub struct AdapterOrigin<'a> {
    /// The model that it is for: a name, or a directory.
    pub base_model: &'a str,
    /// Its `README.md`.
    pub readme: &'a str,
}

/// Writes a directory that PEFT loads: the LoRA tensors of `values`, which has the layout's order.
///
/// Each file appears complete or not at all; the configuration comes last, so that a directory with one is a
/// whole adapter.
pub fn write_adapter(
    dir: &Path,
    plan: &LoraPlan,
    layout: &TrainableLayout,
    values: &[f32],
    origin: &AdapterOrigin<'_>,
) -> Result<(), LoraError> {
    let failed = |path: PathBuf| {
        move |source| LoraError::Io {
            path,
            source,
            remedy: "check that the directory is writable and has space",
        }
    };
    fs::create_dir_all(dir).map_err(failed(dir.into()))?;
    let params = plan.adapters().flat_map(|(module, _)| peft_keys(module)).map(|key| {
        let param = layout.get(layout.find(&key).expect("the layout was made with this plan"));
        let bytes: &[u8] = bytemuck::cast_slice(&values[param.offset..param.offset + param.len()]);
        let view = TensorView::new(Dtype::F32, param.shape.clone(), bytes)
            .expect("a parameter's shape and length agree by construction");
        (key, view)
    });
    let metadata = [("format".to_owned(), "pt".to_owned())].into_iter().collect();
    let bytes =
        safetensors::serialize(params, Some(metadata)).expect("views of owned tensors always serialize");
    let config = format!("{:#}\n", peft_config::to_json(plan, origin.base_model));
    let files =
        [(WEIGHTS, bytes.as_slice()), ("README.md", origin.readme.as_bytes()), (CONFIG, config.as_bytes())];
    for (name, bytes) in files {
        let path = dir.join(name);
        publish(&path, bytes).map_err(failed(path))?;
    }
    Ok(())
}

/// Writes a file next to its place and renames it there.
pub fn publish(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let mut part = path.as_os_str().to_owned();
    part.push(".part");
    let part = PathBuf::from(part);
    let written = fs::write(&part, bytes)
        .and_then(|()| fs::File::open(&part)?.sync_all())
        .and_then(|()| fs::rename(&part, path));
    if written.is_err() {
        // The first error is the one to report; a leftover that cannot be removed changes nothing.
        let _ = fs::remove_file(&part);
    }
    written
}
