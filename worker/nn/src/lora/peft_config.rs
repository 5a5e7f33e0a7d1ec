//! `adapter_config.json`: read strictly, written completely.
//!
//! PEFT's fields fall into three groups: those that say which adapters there are, those that only matter
//! while PEFT itself trains, and those that change what an adapter computes, which are refused unless
//! neutral. A field nobody knows is reported, not refused.

use std::{collections::BTreeSet, path::Path};

use crate::lora::{Bias, LoraTargets};
use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::{
    error::LoraError,
    module::Module,
    plan::{LoraPlan, Recipe},
    targets::shown,
};

/// The PEFT release whose fields are written.
const PEFT_VERSION: &str = "0.21.2";

/// Fields that change what an adapter computes. Neutral values: null, false, an empty list or object, and
/// `"none"`.
const REFUSED: [&str; 12] = [
    "alora_invocation_tokens",
    "arrow_config",
    "fan_in_fan_out",
    "kasa_config",
    "layer_replication",
    "lora_bias",
    "megatron_config",
    "monteclora_config",
    "target_parameters",
    "trainable_token_indices",
    "use_bdlora",
    "use_qalora",
];

/// Fields that are understood, or that do not matter to a finished adapter.
const KNOWN: [&str; 30] = [
    "alpha_pattern",
    "auto_mapping",
    "base_model_name_or_path",
    "bias",
    "corda_config",
    "ensure_weight_tying",
    "eva_config",
    "exclude_modules",
    "inference_mode",
    "init_lora_weights",
    "layers_pattern",
    "layers_to_transform",
    "loftq_config",
    "lora_alpha",
    "lora_dropout",
    "lora_ga_config",
    "megatron_core",
    "modules_to_save",
    "peft_type",
    "peft_version",
    "qalora_group_size",
    "r",
    "rank_pattern",
    "revision",
    "runtime_config",
    "target_modules",
    "task_type",
    "use_dora",
    "use_rslora",
    "velora_config",
];

/// Initialisations that leave the base model's weights alone. Others (PiSSA, OLoRA, LoftQ, ..) make an
/// adapter that is only right on weights which PEFT changes while it loads.
const PLAIN_INITS: [&str; 3] = ["gaussian", "orthogonal", "eva"];

/// Most entries of a list or a table: more than any model that is known here has modules to name, each of
/// which is compared with all of them.
const MAX_ENTRIES: usize = 4096;

/// What `adapter_config.json` says about the adapters.
#[derive(Debug)]
pub struct AdapterConfig {
    /// Rank, alpha, targets, patterns, dropout.
    pub recipe: Recipe,
    /// `modules_to_save`: what trained in full beside the adapters.
    pub saved: Vec<String>,
    /// `ensure_weight_tying`: whether what is tied to one of these stays so.
    pub tying: bool,
}

impl AdapterConfig {
    /// Checks a parsed file; `path` appears in errors.
    pub fn from_json(path: &Path, json: &Value) -> Result<Self, LoraError> {
        let object = json.as_object().ok_or_else(|| adapter_error(path, "expected a JSON object"))?;
        let fields = Fields { path, object };
        fields.refuse_long_lists()?;
        fields.refuse_what_changes_the_adapter()?;
        let targets = fields.targets("target_modules")?.ok_or_else(|| {
            fields.error("target_modules", "missing; write the names of the adapted modules")
        })?;
        let recipe = Recipe {
            rank: fields
                .typed("r", "a positive whole number", |v| v.as_u64().filter(|r| *r > 0))?
                .unwrap_or(8) as usize,
            alpha: fields.typed("lora_alpha", "a number", Value::as_f64)?.unwrap_or(8.0),
            rslora: fields.typed("use_rslora", "true or false", Value::as_bool)?.unwrap_or(false),
            targets,
            rank_pattern: fields
                .pattern("rank_pattern", |v| v.as_u64().filter(|r| *r > 0).map(|r| r as usize))?,
            alpha_pattern: fields.pattern("alpha_pattern", Value::as_f64)?,
            dropout: fields
                .typed("lora_dropout", "a number from 0 to below 1", |v| {
                    v.as_f64().filter(|rate| (0.0..1.0).contains(rate))
                })?
                .unwrap_or(0.0),
            dora: fields.typed("use_dora", "true or false", Value::as_bool)?.unwrap_or(false),
            bias: fields
                .typed("bias", "none, all or lora_only", |v| Bias::deserialize(v).ok())?
                .unwrap_or_default(),
            exclude_modules: fields.targets("exclude_modules")?,
            layers_to_transform: fields.indices("layers_to_transform")?.unwrap_or_default(),
            layers_pattern: fields.strings("layers_pattern")?,
        };
        let tying = fields.typed("ensure_weight_tying", "true or false", Value::as_bool)?;
        Ok(Self { recipe, saved: fields.strings("modules_to_save")?, tying: tying.unwrap_or(false) })
    }

