//! PEFT directories: `adapter_config.json`, `adapter_model.safetensors` and a `README.md`, read and written.
//!
//! Tensor names are `base_model.model.<module path>.lora_{A,B}.weight`, `.lora_magnitude_vector` with DoRA,
//! `.base_layer.bias` or `.bias` of biases that trained beside adapters (`bias`), of adapted modules and of
//! others, and `.weight` and `.bias` of modules that trained in full (`modules_to_save`; a tied LM head is
//! there under both names, with `ensure_weight_tying`); module paths in the
//! spelling of Transformers 5 or the older one, of which the newer is written. The configuration and the
//! tensors must name the same modules: where PEFT warns and goes on with an adapter that is partly zero, we
//! stop.

use std::{
    collections::BTreeMap,
    fs, io,
    path::{Path, PathBuf},
};

use coxswain_proto::{bounded, limits::MAX_METADATA_BYTES};
use safetensors::{
    Dtype,
    tensor::{TensorInfo, TensorView},
};
use serde_json::Value;

use super::{
    error::LoraError,
    full::{HEAD, TrainedModules, refused, tied_table},
    linear::{bias_key, magnitude_key, peft_keys, saved_key},
    module::{Module, ModuleKind},
    peft_config::{self, AdapterConfig},
    plan::{AdapterSpec, LoraPlan},
    targets::shown,
};
use crate::{
    dtypes::FrozenDtype,
    files::{self, StoredTensor},
    params::{Group, Init, ParamSpec, TrainableLayout},
    tensor_file::{OpenFile, TensorFile},
};

/// File names, as PEFT knows them.
const CONFIG: &str = "adapter_config.json";
const WEIGHTS: &str = "adapter_model.safetensors";

/// Under which metadata of the tensors stands how the model's weights were kept while they trained; PEFT
/// reads none.
const TRAINED_ABOVE: &str = "base_weights_dtype";

/// PEFT adds the base model's own embedding or head to an adapter that targets them.
const BASE_COPY: &str = ".base_layer.weight";
/// What a saved module was before it trained, in what other programs write of a wrapped model.
const ORIGINAL: &str = ".original_module.";

/// An adapter read from disk.
#[derive(Debug)]
pub struct PeftAdapter {
    plan: LoraPlan,
    saved: TrainedModules,
    /// Path of its tensors.
    path: PathBuf,
    /// By the name that a layout has for them.
    tensors: BTreeMap<String, StoredTensor>,
    /// As a run file spells it, if its tensors say so.
    trained_above: Option<String>,
}

impl PeftAdapter {
    /// Reads a PEFT directory for a model with these modules.
    pub fn read(dir: &Path, modules: &[Module]) -> Result<Self, LoraError> {
        let config_path = dir.join(CONFIG);
        let text = bounded::read_text(&config_path, MAX_METADATA_BYTES).map_err(|source| LoraError::Io {
            path: config_path.clone(),
            source,
            remedy: "name a directory written by PEFT's save_pretrained or by a run's export",
        })?;
        let json: Value = serde_json::from_str(&text).map_err(|error| LoraError::Adapter {
            path: config_path.clone(),
            problem: format!("not valid JSON: {error}"),
        })?;
        let config = AdapterConfig::from_json(&config_path, &json)?;
        let plan = config.plan(modules)?;
        let saved = TrainedModules::saved(&config.saved, config.tying, modules);
        let saved = saved.map_err(|problem| LoraError::Adapter {
            path: config_path.clone(),
            problem: format!("`modules_to_save`: {problem}"),
        })?;
        let mut whole = modules.iter().filter(|module| saved.contains(&module.name));
        if let Some(Module { name, .. }) = whole.find(|module| refused(module, Some(&plan)).is_some()) {
            return Err(LoraError::Adapter {
                path: config_path,
                problem: format!(
                    "`{name}` is both adapted and in `modules_to_save`; merge its adapter into the module, and save the directory again without that adapter"
                ),
            });
        }
        let path = dir.join(WEIGHTS);
        let opened = OpenFile::open(&path).and_then(TensorFile::new);
        let file = opened.map_err(|source| match source.kind() {
            io::ErrorKind::InvalidData => {
                LoraError::Adapter { path: path.clone(), problem: format!("{source}; copy the file again") }
            }
            _ => LoraError::Io {
                path: path.clone(),
                source,
                remedy: "only safetensors is supported; if the adapter is in adapter_model.bin, save it again with a current PEFT",
            },
        })?;
        let tensors = Weights { path: &path, file: &file, modules }.read(&plan, &saved)?;
        let note = file.metadata().metadata().as_ref();
        let trained_above = note.and_then(|note| note.get(TRAINED_ABOVE).cloned());
        Ok(Self { plan, saved, path, tensors, trained_above })
    }

