//! What of the model a run trains, adapted or in full, and what it starts from.

use std::path::Path;

use coxswain_nn::{
    dtypes::{FrozenDtype, WeightsDtype},
    kernels::ModelBackend,
    lora::{Lora, LoraError, LoraPlan, Module, PeftAdapter, TrainedModules, linear::module_of_magnitudes},
    params::{Init, ParamSpec, TrainableLayout},
    pulse,
};

use super::{
    checkpoint::{Checkpoint, CheckpointDir},
    error::ModelError,
    trains::Trains,
};

/// Whether a task's LM head takes an adapter, or trains in full.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HeadAdapter {
    /// It does.
    Taken,
    /// It trains in full, and takes no adapter for this reason.
    InFull(&'static str),
    /// It does neither, for this reason.
    Refused(&'static str),
}

/// Which linears are adapted, and the adapter to start from, if there is one.
pub struct Adapters {
    /// The former.
    pub plan: LoraPlan,
    start: Option<PeftAdapter>,
}

impl Adapters {
    /// From the section `lora` and the model's modules. `head` says whether the LM head takes one.
    pub fn resolve(lora: &Lora, modules: &[Module], head: HeadAdapter) -> Result<Self, ModelError> {
        let plan = LoraPlan::resolve(lora, modules)?;
        let refused = match (plan.adapter("lm_head"), head) {
            (Some(_), HeadAdapter::InFull(why) | HeadAdapter::Refused(why)) => Some(why),
            (Some(adapter), _) if adapter.dora => {
                Some("which runs in chunks, but lora.use_dora needs its whole weight at once")
            }
            _ => None,
        };
        if let Some(why) = refused {
            return Err(setting("lora.targets", format!("matches `lm_head`, {why}; leave `lm_head` out")));
        }
        let Some(dir) = &lora.init_from else { return Ok(Self { plan, start: None }) };
        let start = PeftAdapter::read(Path::new(dir), modules)?;
        match plan.difference(start.plan()) {
            None => Ok(Self { plan, start: Some(start) }),
            Some(difference) => Err(setting(
                "lora.init_from",
                format!(
                    "{dir} does not fit the run file's adapter settings: {difference}; set lora.rank, lora.alpha and lora.targets as in the adapter's adapter_config.json"
                ),
            )),
        }
    }
}

/// What of the pretrained model trains in a run, and what it starts from.
pub struct TunedModules {
    /// Adapters, if there are any.
    pub adapters: Option<Adapters>,
    /// Modules that train in full.
    pub full: TrainedModules,
}

impl TunedModules {
    /// From the section `lora`, if there is one, and the patterns of `model.train`.
    pub fn resolve(
        lora: Option<&Lora>,
        train: &[String],
        modules: &[Module],
        head: HeadAdapter,
    ) -> Result<Self, ModelError> {
        Self::resolve_reached(lora, train, modules, &|_| true, head)
    }

    /// From section and patterns as in [`resolve`](Self::resolve), for a model of which a part of the modules
    /// alone is `reached` by what trains it: others do not train in full, and patterns that mean nothing else
    /// are refused.
    pub fn resolve_reached(
        lora: Option<&Lora>,
        train: &[String],
        modules: &[Module],
        reached: &dyn Fn(&Module) -> bool,
        head: HeadAdapter,
    ) -> Result<Self, ModelError> {
        let adapters = lora.map(|lora| Adapters::resolve(lora, modules, head)).transpose()?;
        let plan = adapters.as_ref().map(|adapters| &adapters.plan);
        let of_full: Vec<Module> = modules.iter().filter(|module| reached(module)).cloned().collect();
        let full = TrainedModules::resolve(train, &of_full, plan)?;
        if let (true, HeadAdapter::Refused(why)) = (full.contains("lm_head"), head) {
            let problem = format!("matches `lm_head`, {why}; leave it out");
            return Err(setting("model.train", problem));
        }
        let start = adapters.as_ref().and_then(|adapters| adapters.start.as_ref());
        if let (Some(start), Some(lora)) = (start, lora)
            && let Some(problem) = start.brings_more_than(&full)
        {
            let dir = lora.init_from.as_deref().unwrap_or_default();
            return Err(setting("lora.init_from", format!("{dir} {problem}")));
        }
        Ok(Self { adapters, full })
    }

    /// As the model is loaded with it.
    pub fn trains(&self) -> Trains<'_> {
        Trains { lora: self.adapters.as_ref().map(|adapters| &adapters.plan), full: Some(&self.full) }
    }

    /// What everything that trains starts from: draws of the seed, the checkpoint in `dir`, named by these
    /// rules, whose frozen matrices are kept as `dtype`, and the adapter that is continued. Nothing on a
    /// backend without values.
    pub fn initial_values<B: ModelBackend>(
        &self,
        seed: u64,
        layout: &TrainableLayout,
        dir: CheckpointDir<'_>,
        dtype: FrozenDtype,
    ) -> Result<Vec<f32>, ModelError> {
        if !B::VALUES {
            return Ok(Vec::new());
        }
        let mut values = layout.initial_values(seed);
        fill_pretrained(dir, dtype, layout, &mut values)?;
        if let Some(start) = self.adapters.as_ref().and_then(|adapters| adapters.start.as_ref()) {
            if let Some(problem) = start.trained_above_other(dtype) {
                return Err(setting("lora.init_from", format!("names an adapter that {problem}")));
            }
            start.fill(layout, &mut values)?;
        }
        Ok(values)
    }
}

