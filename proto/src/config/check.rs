//! Rules that hold between the engine's fields. All violations are reported at once, each with the field to
//! change and how.

use std::collections::BTreeSet;

use super::{bounds, error::ConfigError, findings::Findings};
use crate::{
    limits::{MAX_SKIPPED_STEPS, MAX_WORLD, MIN_BUCKET_CACHE},
    run_spec::{
        Cache, CacheMode, Collectives, Data, DeviceChoice, InitFrom, Launch, LossScale, Memory, Recompute,
        Run, RunSpec, ScheduleOver, Train,
    },
};

/// Longest run name; it becomes part of file names and log lines.
const MAX_NAME: usize = 128;
/// How addresses begin of what takes conditional writes.
const BUCKETS: [&str; 6] = ["s3://", "s3a://", "gs://", "az://", "abfs://", "abfss://"];

impl RunSpec {
    /// Whether the engine's fields agree with each other. Coordinator and workers only ever see a spec that
    /// passed. The task's keys are for [`Tasks::check`](super::Tasks::check).
    pub fn check(&self) -> Result<(), ConfigError> {
        let mut findings = Findings::default();
        bounds::check(&self.document(), bounds::ENGINE, &mut findings);
        if findings.is_empty() {
            self.find(&mut findings);
        }
        findings.into_result()
    }

    pub(super) fn find(&self, findings: &mut Findings) {
        check_run(&self.run, findings);
        check_data(&self.data, findings);
        check_train(&self.train, findings);
        check_init(self, findings);
        check_optimizer(self, findings);
        findings.at_least_one("eval.batch", self.eval.batch.unwrap_or(1));
        check_cache(&self.cache, findings);
        check_memory(&self.memory, findings);
        check_launch(&self.launch, findings);
    }