    /// Which linears it adapts, and how.
    pub fn plan(&self) -> &LoraPlan {
        &self.plan
    }

    /// Which modules of the pretrained model it brings whole (`modules_to_save`).
    pub fn saved(&self) -> &TrainedModules {
        &self.saved
    }

    /// What it brings whole and a run that trains `full` leaves as the checkpoint has it, in words.
    pub fn brings_more_than(&self, full: &TrainedModules) -> Option<String> {
        let module = self.saved.beyond(full).next()?;
        Some(format!(
            "has a full copy of `{module}` (modules_to_save), but this run does not train that module; add \
             it to model.train"
        ))
    }

    /// Says that it trained above weights of other bits than a model's that is kept so; nothing if it does
    /// not say, or if neither was quantized.
    pub fn trained_above_other(&self, here: FrozenDtype) -> Option<String> {
        let there = self.trained_above.as_deref().filter(|there| *there != here.name())?;
        let packed = FrozenDtype::ALL.into_iter().filter(|dtype| dtype.packing().is_some());
        let packed = packed.map(FrozenDtype::name).any(|name| name == there || name == here.name());
        packed.then(|| {
            format!(
                "was trained on weights in {there}, but this run loads them as {}, with other rounding \
                 errors; set model.weights_dtype: {there}, or merge the adapter (`cox export --merged`) and \
                 set model.path to the merged model",
                here.name()
            )
        })
    }

    /// Tensors under the names that a layout has for them.
    pub fn into_tensors(self) -> Vec<StoredTensor> {
        self.tensors.into_values().collect()
    }

    /// Puts its values into the flat parameter buffer of a model that was loaded with its plan.
    pub fn fill(&self, layout: &TrainableLayout, values: &mut [f32]) -> Result<(), LoraError> {
        for param in layout.params() {
            let refuse = |problem| Err(LoraError::Adapter { path: self.path.clone(), problem });
            let tensor = match self.tensors.get(&param.name) {
                Some(tensor) => tensor,
                None if self.saved.trains(&param.name) || self.plan.trains_bias(&param.name) => {
                    let key = if self.plan.trains_bias(&param.name) { "bias" } else { "modules_to_save" };
                    return refuse(format!(
                        "has no tensor `{}`, which its `{key}` requires; copy the directory again",
                        param.name
                    ));
                }
                None => continue,
            };
            if tensor.shape != param.shape {
                return refuse(format!(
                    "`{}` has shape {:?}, but the model has {:?}; is the adapter for another model?",
                    param.name, tensor.shape, param.shape
                ));
            }
            values[param.range()].copy_from_slice(&tensor.values);
        }
        Ok(())
    }
}

/// A tensor's name without that of its adapter. PEFT leaves it out of what it writes, and other programs,
/// which save a wrapped model's own names, do not: `lora_A.default.weight`.
fn without_adapter_name(key: &str) -> String {
    const SAVED: &str = ".modules_to_save.";
    for part in [".lora_A.", ".lora_B."] {
        if let Some((module, rest)) = key.rsplit_once(part)
            && rest.strip_suffix(".weight").is_some_and(|name| !name.contains('.'))
        {
            return format!("{module}{part}weight");
        }
    }
    if let Some((module, name)) = key.rsplit_once(".lora_magnitude_vector.")
        && !name.trim_end_matches(".weight").contains('.')
    {
        return format!("{module}.lora_magnitude_vector");
    }
    let saved = key.split_once(SAVED).and_then(|(module, rest)| Some((module, rest.split_once('.')?.1)));
    saved.map_or_else(|| key.to_owned(), |(module, tensor)| format!("{module}.{tensor}"))
}

struct Weights<'a> {
    path: &'a Path,
    file: &'a TensorFile<OpenFile>,
    modules: &'a [Module],
}