    /// The adapters it asks for. Expressions may be written for either spelling of module paths.
    pub fn plan(&self, modules: &[Module]) -> Result<LoraPlan, LoraError> {
        let attempt = |spell: fn(&Module) -> &str| -> Result<LoraPlan, LoraError> {
            let spelled: Vec<_> = modules
                .iter()
                .map(|module| Module { name: spell(module).into(), ..module.clone() })
                .collect();
            let names = modules.iter().map(|module| (spell(module).to_owned(), module.name.clone()));
            let plan = LoraPlan::from_recipe(self.recipe.clone(), &spelled, "target_modules")?;
            Ok(plan.renamed(&names.collect()))
        };
        match attempt(|module| &module.name) {
            Err(error @ LoraError::NothingMatches { .. }) => {
                attempt(|module| &module.old_name).map_err(|_| error)
            }
            result => result,
        }
    }
}

/// The file for a plan, with every field that PEFT writes, in PEFT's order. `tying`: whether the LM head is
/// tied to an embedding among those saved.
pub fn to_json(
    plan: &LoraPlan,
    saved: &BTreeSet<&str>,
    tying: bool,
    base_model: &str,
    task_type: Option<&str>,
) -> Value {
    let recipe = plan.recipe();
    // PEFT, too, writes the names that "all-linear" came to.
    let targets = match &recipe.targets {
        LoraTargets::Regex(text) if text.eq_ignore_ascii_case("all-linear") => {
            plan.adapters().map(|(name, _)| name).collect()
        }
        named => json!(named),
    };
    let listed = |empty: bool, list: Value| if empty { Value::Null } else { list };
    let ranks: Map<_, _> = recipe.rank_pattern.iter().map(|(key, rank)| (key.clone(), json!(rank))).collect();
    let alphas: Map<_, _> =
        recipe.alpha_pattern.iter().map(|(key, alpha)| (key.clone(), number(*alpha))).collect();
    json!({
        "alora_invocation_tokens": null,
        "alpha_pattern": alphas,
        "arrow_config": null,
        "auto_mapping": null,
        "base_model_name_or_path": base_model,
        "bias": recipe.bias.as_str(),
        "corda_config": null,
        "ensure_weight_tying": tying,
        "eva_config": null,
        "exclude_modules": recipe.exclude_modules,
        "fan_in_fan_out": false,
        "inference_mode": true,
        "init_lora_weights": true,
        "kasa_config": null,
        "layer_replication": null,
        "layers_pattern": listed(recipe.layers_pattern.is_empty(), json!(recipe.layers_pattern)),
        "layers_to_transform":
            listed(recipe.layers_to_transform.is_empty(), json!(recipe.layers_to_transform)),
        "loftq_config": {},
        "lora_alpha": number(recipe.alpha),
        "lora_bias": false,
        "lora_dropout": recipe.dropout,
        "lora_ga_config": null,
        "megatron_config": null,
        "megatron_core": "megatron.core",
        "modules_to_save": listed(saved.is_empty(), json!(saved)),
        "monteclora_config": null,
        "peft_type": "LORA",
        "peft_version": PEFT_VERSION,
        "qalora_group_size": 16,
        "r": recipe.rank,
        "rank_pattern": ranks,
        "revision": null,
        "target_modules": targets,
        "target_parameters": null,
        "task_type": task_type,
        "trainable_token_indices": null,
        "use_bdlora": null,
        "use_dora": recipe.dora,
        "use_qalora": false,
        "use_rslora": recipe.rslora,
        "velora_config": null,
    })
}

/// PEFT declares alpha as an integer; whole values are written as one.
fn number(value: f64) -> Value {
    if value.fract() == 0.0 && value.abs() < 1e15 { json!(value as i64) } else { json!(value) }
}

fn adapter_error(path: &Path, problem: impl Into<String>) -> LoraError {
    LoraError::Adapter { path: path.into(), problem: problem.into() }
}

