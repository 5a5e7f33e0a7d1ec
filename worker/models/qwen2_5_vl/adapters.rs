//! Which linears of the model a run adapts, and the adapter that it starts from.

use std::path::Path;

use coxswain_nn::{
    kernels::ModelBackend,
    lora::{Lora, LoraError, LoraPlan, Module, PeftAdapter},
    params::TrainableLayout,
};

use super::error::ModelError;

/// Which linears are adapted, and the adapter to start from, if there is one.
pub struct Adapters {
    /// The former.
    pub plan: LoraPlan,
    start: Option<PeftAdapter>,
}

impl Adapters {
    /// From the section `lora` and the model's modules. `why_not_head` says why the LM head takes none.
    pub fn resolve(lora: &Lora, modules: &[Module], why_not_head: &str) -> Result<Self, ModelError> {
        let plan = LoraPlan::resolve(lora, modules)?;
        if plan.adapter("lm_head").is_some() {
            let problem = format!("matches `lm_head`, {why_not_head}; leave it out");
            return Err(setting("lora.targets", problem));
        }
        let Some(dir) = &lora.init_from else { return Ok(Self { plan, start: None }) };
        let start = PeftAdapter::read(Path::new(dir), modules)?;
        match plan.difference(start.plan()) {
            None => Ok(Self { plan, start: Some(start) }),
            Some(difference) => Err(setting(
                "lora.init_from",
                format!(
                    "{dir} does not fit the run file's adapter settings (first: run file, second: adapter): {difference}; set lora.rank, lora.alpha and lora.targets as in its adapter_config.json"
                ),
            )),
        }
    }
}

/// What everything that trains starts from: draws of the seed, and the adapter that is gone on with.
/// Nothing on a backend without values.
pub fn initial_values<B: ModelBackend>(
    seed: u64,
    layout: &TrainableLayout,
    adapters: Option<&Adapters>,
) -> Vec<f32> {
    if !B::VALUES {
        return Vec::new();
    }
    let mut values = layout.initial_values(seed);
    if let Some(start) = adapters.and_then(|adapters| adapters.start.as_ref()) {
        start.fill(layout, &mut values);
    }
    values
}

/// The README of an adapter's directory; `trained` says how it came about.
pub fn readme(base_model: &str, trained: &str) -> String {
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
         from transformers import Qwen2_5_VLForConditionalGeneration\n\n\
         base = Qwen2_5_VLForConditionalGeneration.from_pretrained(\"{base_model}\")\n\
         model = PeftModel.from_pretrained(base, \"path/to/this/directory\")\n\
         ```\n"
    )
}

fn setting(field: &str, problem: String) -> ModelError {
    LoraError::Setting { field: field.into(), problem }.into()
}
