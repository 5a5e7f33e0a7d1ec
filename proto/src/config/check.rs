//! Rules that hold between fields. All violations are reported at once, each with the field to change and how.

use std::{collections::BTreeSet, fmt};

use super::error::{ConfigError, Problem};
use crate::{
    limits::MAX_WORLD,
    run_spec::{
        CacheMode, Collectives, Data, DeviceChoice, Expert, Launch, Lora, LoraTargets, Memory, Model,
        Offload, Optimizer, Recompute, Run, RunSpec, Sensor, Tap, Train,
    },
};

/// Longest run name; it becomes part of file names and log lines.
const MAX_NAME: usize = 128;

impl RunSpec {
    /// Whether the fields agree with each other. Coordinator and workers only ever see a spec that passed.
    pub fn check(&self) -> Result<(), ConfigError> {
        let mut findings = Findings::default();
        check_run(&self.run, &mut findings);
        check_model(&self.model, &mut findings);
        if let Some(lora) = &self.lora {
            check_lora(lora, &mut findings);
        }
        check_expert(&self.expert, &mut findings);
        check_sensor(&self.sensor, &mut findings);
        check_data(&self.data, &mut findings);
        check_train(&self.train, &mut findings);
        check_optimizer(&self.optimizer, &mut findings);
        check_cache(self, &mut findings);
        check_memory(self, &mut findings);
        check_launch(&self.launch, &mut findings);
        findings.into_result()
    }

    /// Whether this run can be split over `world_size` workers; known only at launch.
    pub fn check_world(&self, world_size: usize) -> Result<(), ConfigError> {
        let mut findings = Findings::default();
        let most = self.train.global_batch.min(MAX_WORLD);
        findings.require(
            (1..=most).contains(&world_size),
            "train.global_batch",
            format_args!("{} samples cannot be shared by {world_size} workers", self.train.global_batch),
            "every worker needs at least one sample of each step: start fewer workers or raise it",
        );
        findings.into_result()
    }
}

#[derive(Default)]
struct Findings(Vec<Problem>);

impl Findings {
    fn require(&mut self, holds: bool, path: &str, finding: impl fmt::Display, remedy: &str) {
        if !holds {
            self.0.push(Problem::new(path, finding.to_string()).help(remedy));
        }
    }

    fn at_least_one(&mut self, path: &str, value: usize) {
        self.require(value >= 1, path, "must be at least 1, is 0", "give a positive whole number");
    }

    fn named(&mut self, path: &str, value: &str, what: &str) {
        self.require(!value.trim().is_empty(), path, "is empty", what);
    }

    fn in_range(&mut self, path: &str, value: f64, holds: bool, range: &str) {
        self.require(
            holds && value.is_finite(),
            path,
            format_args!("must be a finite number {range}, is {value}"),
            "correct it",
        );
    }

    fn into_result(self) -> Result<(), ConfigError> {
        if self.0.is_empty() { Ok(()) } else { Err(ConfigError::Invalid(self.0)) }
    }
}