struct Fields<'a> {
    path: &'a Path,
    object: &'a Map<String, Value>,
}

impl Fields<'_> {
    fn error(&self, field: &str, problem: impl std::fmt::Display) -> LoraError {
        adapter_error(self.path, format!("`{field}`: {problem}"))
    }

    fn get(&self, field: &str) -> Option<&Value> {
        self.object.get(field).filter(|value| !value.is_null())
    }

    fn refuse_long_lists(&self) -> Result<(), LoraError> {
        let entries = |value: &Value| value.as_array().map(Vec::len).or(value.as_object().map(Map::len));
        let long = |(_, value): &(&String, &Value)| entries(value).is_some_and(|found| found > MAX_ENTRIES);
        match self.object.iter().find(long) {
            Some((field, _)) => {
                Err(self.error(field, format!("more than {MAX_ENTRIES} entries; use a regular expression")))
            }
            None => Ok(()),
        }
    }

    fn refuse_what_changes_the_adapter(&self) -> Result<(), LoraError> {
        let kind = self.typed("peft_type", "a string", |v| v.as_str().map(str::to_owned))?;
        if kind.as_deref() != Some("LORA") {
            let found = kind.unwrap_or_default();
            return Err(self.error("peft_type", format!("{found:?}; only \"LORA\" is supported")));
        }
        for field in REFUSED {
            if let Some(value) = self.get(field).filter(|value| !is_neutral(value)) {
                let problem = format!(
                    "{value} is not supported; convert the adapter to plain LoRA, or train it again as such"
                );
                return Err(self.error(field, problem));
            }
        }
        match self.get("init_lora_weights") {
            Some(Value::String(init)) if !PLAIN_INITS.contains(&init.as_str()) => {
                let problem = format!(
                    "{init:?} changes the base model's weights; convert the adapter with save_pretrained(path_initial_model_for_weight_conversion=..)"
                );
                return Err(self.error("init_lora_weights", problem));
            }
            _ => {}
        }
        let is_known = |field: &str| KNOWN.contains(&field) || REFUSED.contains(&field);
        let unknown: Vec<_> = self.object.keys().filter(|field| !is_known(field)).collect();
        if !unknown.is_empty() {
            tracing::warn!(file = %self.path.display(), fields = %shown(&unknown), "unknown fields are ignored");
        }
        Ok(())
    }

    fn typed<T>(
        &self,
        field: &str,
        expected: &str,
        read: impl Fn(&Value) -> Option<T>,
    ) -> Result<Option<T>, LoraError> {
        let Some(value) = self.get(field) else { return Ok(None) };
        read(value).map(Some).ok_or_else(|| self.error(field, format!("{value}; expected {expected}")))
    }

    fn targets(&self, field: &str) -> Result<Option<LoraTargets>, LoraError> {
        self.typed(field, "a list of names or a regular expression", |value| match value {
            Value::String(text) => Some(LoraTargets::Regex(text.clone())),
            list => strings(list).map(LoraTargets::Suffixes),
        })
    }

    fn strings(&self, field: &str) -> Result<Vec<String>, LoraError> {
        let read = |value: &Value| match value {
            Value::String(one) => Some(vec![one.clone()]),
            list => strings(list),
        };
        Ok(self.typed(field, "a string or a list of strings", read)?.unwrap_or_default())
    }

    fn indices(&self, field: &str) -> Result<Option<Vec<u64>>, LoraError> {
        self.typed(field, "a layer number or a list of them", |value| match value {
            Value::Array(list) => list.iter().map(Value::as_u64).collect(),
            one => Some(vec![one.as_u64()?]),
        })
    }

    fn pattern<V>(
        &self,
        field: &str,
        read: impl Fn(&Value) -> Option<V>,
    ) -> Result<Vec<(String, V)>, LoraError> {
        let entries = self.typed(field, "an object of names and numbers", |value| {
            value.as_object()?.iter().map(|(key, value)| Some((key.clone(), read(value)?))).collect()
        })?;
        Ok(entries.unwrap_or_default())
    }
}

fn strings(value: &Value) -> Option<Vec<String>> {
    value.as_array()?.iter().map(|item| item.as_str().map(str::to_owned)).collect()
}

fn is_neutral(value: &Value) -> bool {
    match value {
        Value::Null | Value::Bool(false) => true,
        Value::Array(items) => items.is_empty(),
        Value::Object(fields) => fields.is_empty(),
        Value::String(text) => text == "none",
        _ => false,
    }
}
