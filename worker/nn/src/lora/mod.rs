//! LoRA (arXiv 2106.09685) in PEFT's terms: which modules get an adapter, how an adapted linear runs, and
//! PEFT directories.
//!
//! ```text
//! targets   PEFT's rules for names: lists, regular expressions, "all-linear", rank and alpha patterns
//! plan      the rules applied to a model: one rank and scale per adapted linear
//! linear    y = x W^T + b + s (x A^T) B^T, never forming W + s B A; with DoRA `params::decomposed`'s
//! group     those of one input: one by one, or joined
//! merged    weights with what their adapters have learned
//! full      which modules train in full instead
//! peft      adapter_config.json and adapter_model.safetensors, read and written
//! ```
//!
//! Not here: LoRA on embeddings and convolutions. It is refused by name. What dropout drops is
//! `kernels::dropout`'s.

mod error;
mod full;
mod group;
#[cfg(test)]
mod hostile;
pub mod linear;
mod merged;
mod module;
mod patterns;
pub mod peft;
pub mod peft_config;
pub mod plan;
mod settings;
pub mod targets;

pub use self::{
    error::LoraError,
    full::{TrainedModules, check_train},
    group::{GroupOutputs, JoinedWeights, LinearGroup},
    linear::{Adapter, LoraLinear, forward_all},
    merged::merged,
    module::{Module, ModuleKind},
    patterns::Patterns,
    peft::{AdapterOrigin, PeftAdapter, write_adapter},
    peft_config::AdapterConfig,
    plan::{AdapterSpec, LoraPlan},
    settings::{Bias, Lora, LoraTargets},
};
