//! Rules between the task's keys, and between them and the engine's.

use std::collections::BTreeSet;

use super::{Data, Expert, LearningRates, Model, Sensor, Tap, VlaSettings};
use coxswain_nn::lora::{Lora, LoraTargets};
use coxswain_proto::{
    config::Findings,
    run_spec::{CacheMode, Offload, Recompute, RunSpec},
};

pub(super) fn check(settings: &VlaSettings, spec: &RunSpec, f: &mut Findings) {
    check_model(&settings.model, f);
    if let Some(lora) = &settings.lora {
        check_lora(lora, f);
    }
    check_expert(&settings.expert, f);
    check_sensor(&settings.sensor, f);
    check_data(&settings.data, f);
    check_learning_rates(&settings.optimizer.lr, f);
    check_cache(settings, spec, f);
    check_offload(settings, spec, f);
}

fn check_model(model: &Model, f: &mut Findings) {
    f.named("model.path", &model.path, "name the directory of a Qwen2.5-VL checkpoint");
}

fn check_lora(lora: &Lora, f: &mut Findings) {
    f.at_least_one("lora.rank", lora.rank);
    f.in_range("lora.alpha", lora.alpha, lora.alpha > 0.0, "above 0");
    match &lora.targets {
        LoraTargets::Suffixes(names) => f.require(
            !names.is_empty() && names.iter().all(|name| !name.trim().is_empty()),
            "lora.targets",
            "names no module, or an empty one",
            "list module names, for instance `[q_proj, v_proj]`; to train without LoRA remove the section",
        ),
        LoraTargets::Regex(pattern) => check_pattern("lora.targets", pattern, f),
    }
    for (pattern, rank) in lora.rank_pattern.iter() {
        check_pattern("lora.rank_pattern", pattern, f);
        f.require(
            *rank >= 1,
            "lora.rank_pattern",
            format_args!("rank of `{pattern}` must be at least 1"),
            "remove it, or keep those modules out of `lora.targets`",
        );
    }
    for (pattern, alpha) in lora.alpha_pattern.iter() {
        check_pattern("lora.alpha_pattern", pattern, f);
        f.in_range("lora.alpha_pattern", *alpha, *alpha > 0.0, "above 0");
    }
    if let Some(path) = &lora.init_from {
        f.named("lora.init_from", path, "name a PEFT directory or remove the key");
    }
}

/// Compiles as the adapters will: with `fancy-regex`, because PEFT's patterns are Python's.
fn check_pattern(path: &str, pattern: &str, f: &mut Findings) {
    if let Err(error) = fancy_regex::Regex::new(pattern) {
        let first = error.to_string().lines().last().unwrap_or_default().trim().to_owned();
        f.require(
            false,
            path,
            format_args!("`{pattern}` is not a regular expression: {first}"),
            "write it as for Python's `re`, and quote it in YAML",
        );
    }
    f.named(path, pattern, "give a pattern");
}

fn check_expert(expert: &Expert, f: &mut Findings) {
    f.at_least_one("expert.width", expert.width);
    f.at_least_one("expert.layers", expert.layers);
    f.at_least_one("expert.heads", expert.heads);
    f.at_least_one("expert.repeated_noise", expert.repeated_noise);
    f.at_least_one("expert.sampling_steps", expert.sampling_steps);
    f.require(
        expert.heads == 0 || expert.width.is_multiple_of(expert.heads),
        "expert.heads",
        format_args!("{} heads do not divide the width {}", expert.heads, expert.width),
        "choose `expert.width` as a multiple of `expert.heads`",
    );
}

fn check_sensor(sensor: &Sensor, f: &mut Findings) {
    f.at_least_one("sensor.width", sensor.width);
    f.at_least_one("sensor.tokens", sensor.tokens);
}

fn check_data(data: &Data, f: &mut Findings) {
    f.named("data.state", &data.state, "name the state feature, for instance `observation.state`");
    f.named("data.action", &data.action, "name the action feature, for instance `action`");
    f.at_least_one("data.horizon", data.horizon);
    f.require(
        !data.cameras.is_empty() && data.cameras.iter().all(|camera| !camera.trim().is_empty()),
        "data.cameras",
        "names no camera, or an empty one",
        "list at least one image feature, for instance `[observation.images.front]`",
    );
    let cameras: BTreeSet<_> = data.cameras.iter().collect();
    f.require(cameras.len() == data.cameras.len(), "data.cameras", "names a camera twice", "name each once");
    if let Some(sensor) = &data.sensor {
        f.named("data.sensor", sensor, "name the sensor feature or remove the key");
    }
    f.named("data.prompt", &data.prompt, "`{task}` alone is a good prompt");
    f.at_least_one("data.min_pixels", data.min_pixels.unwrap_or(1));
    f.at_least_one("data.max_pixels", data.max_pixels.unwrap_or(1));
    if let (Some(min), Some(max)) = (data.min_pixels, data.max_pixels) {
        f.require(
            min <= max,
            "data.min_pixels",
            format_args!("{min} is above `data.max_pixels` ({max})"),
            "swap them or remove one",
        );
    }
}

fn check_learning_rates(rates: &LearningRates, f: &mut Findings) {
    for (group, rate) in [("lora", rates.lora), ("expert", rates.expert), ("sensor", rates.sensor)] {
        f.learning_rate(group, rate);
    }
    f.require(
        rates.expert != 0.0,
        "optimizer.lr.expert",
        "is 0, and then nothing trains at all: the expert's output layer starts at zero and passes no gradient on until it has moved",
        "give it a small rate, for instance 1e-6",
    );
}

fn check_cache(settings: &VlaSettings, spec: &RunSpec, f: &mut Findings) {
    let Some(tap) = f.read::<Tap>("cache.tap", &spec.cache.tap.0) else { return };
    if spec.cache.mode == CacheMode::Periodic {
        f.require(
            settings.lora.is_some(),
            "cache.mode",
            "is `periodic`, but nothing of the vision-language model trains",
            "use `exact`: without LoRA its features never change",
        );
        f.require(
            matches!(tap, Tap::Auto | Tap::Final),
            "cache.tap",
            "is below the final hidden states, which is where `periodic` takes features",
            "use `auto`",
        );
    }
}

fn check_offload(settings: &VlaSettings, spec: &RunSpec, f: &mut Findings) {
    // What a backward pass runs again is read again; what is kept of a block keeps the block's weights.
    let kept = match spec.train.recompute {
        Recompute::None => "every block's",
        Recompute::Every(n) if n > 1 => "most blocks'",
        Recompute::Every(_) | Recompute::Selective | Recompute::Full => return,
    };
    f.require(
        spec.memory.offload != Offload::Layers || settings.lora.is_none(),
        "memory.offload",
        format_args!("is `layers`, but with this `train.recompute` {kept} weights stay in memory until the backward pass"),
        "set `train.recompute: full` or `selective`",
    );
}
