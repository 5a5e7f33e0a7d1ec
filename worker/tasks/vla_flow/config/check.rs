//! Rules between the task's keys, and between them and the engine's.

use std::collections::BTreeSet;

use super::{
    ActionEncoder, Augmentation, Data, Expert, LearningRates, Sensor, TapSetting, VlaSettings, layerwise,
    observation::check_features, oft, sets,
};
use coxswain_models::pretrained::settings::check_blocks;
use coxswain_proto::{
    config::Findings,
    run_spec::{CacheMode, InitFrom, RunSpec},
};

pub(super) fn check(settings: &VlaSettings, spec: &RunSpec, f: &mut Findings) {
    settings.model.check(spec, f);
    if let Some(lora) = &settings.lora {
        lora.check(f);
    }
    check_expert(&settings.expert, f);
    oft::check(settings, f);
    layerwise::check(settings, f);
    check_sensor(&settings.sensor, f);
    check_data(&settings.data, f);
    settings.observation.check(f);
    sets::check(&settings.data, spec, f);
    settings.serve.check(&settings.data, f);
    check_learning_rates(settings, spec, f);
    check_cache(settings, spec, f);
    check_blocks(spec, settings.lora.is_some() || !settings.model.train.is_empty(), f);
    check_init(settings, spec, f);
}

fn check_init(settings: &VlaSettings, spec: &RunSpec, f: &mut Findings) {
    let adapter = settings.lora.as_ref().and_then(|lora| lora.init_from.as_ref());
    let named =
        matches!(&spec.train.init_from, Some(InitFrom::Groups(groups)) if groups.contains_key("lora"));
    f.require(
        !named || adapter.is_none(),
        "lora.init_from",
        "is given together with `train.init_from.lora`, which also names the adapter to start from",
        "remove one of them",
    );
    f.require(
        !named || settings.lora.is_some(),
        "train.init_from",
        "names the group `lora`, but this run trains no adapters",
        "add a section `lora`, or leave the group out",
    );
}

fn check_expert(expert: &Expert, f: &mut Findings) {
    f.at_least_one("expert.width", expert.width);
    f.at_least_one("expert.layers", expert.layers);
    f.at_least_one("expert.heads", expert.heads);
    f.at_least_one("expert.repeated_noise", expert.repeated_noise);
    f.at_least_one("expert.sampling_steps", expert.sampling_steps);
    f.at_least_one("expert.ends_width", expert.ends_width);
    let rate = (0.0..1.0).contains(&expert.dropout);
    f.in_range("expert.dropout", expert.dropout, rate, "from 0 to below 1");
    f.require(
        expert.preset.is_none_or(|preset| Expert::from_preset(preset).head == expert.head),
        "expert.head",
        "differs from the head of `expert.preset`",
        "remove `expert.head` or `expert.preset`",
    );
    f.require(
        expert.action_encoder == ActionEncoder::Linear || expert.width.is_multiple_of(2),
        "expert.action_encoder",
        format_args!("is `time_mlp`, which needs an even width, but the width is {}", expert.width),
        "choose an even `expert.width`, or `linear`",
    );
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
    check_features(data, f);
    f.at_least_one("data.horizon", data.horizon);
    f.at_least_one("data.action_stride", data.action_stride);
    f.require(
        data.delta_actions.is_empty() || data.delta_actions.contains(&true),
        "data.delta_actions",
        "has no dimension that is true",
        "give a list with one value for each dimension of the action, for instance `[true, true, false]`, or remove the key",
    );
    f.require(
        !data.cameras.is_empty() && data.cameras.iter().all(|camera| !camera.trim().is_empty()),
        "data.cameras",
        "is empty or lists an empty name",
        "list at least one image feature, for instance `[observation.images.front]`",
    );
    let cameras: BTreeSet<_> = data.cameras.iter().collect();
    f.require(cameras.len() == data.cameras.len(), "data.cameras", "names a camera twice", "name each once");
    f.named("data.prompt", &data.prompt, "write a template, for instance `{task}`");
    f.at_least_one("data.min_pixels", data.min_pixels.unwrap_or(1));
    f.at_least_one("data.max_pixels", data.max_pixels.unwrap_or(1));
    data.augmentation.check(f);
    if let (Some(min), Some(max)) = (data.min_pixels, data.max_pixels) {
        f.require(
            min <= max,
            "data.min_pixels",
            format_args!("{min} is above `data.max_pixels` ({max})"),
            "swap them or remove one",
        );
    }
}

