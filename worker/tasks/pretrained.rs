//! The pretrained model, whatever the task: its name by content, and what runs leave of it and may start from
//! again (`train.init_from`).
//!
//! ```text
//! adapter/            a PEFT directory
//! base.safetensors    modules that trained in full
//! ```
//!
//! And how tables of modules show what of it trains.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

use coxswain_models::pretrained::{
    adapters::TunedModules,
    checkpoint::CheckpointDir,
    content, directory,
    error::ModelError,
    rules::{Place, Rules},
    settings::Model,
};
use coxswain_nn::{
    dtypes::FrozenDtype,
    files::{StoredTensor, read_tensors, replace, write_tensors},
    kernels::Tape,
    lora::{AdapterOrigin, Lora, LoraError, LoraPlan, Module, PeftAdapter, TrainedModules, write_adapter},
    params::{Group, ParamSpec, TrainableLayout},
};
use coxswain_proto::run_spec::RunSpec;
use coxswain_task::{Artifact, Module as TableRow, TaskError};

/// Modules of the pretrained model that trained in full.
pub const BASE: Artifact = Artifact { path: "base.safetensors", what: "modules that were trained in full" };
/// Where the adapter is, as PEFT has it.
pub const ADAPTER_DIR: &str = "adapter";
/// What is there.
pub const ADAPTER: [Artifact; 2] = [
    Artifact { path: "adapter/adapter_config.json", what: "PEFT configuration of the adapter" },
    Artifact { path: "adapter/adapter_model.safetensors", what: "LoRA weights under PEFT's names" },
];
/// Files of a PEFT directory.
const PEFT: [&str; 2] = ["adapter_config.json", "adapter_model.safetensors"];
/// What a layout's names of adapter tensors begin with, which are PEFT's.
const OF_ADAPTERS: &str = "base_model.model.";
/// What a checkpoint's names of tensors that may train begin with.
const OF_MODEL: [&str; 4] = ["model.", "lm_head.", "encoder.", "decoder."];

/// The part of a section `lora` that means the model of these modules.
type OfModel<'a> = dyn Fn(&[Module]) -> Result<Option<Lora>, LoraError> + 'a;

/// What of the pretrained model a run trains, as its run file says.
pub struct Tuning<'a> {
    /// The modules of `model.path`; asked for where an adapter is read.
    pub modules: &'a dyn Fn() -> Result<Vec<Module>, TaskError>,
    /// `lora`.
    pub lora: &'a OfModel<'a>,
    /// `model.train`.
    pub train: &'a [String],
    /// `model.weights_dtype`.
    pub weights: FrozenDtype,
}

/// Names the content of the model that a run's task names ([`Task::base_digest`](coxswain_task::Task)), whose
/// names follow the rules that `rules` finds.
pub fn digest(
    spec: &RunSpec,
    rules: impl FnOnce(&Path) -> Result<Rules, ModelError>,
) -> Option<Result<String, TaskError>> {
    let path = spec.base()?.path;
    let dir = directory::whole(path).map_err(ModelError::from);
    Some(dir.and_then(|dir| content::digest(&dir, rules(&dir)?)).map_err(TaskError::bad_input))
}

/// The directory of the model that `path` names, with its weights where this backend has values.
pub fn directory<B: Tape<Base = B>>(path: &str) -> Result<PathBuf, ModelError> {
    let at_hand = if B::VALUES { directory::whole(path) } else { directory::outline(path) };
    at_hand.map_err(ModelError::from)
}

/// The files of weights at a path, `results` those that a run leaves beside its adapter; empty if it is none
/// of these.
pub fn files(path: &Path, results: &[&str]) -> Vec<PathBuf> {
    if path.is_file() {
        return vec![path.into()];
    }
    let adapter = [path.into(), path.join(ADAPTER_DIR)].into_iter().find(|dir| dir.join(PEFT[0]).is_file());
    let adapter = adapter.into_iter().flat_map(|dir| PEFT.map(|file| dir.join(file)));
    let results = results.iter().map(|file| path.join(file)).filter(|file| file.is_file());
    adapter.chain(results).collect()
}