    /// Whether this run can be split over `world_size` workers; known only at launch.
    pub fn check_world(&self, world_size: usize) -> Result<(), ConfigError> {
        let mut findings = Findings::default();
        let most = self.train.global_batch.min(MAX_WORLD);
        findings.require(
            (1..=most).contains(&world_size),
            "train.global_batch",
            format_args!("a batch of {} cannot be shared by {world_size} workers", self.train.global_batch),
            "every worker needs a sample of each step: start fewer workers or raise `train.global_batch`",
        );
        findings.into_result()
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
    let bucket = run.bucket.as_deref();
    f.require(
        bucket.is_none_or(|address| BUCKETS.iter().any(|scheme| address.starts_with(scheme))),
        "run.bucket",
        format_args!("`{}` is not a bucket address", bucket.unwrap_or_default()),
        "write s3://BUCKET/PATH, gs://BUCKET/PATH or az://CONTAINER/PATH",
    );
}

fn check_data(data: &Data, f: &mut Findings) {
    f.named("data.path", &data.path, "name the directory of a data set");
    let held: BTreeSet<_> = data.holdout_episodes.iter().collect();
    f.require(
        held.len() == data.holdout_episodes.len(),
        "data.holdout_episodes",
        "names an episode twice",
        "name each episode once",
    );
    f.at_least_one("data.threads", data.threads.unwrap_or(1));
    let budget = data.bucket_cache.budget;
    f.require(
        budget >= MIN_BUCKET_CACHE,
        "data.bucket_cache.budget",
        format_args!("{budget} B is too small for the blocks that are read at the same time"),
        "give 268435456 (256 MiB) or more",
    );
}

fn check_train(train: &Train, f: &mut Findings) {
    match (train.steps, train.epochs) {
        (None, None) => f.require(false, "train", "has no length", "give `train.steps` or `train.epochs`"),
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
    f.require(train.log_every >= 1, "train.log_every", "must be at least 1, is 0", "use 1 to log every step");
    let share = train.max_left_out;
    f.in_range("train.max_left_out", share, (0.0..=1.0).contains(&share), "from 0 to 1");
    let factor = train.spike_factor;
    f.in_range("train.spike_factor", factor, factor >= 1.0, "of at least 1");
    f.require(
        train.skip_steps.len() <= MAX_SKIPPED_STEPS,
        "train.skip_steps",
        format_args!("names {} steps", train.skip_steps.len()),
        &format!("name at most {MAX_SKIPPED_STEPS} steps; `data.holdout_episodes` leaves out episodes"),
    );
    if let Recompute::Every(every) = train.recompute {
        f.require(
            every >= 1,
            "train.recompute.every",
            "must be at least 1, is 0",
            "set `train.recompute: none` to keep all activations",
        );
    }
}

fn check_init(spec: &RunSpec, f: &mut Findings) {
    let Train { init_from, init_digest, base_digest, .. } = &spec.train;
    let groups = spec.learning_rates();
    for (group, path) in init_from.iter().flat_map(InitFrom::places) {
        f.named("train.init_from", path, "name a run directory, a checkpoint or a file, or remove the key");
        f.require(
            group.is_none_or(|group| groups.contains_key(group)),
            "train.init_from",
            format_args!(
                "names `{}`, which is not a parameter group of this task",
                group.unwrap_or_default()
            ),
            "use the group names of `optimizer.lr`",
        );
    }
    let hex = |digest: &String| digest.len() == 64 && digest.bytes().all(|b| b.is_ascii_hexdigit());
    for (key, digest) in [("train.init_digest", init_digest), ("train.base_digest", base_digest)] {
        f.require(
            digest.as_ref().is_none_or(hex),
            key,
            "is not 64 hexadecimal digits",
            "remove it: it is computed at launch",
        );
    }
    f.require(
        init_digest.is_none() || init_from.is_some(),
        "train.init_digest",
        "is given without `train.init_from`",
        "remove it",
    );
}

fn check_optimizer(spec: &RunSpec, f: &mut Findings) {
    let (optimizer, groups) = (&spec.optimizer, spec.learning_rates());
    let values =
        [("optimizer.weight_decay", &optimizer.weight_decay), ("optimizer.clip_norm", &optimizer.clip_norm)];
    let known = |path, group: Option<&str>, f: &mut Findings| {
        f.require(
            group.is_none_or(|group| groups.contains_key(group)),
            path,
            format_args!(
                "names `{}`, which is not a parameter group of this task",
                group.unwrap_or_default()
            ),
            "use the group names of `optimizer.lr`",
        );
    };
    for (path, value) in values {
        for (group, value) in value.values() {
            f.in_range(path, value, value >= 0.0, "of at least 0");
            known(path, group, f);
        }
    }
    let warmups = optimizer.warmup_steps.values();
    warmups.iter().for_each(|(group, _)| known("optimizer.warmup_steps", *group, f));
    let longest = warmups.iter().map(|(_, steps)| *steps).max().unwrap_or(0);
    for beta in optimizer.betas {
        f.in_range("optimizer.betas", beta, (0.0..1.0).contains(&beta), "from 0 to below 1");
    }
    f.in_range("optimizer.eps", optimizer.eps, optimizer.eps > 0.0, "above 0");
    let warmup = optimizer.warmup_ratio.unwrap_or(0.0);
    f.in_range("optimizer.warmup_ratio", warmup, (0.0..=1.0).contains(&warmup), "from 0 to 1");
    f.require(
        optimizer.warmup_ratio.is_none() || longest == 0,
        "optimizer.warmup_ratio",
        "is given together with `optimizer.warmup_steps`",
        "remove one of them",
    );
    f.require(
        optimizer.decay_steps.is_none_or(|steps| steps > longest),
        "optimizer.decay_steps",
        "leaves no step after the warm-up",
        &format!("raise it above the warm-up ({longest} steps): it counts from the first step of the run"),
    );
    f.require(
        optimizer.schedule_over == ScheduleOver::All || spec.cache.mode == CacheMode::Periodic,
        "optimizer.schedule_over",
        "is `live`, but without `cache.mode: periodic` all steps are live",
        "remove it, or set `cache.mode: periodic`",
    );
    let decay = optimizer.ema_decay.unwrap_or(0.0);
    f.in_range("optimizer.ema_decay", decay, (0.0..1.0).contains(&decay), "from 0 to below 1");
    let power = optimizer.ema_power.unwrap_or(1.0);
    f.in_range("optimizer.ema_power", power, power > 0.0 && power.is_finite(), "above 0");
    f.require(
        optimizer.ema_power.is_none() || optimizer.ema_decay.is_some(),
        "optimizer.ema_power",
        "is given without `optimizer.ema_decay`",
        "set `optimizer.ema_decay`, for instance to 0.9999, or remove it",
    );
    let LossScale { initial, growth_interval } = optimizer.loss_scale;
    f.require(
        initial.is_none_or(|initial| LossScale::RANGE.contains(&initial) && initial.log2().fract() == 0.0),
        "optimizer.loss_scale.initial",
        format_args!("is {:?}; only powers of two from 1 to 2^126 are exact", initial.unwrap_or_default()),
        "give a power of two, for instance 65536",
    );
    f.require(
        growth_interval != Some(0),
        "optimizer.loss_scale.growth_interval",
        "is 0",
        "give the number of consecutive steps after which the scale doubles, for instance 2000",
    );
    let ratio = optimizer.min_lr_ratio;
    f.in_range("optimizer.min_lr_ratio", ratio, (0.0..=1.0).contains(&ratio), "from 0 to 1");
}

fn check_cache(cache: &Cache, f: &mut Findings) {
    for (path, span) in [("cache.interval", cache.interval), ("cache.live", cache.live)] {
        let lengths = [span.epochs, span.steps];
        let given = lengths.into_iter().flatten().collect::<Vec<_>>();
        f.require(
            matches!(given[..], [length] if length >= 1),
            path,
            "must have exactly one of `epochs` and `steps`, at least 1",
            "write `{epochs: N}` or `{steps: N}`",
        );
    }
    // Spans of different kinds are compared when the data set's size is known.
    let longer = |live: Option<u64>, interval: Option<u64>| live.zip(interval).is_some_and(|(l, i)| l >= i);
    f.require(
        !longer(cache.live.epochs, cache.interval.epochs) && !longer(cache.live.steps, cache.interval.steps),
        "cache.live",
        "is as long as `cache.interval` or longer, so no step would use the cache",
        "shorten `cache.live`, or set `cache.mode: off`",
    );
    f.at_least_one("cache.encoder_batch", cache.encoder_batch.unwrap_or(1));
    f.require(
        cache.budget != Some(0),
        "cache.budget",
        "must be at least 1 byte, is 0",
        "remove it if the cache is to have no limit",
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
        "is 0, but `cache.rebuild_above` needs probe samples to measure drift on",
        "give at least 1",
    );
}

fn check_memory(memory: &Memory, f: &mut Findings) {
    f.require(
        memory.capacity != Some(0),
        "memory.capacity",
        "must be at least 1 byte, is 0",
        "remove it if memory is to have no limit",
    );
}

fn check_launch(launch: &Launch, f: &mut Findings) {
    f.at_least_one("launch.threads_per_worker", launch.threads_per_worker.unwrap_or(1));
    let workers = launch.nproc_per_node.unwrap_or(1);
    f.require(
        (1..=MAX_WORLD).contains(&workers),
        "launch.nproc_per_node",
        format_args!("must be from 1 to {MAX_WORLD}, is {workers}"),
        "give the number of workers to start on each node",
    );
    f.require(
        launch.device != DeviceChoice::Cpu || launch.collectives != Collectives::Nccl,
        "launch.collectives",
        "is `nccl`, but `launch.device` is `cpu`",
        "NCCL connects GPUs: use `auto` or `ring`, or another device",
    );
    if let Some(listen) = &launch.listen {
        let port =
            listen.rsplit_once(':').filter(|(host, _)| !host.is_empty()).map(|(_, port)| port.parse::<u16>());
        f.require(
            matches!(port, Some(Ok(_))),
            "launch.listen",
            format_args!("`{listen}` is not an address"),
            "write `HOST:PORT`, for instance `127.0.0.1:29400`; port 0 chooses a free port",
        );
    }
}
