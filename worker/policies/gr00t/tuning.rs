//! What of such a policy there is, and what of it trains: by default the projector, the blocks on actions,
//! the norm and the layers on hidden states, as LeRobot; what its `tune_*` keys say.

use coxswain_models::{
    joint::JointOutline,
    pretrained::{
        adapters::{HeadAdapter, TunedModules},
        error::ModelError,
        rules::Place,
    },
};
use coxswain_nn::lora::{LoraError, LoraTargets, Module, ModuleKind};

use super::{
    config::Gr00tConfig,
    ends::{embodiment_linears, linears},
    head::{NORM, blocks},
    names::{BACKBONE, HEAD, RULES, is_reached},
};
use crate::tuning::TuningSettings;

/// Why the table and the final norm do not train alone.
const UNREAD: &str = "which gets no gradient from the action loss, so it would never train";

/// All modules of such a policy that have weights, above a vision-language model with so many layers.
pub fn modules(config: &Gr00tConfig, vlm: &JointOutline) -> Vec<Module> {
    let named = |name: String, kind| Module { old_name: name.clone(), name, kind };
    let below = vlm.modules.iter().map(|module| named(format!("{BACKBONE}{}", module.name), module.kind));
    let linear = |at: &str, name: &str, [inputs, outputs]: [usize; 2]| {
        let kind = ModuleKind::Linear { inputs, outputs, bias: true, head: false };
        named(format!("{at}.{name}"), kind)
    };
    let norm = |name: String, width: usize| named(name, ModuleKind::Norm { width, bias: true });
    let sizes = &config.head;
    let all = blocks(sizes, config.dropout).flat_map(|(at, shape)| {
        let own = ["norm1", "norm3"].map(|name| norm(format!("{at}.{name}"), shape.width));
        let own = own.into_iter().filter(|_| !shape.timed);
        let linears = shape.linears().into_iter().map(|(name, features)| linear(&at, name, features));
        own.chain(linears).collect::<Vec<_>>()
    });
    // No adapter goes on them, and they have weights and biases: as convolutions of one pixel.
    let by_embodiment = embodiment_linears(sizes).map(|(name, [inputs, outputs])| {
        let shape = [sizes.embodiments * outputs, inputs, 1, 1, 1];
        named(format!("{HEAD}.{name}"), ModuleKind::Convolution { shape, bias: true })
    });
    let table = ModuleKind::Embedding { rows: sizes.positions, width: sizes.width, tied: false };
    let table = named(format!("{HEAD}.position_embedding"), table);
    let rest = linears(sizes).map(|(name, features)| linear(HEAD, name, features));
    let above = by_embodiment.into_iter().chain([table]).chain(rest);
    let above = above.chain([norm(format!("{HEAD}.{NORM}"), sizes.context)]).chain(all);
    below.chain(above).filter(|module| module.kind != ModuleKind::Other).collect()
}

/// What trains of such a policy.
pub fn tuned(
    config: &Gr00tConfig,
    vlm: &JointOutline,
    asked: TuningSettings<'_>,
) -> Result<TunedModules, ModelError> {
    let refuse =
        |field: &str, problem: String| Err(LoraError::Setting { field: field.into(), problem }.into());
    if asked.lora.is_some_and(|lora| lora.targets == LoraTargets::default()) {
        let example = r"`.*action_head\.model\.transformer_blocks\..*\.(to_q|to_v)`";
        return refuse(
            "lora.targets",
            format!("missing, and LeRobot has no default for GR00T; set it, for instance to {example}"),
        );
    }
    let own = own(config).into_iter().filter(|_| asked.lora.is_none());
    let patterns: Vec<String> = own.chain(asked.train.iter().cloned()).collect();
    let reached = |module: &Module| is_reached(&format!("{}.weight", module.name));
    let modules = modules(config, vlm);
    let tuned = TunedModules::resolve_reached(
        asked.lora,
        &patterns,
        &modules,
        &reached,
        HeadAdapter::Refused(UNREAD),
    )?;
    let is_head = |name: &str| (RULES.place)(&format!("{name}.weight")) == Place::Head;
    let found = tuned
        .trains()
        .lora
        .and_then(|plan| plan.adapters().map(|(name, _)| name.to_owned()).find(|name| is_head(name)));
    match found {
        Some(name) => refuse("lora.targets", format!("matches `{name}`, {UNREAD}; leave it out")),
        None => Ok(tuned),
    }
}

/// What trains where a run names nothing, as patterns of `model.train`.
fn own(config: &Gr00tConfig) -> Vec<String> {
    let trains = config.trains;
    let language = format!("{}model\\.language_model", BACKBONE.replace('.', "\\."));
    let top = (config.layers.saturating_sub(trains.top_layers)..config.layers).map(|layer| layer.to_string());
    let top = top.collect::<Vec<_>>().join("|");
    [
        (
            trains.projector,
            r"action_head\.(state_encoder|action_encoder|action_decoder|position_embedding)".into(),
        ),
        (trains.blocks, r"action_head\.model".into()),
        (trains.vl, format!(r"action_head\.({NORM}|vl_self_attention)")),
        (trains.language, format!(r"{language}\.(layers|embed_tokens)")),
        (trains.vision, r"backbone\.model\.model\.visual".into()),
        (trains.top_layers > 0, format!(r"{language}\.layers\.({top})")),
    ]
    .into_iter()
    .filter_map(|(trains, pattern)| trains.then_some(pattern))
    .collect()
}