fn check_learning_rates(settings: &VlaSettings, spec: &RunSpec, f: &mut Findings) {
    let LearningRates { lora, base, expert, sensor } = settings.optimizer.lr;
    for (group, rate) in [("lora", lora), ("base", base), ("expert", expert), ("sensor", sensor)] {
        f.learning_rate(group, rate);
    }
    let brought = match &spec.train.init_from {
        Some(InitFrom::Groups(groups)) => groups.contains_key("expert"),
        from => from.is_some(),
    };
    let VlaSettings { expert: Expert { train, .. }, model, data, .. } = settings;
    // Adapters in the expert have its rate.
    let adapted = settings.lora.is_some();
    let learns = [
        (*train || adapted, expert),
        (adapted, lora),
        (!model.train.is_empty(), base),
        (data.sensor.is_some(), sensor),
    ];
    let something = learns.iter().any(|(is_there, _)| *is_there);
    f.require(
        *train || brought,
        "expert.train",
        "is false, but there is no pretrained expert to keep frozen",
        "name one with `train.init_from`, or set `expert.train: true`",
    );
    f.require(
        something,
        "expert.train",
        "is false, and nothing else trains either",
        "add a section `lora`, name modules in `model.train`, or set `expert.train: true`",
    );
    f.require(
        !train || expert != 0.0 || brought,
        "optimizer.lr.expert",
        "is 0, so nothing would ever train: a new expert's output layer is zero, and passes no gradient on while it is zero",
        "start the expert from a trained one with `train.init_from`, or give it a small rate, for instance 1e-6",
    );
    f.require(
        !brought || !something || learns.into_iter().any(|(is_there, rate)| is_there && rate != 0.0),
        "optimizer.lr.expert",
        "is 0, and so is the rate of everything else that this run trains, so nothing would be learned",
        "add a section `lora` or patterns to `model.train`, or give a trained group a rate above 0",
    );
}

fn check_cache(settings: &VlaSettings, spec: &RunSpec, f: &mut Findings) {
    f.require(
        spec.cache.mode == CacheMode::Off || settings.data.augmentation == Augmentation::Off,
        "data.augmentation",
        "changes images from epoch to epoch, but `cache.mode` caches features that are computed from them",
        "use `cache.mode: off`, or `data.augmentation: off`",
    );
    let Some(tap) = f.read::<TapSetting>("cache.tap", &spec.cache.tap.0) else { return };
    if spec.cache.mode == CacheMode::Periodic {
        f.require(
            settings.lora.is_some() || !settings.model.train.is_empty(),
            "cache.mode",
            "is `periodic`, but nothing of the vision-language model trains",
            "use `exact`: the features of a frozen model never change",
        );
        f.require(
            settings.model.train.is_empty(),
            "model.train",
            "does not work with `cache.mode: periodic`: cached steps can pause only LoRA",
            "use LoRA instead, `cache.mode: exact` if only modules above the tap train, or `cache.mode: off`",
        );
        f.require(
            settings.expert.train || settings.data.sensor.is_some(),
            "expert.train",
            "is false, so the cached steps of `cache.mode: periodic` would train nothing",
            "use `cache.mode: exact` or `off`",
        );
        f.require(
            matches!(tap, TapSetting::Auto | TapSetting::Final),
            "cache.tap",
            "comes before the final hidden states, but `periodic` caches only those",
            "use `auto`",
        );
    }
}