/// The tensors of these files, for a run that trains `here`.
pub fn read(path: &Path, results: &[&str], here: &Tuning<'_>) -> Result<Vec<StoredTensor>, TaskError> {
    let mut tensors = Vec::new();
    for file in files(path, results) {
        match file.file_name().and_then(|name| name.to_str()) {
            Some(name) if name == PEFT[0] => {
                tensors.extend(read_adapter(file.parent().unwrap_or(path), here)?);
            }
            // Read together with its configuration.
            Some(name) if name == PEFT[1] && file.with_file_name(PEFT[0]).is_file() => {}
            _ => {
                let read = read_tensors(&file);
                tensors.extend(
                    read.map_err(|error| TaskError::bad_input(format!("{}: {error}", file.display())))?,
                );
            }
        }
    }
    Ok(tensors)
}

/// What a run that trains nothing but this model has left at `path`, under the names that a run with the same
/// keys has.
pub fn read_left(
    path: &Path,
    model: &Model,
    lora: Option<&Lora>,
    modules: &dyn Fn() -> Result<Vec<Module>, TaskError>,
) -> Result<Vec<StoredTensor>, TaskError> {
    let lora = |_: &[Module]| Ok(lora.cloned());
    let here = Tuning { modules, lora: &lora, train: &model.train, weights: model.weights_dtype };
    read(path, &[BASE.path], &here)
}

/// What that which trains of this model starts from.
pub fn initial_values<B: Tape<Base = B>>(
    tuned: &TunedModules,
    model: &Model,
    rules: Rules,
    layout: &TrainableLayout,
    seed: u64,
) -> Result<Vec<f32>, TaskError> {
    let path = &directory::<B>(&model.path).map_err(TaskError::bad_input)?;
    let values = tuned.initial_values::<B>(seed, layout, CheckpointDir { path, rules }, model.weights_dtype);
    values.map_err(TaskError::bad_input)
}

/// Writes what trained of a model that has nothing else: adapters by this plan, and modules in full.
pub fn leave(
    dir: &Path,
    plan: Option<&LoraPlan>,
    layout: &TrainableLayout,
    values: &[f32],
    origin: &AdapterOrigin<'_>,
) -> Result<Vec<Artifact>, TaskError> {
    let mut written = Vec::new();
    if layout.params().iter().any(|param| param.group == Group::BASE) {
        let path = dir.join(BASE.path);
        replace(&path, |path| write_tensors(path, layout, values, |param| param.group == Group::BASE))
            .map_err(|error| TaskError::io(format!("write {}: {error}", path.display())))?;
        written.push(BASE);
    }
    if let Some(plan) = plan {
        write_adapter(&dir.join(ADAPTER_DIR), plan, layout, values, origin)
            .map_err(|error: LoraError| TaskError::io(error))?;
        written.extend(ADAPTER);
    }
    Ok(written)
}

/// The part that a tensor is of, by its name or PEFT's, as tables name parts; empty for one that has no name.
pub fn part_of(rules: Rules, tensor: &str) -> &'static str {
    match (rules.place)(tensor.strip_prefix(OF_ADAPTERS).unwrap_or(tensor)) {
        Place::Vision(_) => "vision",
        Place::Table | Place::Layer(_) | Place::FinalNorm => "language",
        Place::Head => "head",
        Place::Other => "",
    }
}