impl Weights<'_> {
    fn read(
        &self,
        plan: &LoraPlan,
        saved: &TrainedModules,
    ) -> Result<BTreeMap<String, StoredTensor>, LoraError> {
        let (mut found, mut copies) = (BTreeMap::new(), Vec::new());
        // PEFT writes a head that is tied to a saved embedding once more, under its own name.
        let tied = tied_table(self.modules).filter(|table| saved.contains(&table.name));
        let tied_copy = tied.map(|_| saved_key(&format!("{HEAD}.weight")));
        for (stored, info) in self.file.tensors() {
            let key = without_adapter_name(&stored);
            if key.ends_with(BASE_COPY) || key.contains(ORIGINAL) {
                copies.push(key);
                continue;
            }
            if tied_copy.as_ref() == Some(&key) {
                continue;
            }
            let name = match self.bias(&key, plan) {
                Some(name) => name,
                None => self.newer_spelling(&key, saved)?,
            };
            if found.insert(name, info).is_some() {
                return Err(self.error(format!("tensor `{stored}` is stored under two spellings")));
            }
        }
        if !copies.is_empty() {
            tracing::warn!(file = %self.path.display(), tensors = %shown(&copies), "copies of base weights are ignored: the model's own are used");
        }
        let mut tensors = BTreeMap::new();
        for (module, spec) in plan.adapters() {
            let (inputs, outputs) = self.sides(module);
            let matrices =
                peft_keys(module).into_iter().zip([vec![spec.rank, inputs], vec![outputs, spec.rank]]);
            let magnitudes = spec.dora.then(|| (magnitude_key(module), vec![outputs]));
            for (key, shape) in matrices.chain(magnitudes) {
                let info = found.remove(&key).ok_or_else(|| {
                    self.error(format!("no tensor `{key}`, although {CONFIG} targets that module"))
                })?;
                if info.shape != shape {
                    let problem = format!(
                        "tensor `{key}` has shape {:?}; the model and {CONFIG} (rank {}) require {shape:?}; correct `r` or `rank_pattern`",
                        info.shape, spec.rank
                    );
                    return Err(self.error(problem));
                }
                let values = self.values(&key, info)?;
                let stored = StoredTensor { name: key.clone(), shape, values };
                tensors.insert(key, stored);
            }
        }
        for (name, info) in found {
            // What is left of adapters: those of modules that are saved have names of the checkpoint.
            if !saved.trains(&name) && !plan.trains_bias(&name) {
                let problem = format!("tensor `{name}` belongs to a module that {CONFIG} does not target");
                return Err(self.error(problem));
            }
            // Before any of it is read: the file may be of any size.
            if info.shape.iter().product::<usize>() > self.most_elements(&name) {
                let problem = format!(
                    "tensor `{name}` has shape {:?}, which is larger than the model's tensor; is the adapter for another model?",
                    info.shape
                );
                return Err(self.error(problem));
            }
            let (shape, values) = (info.shape.clone(), self.values(&name, info)?);
            tensors.insert(name.clone(), StoredTensor { name, shape, values });
        }
        let missing = saved.iter().find(|module| !tensors.contains_key(&format!("{module}.weight")));
        match missing {
            None => Ok(tensors),
            Some(module) => Err(self.error(format!(
                "no tensor `{}`, although {CONFIG} names that module in modules_to_save",
                saved_key(&format!("{module}.weight"))
            ))),
        }
    }

    /// The checkpoint's own name of a bias that trained beside adapters.
    fn bias(&self, key: &str, plan: &LoraPlan) -> Option<String> {
        let module = key.strip_prefix("base_model.model.")?.strip_suffix(".bias")?;
        let module = module.strip_suffix(".base_layer").unwrap_or(module);
        let found = self.modules.iter().find(|m| m.name == module || m.old_name == module)?;
        Some(format!("{}.bias", found.name)).filter(|name| plan.trains_bias(name))
    }

    /// `base_model.model.<module>.lora_A.weight` with the module in the newer spelling; of a saved module the
    /// checkpoint's own name.
    fn newer_spelling(&self, key: &str, saved: &TrainedModules) -> Result<String, LoraError> {
        let whole = key.strip_prefix("base_model.model.").and_then(|tensor| tensor.rsplit_once('.'));
        if let Some((module, tensor)) = whole
            && let Some(found) = self.modules.iter().find(|m| m.name == module || m.old_name == module)
            && saved.contains(&found.name)
        {
            return Ok(format!("{}.{tensor}", found.name));
        }
        let parts = key.strip_prefix("base_model.model.").and_then(|rest| {
            let ends = [".lora_A.weight", ".lora_B.weight", ".lora_magnitude_vector"];
            let module = ends.into_iter().find_map(|end| rest.strip_suffix(end))?;
            Some((module, &rest[module.len()..]))
        });
        let Some((module, suffix)) = parts else {
            return Err(self.error(format!(
                "unknown tensor `{key}`; expected base_model.model.<module> followed by .lora_A.weight, \
                 .lora_B.weight or .lora_magnitude_vector, or a tensor of a module in modules_to_save"
            )));
        };
        match self.modules.iter().find(|m| m.name == module || m.old_name == module) {
            Some(found) => Ok(format!("base_model.model.{}{suffix}", found.name)),
            None => Err(self.error(format!(
                "tensor `{key}` is for a module that the model does not have; is the adapter for another model?"
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

    /// Elements that a tensor of the checkpoint may have, by its name.
    fn most_elements(&self, tensor: &str) -> usize {
        let Some((module, part)) = tensor.rsplit_once('.') else { return 0 };
        let kind = self.modules.iter().find(|of| of.name == module).map(|of| of.kind);
        kind.map_or(0, |kind| if part == "bias" { kind.bias().unwrap_or(0) } else { kind.weight() })
    }

    fn values(&self, key: &str, info: &TensorInfo) -> Result<Vec<f32>, LoraError> {
        files::read_floats(self.file, key, info).map_err(|error| self.error(error.to_string()))
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
    /// What PEFT is to wrap the model in, `SEQ_2_SEQ_LM` for instance; left open if absent.
    pub task_type: Option<&'a str>,
    /// `README.md`.
    pub readme: &'a str,
    /// The tensor that is the LM head's weight as well, if the model has such a one.
    pub tied: Option<&'a str>,
    /// How the model's weights were kept while it trained, if that is to be said.
    pub trained_above: Option<FrozenDtype>,
}

/// Writes a directory that PEFT loads: the LoRA tensors of `values`, which has the layout's order, the biases
/// that trained beside them, and as `modules_to_save` what of the pretrained model trained in full.
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
    let keys = |(module, spec): (&str, &AdapterSpec)| {
        peft_keys(module).into_iter().chain(spec.dora.then(|| magnitude_key(module)))
    };
    let adapters = plan.adapters().flat_map(keys).map(|key| {
        let param = layout.get(layout.find(&key).expect("the layout was made with this plan"));
        (key, param)
    });
    let in_full = |param: &&ParamSpec| param.init == Init::Pretrained && param.group != Group::LORA;
    let whole = || layout.params().iter().filter(in_full);
    let biases = layout.params().iter().filter(|param| param.group == Group::LORA).filter_map(|param| {
        let module = param.name.strip_suffix(".bias")?;
        Some((bias_key(module, plan.adapter(module).is_some()), param))
    });
    // As PEFT has it: the table under the head's name, too, and `ensure_weight_tying`.
    let tied = whole().find(|param| Some(&*param.name) == origin.tied);
    let head = tied.map(|table| (saved_key(&format!("{HEAD}.weight")), table));
    let whole_modules = whole().map(|param| (saved_key(&param.name), param)).chain(head);
    let params = adapters.chain(biases).chain(whole_modules);
    let params = params.map(|(key, param)| {
        let bytes: &[u8] = bytemuck::cast_slice(&values[param.offset..param.offset + param.len()]);
        let view = TensorView::new(Dtype::F32, param.shape.clone(), bytes)
            .expect("a parameter's shape and length agree by construction");
        (key, view)
    });
    // Straight to the file: with whole modules the tensors are too many to be held once more.
    let weights = dir.join(WEIGHTS);
    let note = origin.trained_above.map(|dtype| (TRAINED_ABOVE, dtype.name()));
    files::replace(&weights, |path| files::write_views(path, params, note)).map_err(failed(weights))?;
    let saved = whole().filter_map(|param| Some(param.name.rsplit_once('.')?.0)).collect();
    let config = peft_config::to_json(plan, &saved, tied.is_some(), origin.base_model, origin.task_type);
    let config = format!("{config:#}\n");
    for (name, bytes) in [("README.md", origin.readme.as_bytes()), (CONFIG, config.as_bytes())] {
        let path = dir.join(name);
        files::replace(&path, |staged| fs::write(staged, bytes)).map_err(failed(path))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::without_adapter_name;

    #[test]
    fn the_adapters_name_is_no_part_of_a_tensors() {
        let q = "base_model.model.model.layers.0.self_attn.q_proj";
        for (end, plain) in [
            ("lora_A.default.weight", "lora_A.weight"),
            ("lora_B.my-robot.weight", "lora_B.weight"),
            ("lora_magnitude_vector.default", "lora_magnitude_vector"),
            ("lora_magnitude_vector.default.weight", "lora_magnitude_vector"),
            ("modules_to_save.default.weight", "weight"),
        ] {
            let plain = format!("{q}.{plain}");
            assert_eq!(without_adapter_name(&format!("{q}.{end}")), plain);
            assert_eq!(without_adapter_name(&plain), plain, "as PEFT writes it");
        }
        let other = format!("{q}.lora_A.two.parts.weight");
        assert_eq!(without_adapter_name(&other), other);
    }
}
