//! What each number of a run file may be.
//!
//! A number beyond its bound is a typing error, or a run that no machine could hold: it is refused at its
//! place in the file, before anything computes with it. Rules between keys are `check`'s and the tasks'; they
//! refuse numbers below the least, too, and say why in their own words.

use serde_json::{Map, Value, json};

use super::findings::Findings;
use crate::limits::{MAX_WORLD, MIN_BUCKET_CACHE};

/// Dotted keys, each with the least and the most that it may be. Of a list or a map each number is meant.
pub type Bounds = [(&'static str, f64, f64)];

/// Steps, epochs and samples that a key may count: more than a run could ever come to.
pub const COUNT: f64 = 1e12;
/// Bytes that a key may allow: an exabyte.
const BYTES: f64 = 1e18;
/// Widths and lengths that a key may ask for.
pub const SIZE: f64 = 65_536.0;
/// Layers of a network that a run trains; what is to be known beforehand of that many takes seconds.
pub const LAYERS: f64 = 256.0;
/// Rank of an adapter: as wide as the layers of a model of billions.
pub const RANK: f64 = 4096.0;
/// The most of a rate, a weight or a norm, which has none: how far one may go is for training to find out.
pub const NO_MOST: f64 = f64::MAX;
/// As the least of what must be above 0.
pub const ABOVE_ZERO: f64 = f64::MIN_POSITIVE;
/// The most of a key for draws: every number is as good as any other.
const ANY: f64 = u64::MAX as f64;

/// Bounds of the keys that every run file has, whatever its task.
pub const ENGINE: &Bounds = &[
    ("run.seed", 0.0, ANY),
    ("data.holdout_episodes", 0.0, COUNT),
    ("data.prefetch", 0.0, 4096.0),
    ("data.threads", 1.0, 1024.0),
    ("data.bucket_cache.budget", MIN_BUCKET_CACHE as f64, BYTES),
    ("train.steps", 1.0, COUNT),
    ("train.epochs", 1.0, COUNT),
    ("train.global_batch", 1.0, u32::MAX as f64),
    ("train.micro_batch", 1.0, u32::MAX as f64),
    ("train.recompute", 1.0, SIZE),
    ("train.checkpoint_every", 0.0, COUNT),
    ("train.keep_checkpoints", 1.0, 1e6),
    ("train.log_every", 1.0, COUNT),
    ("train.max_skipped", 0.0, u32::MAX as f64),
    ("train.max_left_out", 0.0, 1.0),
    ("train.spike_factor", 1.0, 1e9),
    ("train.skip_steps", 0.0, COUNT),
    ("optimizer.betas", 0.0, 1.0),
    ("optimizer.eps", ABOVE_ZERO, 1.0),
    ("optimizer.weight_decay", 0.0, NO_MOST),
    ("optimizer.clip_norm", 0.0, NO_MOST),
    ("optimizer.warmup_steps", 0.0, COUNT),
    ("optimizer.warmup_ratio", 0.0, 1.0),
    ("optimizer.decay_steps", 1.0, COUNT),
    ("optimizer.min_lr_ratio", 0.0, 1.0),
    ("optimizer.ema_decay", 0.0, 1.0),
    ("optimizer.ema_power", ABOVE_ZERO, 1e3),
    ("optimizer.loss_scale.initial", 1.0, 8.507059173023462e37),
    ("optimizer.loss_scale.growth_interval", 1.0, u32::MAX as f64),
    ("eval.samples", 0.0, COUNT),
    ("eval.every", 0.0, COUNT),
    ("eval.batch", 1.0, u32::MAX as f64),
    ("eval.seed", 0.0, ANY),
    ("cache.budget", 1.0, BYTES),
    ("cache.encoder_batch", 1.0, u32::MAX as f64),
    ("cache.interval.epochs", 1.0, COUNT),
    ("cache.interval.steps", 1.0, COUNT),
    ("cache.live.epochs", 1.0, COUNT),
    ("cache.live.steps", 1.0, COUNT),
    ("cache.rebuild_above", 0.0, NO_MOST),
    ("cache.rebuild_below", 0.0, NO_MOST),
    ("cache.probe_samples", 0.0, 1e6),
    ("memory.capacity", 1.0, BYTES),
    ("faults.verify_every", 0.0, COUNT),
    ("faults.replay_every", 0.0, COUNT),
    ("faults.cordon_after", 0.0, u32::MAX as f64),
    ("faults.replace_slow", 0.0, COUNT),
    ("launch.nproc_per_node", 1.0, MAX_WORLD as f64),
    ("launch.threads_per_worker", 1.0, 1024.0),
];

/// As JSON: by key the least (`above 0` where it must be that) and the most, `null` where there is no most.
/// For the reference of keys.
pub fn table(bounds: &Bounds) -> Map<String, Value> {
    let number = |bound: f64| match bound {
        bound if bound >= ANY => Value::Null,
        ABOVE_ZERO => "above 0".into(),
        whole if whole.fract() == 0.0 => (whole as u64).into(),
        part => part.into(),
    };
    let row =
        |(key, least, most): &(&str, f64, f64)| ((*key).to_owned(), json!([number(*least), number(*most)]));
    bounds.iter().map(row).collect()
}

/// Refuses what is above its most.
pub(super) fn check(document: &Map<String, Value>, bounds: &Bounds, findings: &mut Findings) {
    for (key, least, most) in bounds {
        let mut parts = key.split('.');
        let first = parts.next().and_then(|part| document.get(part));
        let found = parts.try_fold(first, |node, part| Some(node?.get(part)));
        let above = found.flatten().and_then(|value| first_above(value, *most));
        findings.require(
            above.is_none(),
            key,
            format_args!("must be at most {most}, is {}", above.unwrap_or(&Value::Null)),
            &match *least {
                ABOVE_ZERO => format!("give a number above 0, at most {most}"),
                least => format!("give a number from {least} to {most}"),
            },
        );
    }
}

fn first_above(value: &Value, most: f64) -> Option<&Value> {
    match value {
        Value::Number(number) => number.as_f64().is_some_and(|number| number > most).then_some(value),
        Value::Array(values) => values.iter().find_map(|value| first_above(value, most)),
        Value::Object(map) => map.values().find_map(|value| first_above(value, most)),
        _ => None,
    }
}

/// Keys that are numbers and have no bounds, and bounds of keys that are not there.
pub(super) fn misfits(numbers: &[String], known: &[String], bounds: &Bounds) -> Vec<String> {
    let listed = |key: &String| bounds.iter().any(|(of, ..)| of == key);
    let without = numbers.iter().filter(|key| !listed(key)).map(|key| format!("{key}: has no bounds"));
    let strays = bounds.iter().filter(|(of, ..)| !known.iter().any(|key| key == of));
    without.chain(strays.map(|(of, ..)| format!("{of}: has bounds, and there is no such key"))).collect()
}
