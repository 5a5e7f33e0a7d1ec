//! What a head that reads every layer has no use for: sizes that the model gives it, a sensor, a text without
//! its end.

use coxswain_proto::config::Findings;

use super::{Expert, HeadKind, Preset, Projection, VlaSettings};

/// Refuses by name what the head would not look at.
pub(super) fn check(settings: &VlaSettings, f: &mut Findings) {
    let VlaSettings { expert, data, observation, .. } = settings;
    if expert.head != HeadKind::Layerwise {
        return;
    }
    let own = Expert::from_preset(Preset::QwenPi);
    let fixed = [
        ("expert.layers", expert.layers == own.layers, "it has one block per language model layer"),
        ("expert.feature_norm", !expert.feature_norm, "each of its blocks has its own norm"),
        ("expert.state_encoder", expert.state_encoder == own.state_encoder, "the state is in the prompt"),
        ("expert.action_decoder", expert.action_decoder == Projection::Mlp, "its decoder is an MLP (`mlp`)"),
    ];
    for (key, fits, why) in fixed {
        f.require(
            fits,
            key,
            format_args!("does not fit the head `layerwise`: {why}"),
            "remove it; `expert.preset: qwen_pi` sets what the head needs",
        );
    }
    f.require(
        data.sensor.is_none() && data.sets.iter().all(|set| set.sensor.is_none()),
        "data.sensor",
        "is an input, but the head `layerwise` does not take a sensor",
        "remove it",
    );
    f.require(
        observation.max_text_tokens.is_none() || !data.has_state(),
        "observation.max_text_tokens",
        "would cut off the state, which the head `layerwise` appends to the prompt",
        "remove it, or set `data.state: none`",
    );
}