/// Puts what the checkpoint in `dir` has of what trains in full into its places, in float32, and into those
/// of magnitudes the norms of its rows, as they are in matrices of `dtype`.
fn fill_pretrained(
    dir: CheckpointDir<'_>,
    dtype: FrozenDtype,
    layout: &TrainableLayout,
    values: &mut [f32],
) -> Result<(), ModelError> {
    let read = |param: &&ParamSpec| matches!(param.init, Init::Pretrained | Init::RowNorms);
    let mut params = layout.params().iter().filter(read).peekable();
    if params.peek().is_none() {
        return Ok(());
    }
    let checkpoint = Checkpoint::open(dir.path, dir.rules)?;
    for param in params {
        pulse::beat();
        let place = &mut values[param.range()];
        if param.init == Init::Pretrained {
            let read = checkpoint.matrix(&param.name, &param.shape, &[param.len()], WeightsDtype::Float32)?;
            place.copy_from_slice(read.as_slice().expect("it was read as float32"));
            continue;
        }
        row_norms(&checkpoint, module_of_magnitudes(&param.name), dtype, place)?;
    }
    Ok(())
}

/// The norms of the rows of a module's weight, as it is kept.
fn row_norms(
    checkpoint: &Checkpoint,
    module: &str,
    dtype: FrozenDtype,
    norms: &mut [f32],
) -> Result<(), ModelError> {
    let of_row = |row: &[f32]| row.iter().map(|weight| weight * weight).sum::<f32>().sqrt();
    let weight = format!("{module}.weight");
    let shape = checkpoint.stored(&weight)?.1.to_vec();
    let inputs = shape[1];
    if let Some(packing) = dtype.packing().filter(|_| (checkpoint.rules.packs)(module)) {
        let matrix = checkpoint.quantized(&weight, [shape[0], inputs], packing)?;
        let mut row = vec![0.0; inputs];
        for (at, norm) in norms.iter_mut().enumerate() {
            matrix.dequantize(at * inputs, &mut row);
            *norm = of_row(&row);
        }
        return Ok(());
    }
    let read = checkpoint.matrix(&weight, &shape, &shape, dtype.dense())?.convert::<f32>();
    let rows = read.as_slice::<f32>().expect("converted to float32").chunks(inputs.max(1));
    norms.iter_mut().zip(rows).for_each(|(norm, row)| *norm = of_row(row));
    Ok(())
}

/// The README of an adapter's directory: `class` reads its model, and `trained` says how it came about.
pub fn readme(base_model: &str, class: &str, trained: &str) -> String {
    format!(
        "---\n\
         base_model: {base_model}\n\
         library_name: peft\n\
         tags:\n\
         - base_model:adapter:{base_model}\n\
         - lora\n\
         - transformers\n\
         ---\n\n\
         # LoRA adapter of {base_model}\n\n\
         {trained}\n\n\
         ```python\n\
         from peft import PeftModel\n\
         from transformers import {class}\n\n\
         base = {class}.from_pretrained(\"{base_model}\")\n\
         model = PeftModel.from_pretrained(base, \"path/to/this/directory\")\n\
         ```\n"
    )
}

fn setting(field: &str, problem: String) -> ModelError {
    LoraError::Setting { field: field.into(), problem }.into()
}
