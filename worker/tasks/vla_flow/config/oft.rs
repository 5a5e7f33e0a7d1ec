//! What the head `oft` has no use for: keys of the flow, and what a sample has beside images and text.

use coxswain_proto::config::Findings;

use super::{Expert, HeadKind, Preset, VlaSettings};

/// Refuses by name what the head would not look at.
pub(super) fn check(settings: &VlaSettings, f: &mut Findings) {
    let (expert, data) = (&settings.expert, &settings.data);
    if expert.head != HeadKind::Oft {
        return;
    }
    let none = Expert::from_preset(Preset::Oft);
    let flow = [
        ("expert.width", expert.width == none.width),
        ("expert.layers", expert.layers == none.layers),
        ("expert.heads", expert.heads == none.heads),
        ("expert.convention", expert.convention == none.convention),
        ("expert.repeated_noise", expert.repeated_noise == none.repeated_noise),
        ("expert.sampling_steps", expert.sampling_steps == none.sampling_steps),
        ("expert.action_encoder", expert.action_encoder == none.action_encoder),
        ("expert.state_encoder", expert.state_encoder == none.state_encoder),
        ("expert.action_decoder", expert.action_decoder == none.action_decoder),
        ("expert.ends_width", expert.ends_width == none.ends_width),
        ("expert.feature_norm", expert.feature_norm == none.feature_norm),
        ("expert.future_tokens", expert.future_tokens == none.future_tokens),
        ("expert.dropout", expert.dropout == none.dropout),
    ];
    for (key, fits) in flow {
        f.require(
            fits,
            key,
            "belongs to the flow-matching expert, but the head `oft` is an MLP whose sizes follow from the model",
            "remove it, or choose `expert.head: flow` without the preset `oft`",
        );
    }
    f.require(
        !data.has_state(),
        "data.state",
        "is an input, but the head `oft` takes only images and text",
        "set `data.state: none`",
    );
    f.require(
        data.sensor.is_none() && data.sets.iter().all(|set| set.sensor.is_none()),
        "data.sensor",
        "is an input, but the head `oft` takes only images and text",
        "remove it",
    );
}
