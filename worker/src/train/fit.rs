//! What to change when one sample at a time does not fit.

use coxswain_proto::run_spec::{Offload, Recompute, RunSpec, WeightsDtype};

/// Settings of this run that would take less, most effective first.
pub(super) fn advice(spec: &RunSpec) -> String {
    let mut settings: Vec<String> = Vec::new();
    if spec.train.recompute != Recompute::Full {
        settings.push("train.recompute: full".into());
    }
    if spec.model.weights_dtype == WeightsDtype::Float32 {
        settings.push("model.weights_dtype: bfloat16".into());
    }
    if spec.memory.offload != Offload::Layers {
        settings.push("memory.offload: layers (where frozen weights are copied out of their files)".into());
    }
    if spec.expert.repeated_noise > 1 {
        settings.push(format!("expert.repeated_noise below {}", spec.expert.repeated_noise));
    }
    if spec.data.cameras.len() > 1 {
        settings.push(format!("fewer than {} data.cameras", spec.data.cameras.len()));
    }
    if spec.memory.capacity.is_some() {
        settings.push("a larger memory.capacity".into());
    }
    settings.push("a smaller model or shorter prompts".into());
    settings.join(", or ")
}