fn check_run(run: &Run, f: &mut Findings) {
    let legal = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
    f.require(
        (1..=MAX_NAME).contains(&run.name.len()) && run.name.chars().all(legal) && !run.name.starts_with('.'),
        "run.name",
        format_args!("`{}` is not a usable name", run.name),
        "use 1 to 128 letters, digits, `-`, `_` and `.`, and no dot in front",
    );
    f.named("run.output_dir", &run.output_dir, "name the directory that everything is written to");
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
    f.named("data.path", &data.path, "name a LeRobot data set directory");
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
    let held: BTreeSet<_> = data.holdout_episodes.iter().collect();
    f.require(
        held.len() == data.holdout_episodes.len(),
        "data.holdout_episodes",
        "names an episode twice",
        "name each once",
    );
    f.named("data.prompt", &data.prompt, "`{task}` alone is a good prompt");
    f.at_least_one("data.threads", data.threads.unwrap_or(1));
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

fn check_train(train: &Train, f: &mut Findings) {
    match (train.steps, train.epochs) {
        (None, None) => {
            f.require(false, "train", "does not say how long", "give `train.steps` or `train.epochs`")
        }
        (Some(_), Some(_)) => f.require(
            false,
            "train.steps",
            "is given together with `train.epochs`",
            "remove one of them (on the command line: `train.epochs=`)",
        ),
        (Some(0), None) => f.at_least_one("train.steps", 0),
        (None, Some(0)) => f.at_least_one("train.epochs", 0),
        _ => {}
    }
    f.at_least_one("train.global_batch", train.global_batch);
    f.at_least_one("train.micro_batch", train.micro_batch);
    f.require(
        u32::try_from(train.global_batch).is_ok(),
        "train.global_batch",
        format_args!("{} is out of range", train.global_batch),
        "stay below 2^32 samples a step",
    );
    f.require(
        train.micro_batch <= train.global_batch,
        "train.micro_batch",
        format_args!("{} is larger than the global batch of {}", train.micro_batch, train.global_batch),
        "lower `train.micro_batch` or raise `train.global_batch`",
    );
    f.at_least_one("train.keep_checkpoints", train.keep_checkpoints);
    f.require(train.log_every >= 1, "train.log_every", "must be at least 1, is 0", "log every step with 1");
    if let Recompute::Every(every) = train.recompute {
        f.require(
            every >= 1,
            "train.recompute.every",
            "must be at least 1, is 0",
            "use `none` to keep everything",
        );
    }
}

fn check_optimizer(optimizer: &Optimizer, f: &mut Findings) {
    let rates = [
        ("optimizer.lr.lora", optimizer.lr.lora),
        ("optimizer.lr.expert", optimizer.lr.expert),
        ("optimizer.lr.sensor", optimizer.lr.sensor),
        ("optimizer.weight_decay", optimizer.weight_decay),
        ("optimizer.clip_norm", optimizer.clip_norm),
    ];
    for (path, value) in rates {
        f.in_range(path, value, value >= 0.0, "of at least 0");
    }
    f.require(
        optimizer.lr.expert != 0.0,
        "optimizer.lr.expert",
        "is 0, and then nothing trains at all: the expert's output layer starts at zero and passes no gradient on until it has moved",
        "give it a small rate, for instance 1e-6",
    );
    for beta in optimizer.betas {
        f.in_range("optimizer.betas", beta, (0.0..1.0).contains(&beta), "from 0 to below 1");
    }
    f.in_range("optimizer.eps", optimizer.eps, optimizer.eps > 0.0, "above 0");
    let ratio = optimizer.min_lr_ratio;
    f.in_range("optimizer.min_lr_ratio", ratio, (0.0..=1.0).contains(&ratio), "from 0 to 1");
}

fn check_cache(spec: &RunSpec, f: &mut Findings) {
    let cache = &spec.cache;
    for (path, span) in [("cache.interval", cache.interval), ("cache.live", cache.live)] {
        let lengths = [span.epochs, span.steps];
        let given = lengths.into_iter().flatten().collect::<Vec<_>>();
        f.require(
            matches!(given[..], [length] if length >= 1),
            path,
            "is not one length of at least 1",
            "write `{epochs: N}` or `{steps: N}`",
        );
    }
    // Spans of different kinds are compared when the data set's size is known.
    let longer = |live: Option<u64>, interval: Option<u64>| live.zip(interval).is_some_and(|(l, i)| l >= i);
    f.require(
        !longer(cache.live.epochs, cache.interval.epochs) && !longer(cache.live.steps, cache.interval.steps),
        "cache.live",
        "leaves nothing of `cache.interval` to take from the cache",
        "shorten it, or switch the cache off",
    );
    f.at_least_one("cache.encoder_batch", cache.encoder_batch.unwrap_or(1));
    f.require(
        cache.budget != Some(0),
        "cache.budget",
        "must be at least 1 byte, is 0",
        "remove it for no bound",
    );
    for (path, threshold) in
        [("cache.rebuild_above", cache.rebuild_above), ("cache.rebuild_below", cache.rebuild_below)]
    {
        let value = threshold.unwrap_or(0.0);
        f.in_range(path, value, value >= 0.0, "of at least 0");
    }
    match (cache.rebuild_above, cache.rebuild_below) {
        (None, Some(_)) => f.require(
            false,
            "cache.rebuild_below",
            "is given without `cache.rebuild_above`",
            "give both, or only `cache.rebuild_above`",
        ),
        (Some(above), Some(below)) => f.require(
            below <= above,
            "cache.rebuild_below",
            format_args!("{below} is above `cache.rebuild_above` ({above})"),
            "lower it",
        ),
        _ => {}
    }
    f.require(
        cache.rebuild_above.is_none() || cache.probe_samples >= 1,
        "cache.probe_samples",
        "is 0, and `cache.rebuild_above` needs a drift to compare",
        "give at least 1",
    );
    if cache.mode == CacheMode::Periodic {
        f.require(
            spec.lora.is_some(),
            "cache.mode",
            "is `periodic`, but nothing of the vision-language model trains",
            "use `exact`: without LoRA its features never change",
        );
        f.require(
            matches!(cache.tap, Tap::Auto | Tap::Final),
            "cache.tap",
            "is below the final hidden states, which is where `periodic` takes features",
            "use `auto`",
        );
    }
}

fn check_memory(spec: &RunSpec, f: &mut Findings) {
    let Memory { capacity, offload } = spec.memory;
    f.require(
        capacity != Some(0),
        "memory.capacity",
        "must be at least 1 byte, is 0",
        "remove it for no bound",
    );
    // What a backward pass runs again is read again; what is kept of a block keeps the block's weights.
    let kept = match spec.train.recompute {
        Recompute::None => "every block's",
        Recompute::Every(n) if n > 1 => "most blocks'",
        Recompute::Every(_) | Recompute::Selective | Recompute::Full => return,
    };
    f.require(
        offload != Offload::Layers || spec.lora.is_none(),
        "memory.offload",
        format_args!("is `layers`, but with this `train.recompute` {kept} weights stay in memory until the backward pass"),
        "set `train.recompute: full` or `selective`",
    );
}

fn check_launch(launch: &Launch, f: &mut Findings) {
    f.at_least_one("launch.threads_per_worker", launch.threads_per_worker.unwrap_or(1));
    let workers = launch.nproc_per_node.unwrap_or(1);
    f.require(
        (1..=MAX_WORLD).contains(&workers),
        "launch.nproc_per_node",
        format_args!("{workers} workers are out of range"),
        &format!("start 1 to {MAX_WORLD}"),
    );
    f.require(
        launch.device != DeviceChoice::Cpu || launch.collectives != Collectives::Nccl,
        "launch.collectives",
        "is `nccl`, and `launch.device` is `cpu`",
        "NCCL connects cards: use `auto` or `ring`, or another device",
    );
    if let Some(listen) = &launch.listen {
        let port =
            listen.rsplit_once(':').filter(|(host, _)| !host.is_empty()).map(|(_, port)| port.parse::<u16>());
        f.require(
            matches!(port, Some(Ok(_))),
            "launch.listen",
            format_args!("`{listen}` is not an address"),
            "write `HOST:PORT`, for instance `127.0.0.1:29400`; port 0 takes a free one",
        );
    }
}