/// Rows of the start-up table for what trains: by group, and in it by `parts`, of which `part_of` tells a
/// tensor's.
pub fn trained_rows(
    layout: &TrainableLayout,
    parts: &[&'static str],
    part_of: impl Fn(&str) -> &'static str,
) -> Vec<TableRow> {
    let groups = [Group::LORA, Group::BASE].into_iter();
    let rows = groups.flat_map(|group| parts.iter().map(move |part| (group, *part)));
    let rows = rows.map(|(group, part)| {
        let of = |param: &&ParamSpec| param.group == group && part_of(&param.name) == part;
        let params: Vec<_> = layout.params().iter().filter(of).collect();
        TableRow::of_params(format!("{part}.{group}"), true, &params)
    });
    rows.filter(|row| row.tensors > 0).collect()
}

/// Puts what a run has left in `dir` into the places of a model that was loaded as that run's.
pub fn fill(
    dir: &Path,
    tensors: Vec<StoredTensor>,
    layout: &TrainableLayout,
    values: &mut [f32],
) -> Result<(), TaskError> {
    let refused = |problem: String| Err(TaskError::bad_input(format!("{}: {problem}", dir.display())));
    let mut found: BTreeMap<_, _> = tensors.into_iter().map(|tensor| (tensor.name.clone(), tensor)).collect();
    if found.is_empty() {
        return refused(
            "has no results; if the run is unfinished, export its newest checkpoint with `cox export`, and \
             name RUN_DIR/export"
                .into(),
        );
    }
    for param in layout.params() {
        match found.remove(&param.name) {
            Some(tensor) if tensor.shape == param.shape => {
                values[param.range()].copy_from_slice(&tensor.values);
            }
            other => {
                let there = other.map_or("is missing".to_owned(), |there| format!("is {:?}", there.shape));
                return refused(format!(
                    "`{}` {there}, expected {:?}; files and run_spec.json must come from the same run",
                    param.name, param.shape
                ));
            }
        }
    }
    Ok(())
}

/// Ranks that differ show as shapes. A scale that differs, magnitudes that this run has not or would draw,
/// and modules that the adapter was trained above would not show at all.
fn read_adapter(dir: &Path, here: &Tuning<'_>) -> Result<Vec<StoredTensor>, TaskError> {
    let modules = &(here.modules)()?;
    let adapter = PeftAdapter::read(dir, modules).map_err(TaskError::bad_input)?;
    let refused = |problem| Err(TaskError::bad_input(format!("{} {problem}", dir.display())));
    if let Some(problem) = adapter.trained_above_other(here.weights) {
        return refused(problem);
    }
    let lora = (here.lora)(modules).map_err(TaskError::bad_input)?;
    let plan = lora.map(|lora| LoraPlan::resolve(&lora, modules)).transpose();
    let plan = plan.map_err(TaskError::bad_input)?;
    if let Some(ours) = &plan {
        let other = adapter.plan().adapters().find_map(|(name, theirs)| {
            let ours = ours.adapter(name).filter(|ours| ours.rank == theirs.rank)?;
            (ours.scale != theirs.scale || ours.dora != theirs.dora)
                .then(|| format!("`{name}`: ({theirs}) in the adapter, but ({ours}) in this run"))
        });
        if let Some(difference) = other {
            return refused(format!(
                "differs in {difference}; set lora.alpha, lora.rslora, lora.use_dora as in the adapter's {}",
                PEFT[0]
            ));
        }
    }
    let full = TrainedModules::resolve(here.train, modules, plan.as_ref()).map_err(TaskError::bad_input)?;
    match adapter.brings_more_than(&full) {
        Some(problem) => refused(problem),
        None => Ok(adapter.into_tensors()),
    }
}

/// The group of a tensor of the pretrained model or of its adapters, by its name.
pub fn group_of(tensor: &str) -> Option<Group> {
    if tensor.starts_with(OF_ADAPTERS) {
        return Some(Group::LORA);
    }
    OF_MODEL.iter().any(|start| tensor.starts_with(start)).then_some(Group::BASE)
}

/// Keys of the section `lora` that its weights depend on beyond their shapes, where two runs differ in them.
pub fn other_meaning(here: Option<&Lora>, there: &RunSpec, groups: &[Group]) -> Vec<String> {
    // Of whatever task: all of them have the same section.
    let there = serde_json::to_value(there).ok().and_then(|mut spec| Some(spec.get_mut("lora")?.take()));
    let there: Option<Lora> = there.and_then(|lora| serde_json::from_value(lora).ok()).flatten();
    let (true, Some(ours), Some(theirs)) = (groups.contains(&Group::LORA), here, there) else {
        return Vec::new();
    };
    let patterns = |lora: &Lora| format!("{:?}", lora.alpha_pattern.iter().collect::<Vec<_>>());
    let keys = [
        ("lora.alpha", ours.alpha.to_string(), theirs.alpha.to_string()),
        ("lora.use_dora", ours.use_dora.to_string(), theirs.use_dora.to_string()),
        ("lora.rslora", ours.rslora.to_string(), theirs.rslora.to_string()),
        ("lora.alpha_pattern", patterns(ours), patterns(&theirs)),
    ];
    let differing = keys.into_iter().filter(|(_, here, there)| here != there);
    differing.map(|(key, here, there)| format!("{key}: {there} there, {here} here")).collect()
}
