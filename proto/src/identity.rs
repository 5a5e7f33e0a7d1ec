//! Which keys of a run file decide what is learned.
//!
//! Two runs are the same if they learn the same. Keys that change how fast, how long, on how much memory or
//! where a run trains do not belong to that, so a run may be continued with more steps, another micro-batch,
//! another number of processes or from another directory, and is refused when the model, the data, the seed,
//! the batch or the optimizer is another. Between the two are rates and what is looked at: they name a run,
//! and may be changed where it is continued; the journal keeps each change.
//!
//! Every key says which it is: the engine's below, a task's in its schema. What a task says travels with the
//! specification as [`Marks`], so that coordinator and workers tell runs apart without knowing the task.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

/// What another value of a key means.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Class {
    /// Another run.
    Learned,
    /// Another run, and so does another order of its entries: a map that is one value.
    LearnedInOrder,
    /// Another run; earlier versions did not have the key, and did what it says with this value (as JSON). A
    /// specification with that value is recognised as the same run as one without the key.
    LearnedSince(&'static str),
    /// Another run, unless it is one that goes on: what changes at a resume is recorded there.
    LearnedUntilChanged,
    /// Where a task's pretrained model lies, which `train.base_digest` names by its content: another run,
    /// unless both runs know that name and it is the same. One key of a task at most.
    Base,
    /// The run stays the one that it was, for this reason.
    Outside(&'static str),
}

/// Dotted keys, each with its class.
pub type Classes = [(&'static str, Class)];

use Class::{Learned, LearnedSince, LearnedUntilChanged, Outside};

/// Names the content of a task's pretrained model.
pub const BASE_DIGEST: &str = "train.base_digest";

/// The classes of the keys that every run file has, whatever its task.
pub const ENGINE: &Classes = &[
    ("run.name", Outside("a label")),
    ("run.output_dir", Outside("a run directory may be moved")),
    ("run.bucket", Outside("where a copy is kept")),
    ("run.seed", Learned),
    ("task.type", LearnedSince("\"vla_flow\"")),
    ("data.path", LearnedUntilChanged),
    ("data.holdout_episodes", Learned),
    ("data.prefetch", Outside("speed")),
    ("data.threads", Outside("speed")),
    ("data.bucket_cache.dir", Outside("speed")),
    ("data.bucket_cache.budget", Outside("speed")),
    ("train.steps", Outside("a run may be extended")),
    ("train.epochs", Outside("a run may be extended")),
    ("train.global_batch", Learned),
    ("train.micro_batch", Outside("the same global batch, split differently")),
    ("train.auto_micro_batch", Outside("the same global batch, split differently")),
    ("train.recompute", Outside("the same gradients, computed differently")),
    ("train.checkpoint_every", Outside("how often, not what")),
    ("train.keep_checkpoints", Outside("how many, not what")),
    ("train.log_every", Outside("how often, not what")),
    ("train.max_skipped", Outside("when it gives up, not what it learns")),
    ("train.max_left_out", Outside("when it gives up, not what it learns")),
    ("train.spike", Outside("which bad steps are left out; the ledger lists them")),
    ("train.spike_factor", Outside("which bad steps are left out; the ledger lists them")),
    ("train.skip_steps", Outside("which bad steps are left out; the ledger lists them")),
    ("train.resume", Outside("where it begins, not what it learns")),
    ("train.init_from", Outside("a path; `train.init_digest` says what is there")),
    ("train.init_digest", Learned),
    (BASE_DIGEST, Learned),
    ("optimizer.name", Learned),
    ("optimizer.betas", Learned),
    ("optimizer.eps", Learned),
    ("optimizer.weight_decay", Learned),
    ("optimizer.clip_norm", LearnedUntilChanged),
    ("optimizer.warmup_steps", LearnedUntilChanged),
    ("optimizer.warmup_ratio", LearnedUntilChanged),
    ("optimizer.decay_steps", LearnedUntilChanged),
    ("optimizer.schedule", LearnedUntilChanged),
    ("optimizer.schedule_over", LearnedUntilChanged),
    ("optimizer.min_lr_ratio", LearnedUntilChanged),
    ("optimizer.reduce_dtype", Learned),
    ("optimizer.ema_decay", LearnedUntilChanged),
    ("optimizer.ema_power", LearnedUntilChanged),
    ("optimizer.loss_scale.initial", LearnedUntilChanged),
    ("optimizer.loss_scale.growth_interval", LearnedUntilChanged),
    ("eval.samples", LearnedUntilChanged),
    ("eval.every", Outside("what is evaluated, not what is learned")),
    ("eval.batch", Outside("the same samples, split differently")),
    ("eval.seed", Outside("what is evaluated, not what is learned")),
    ("cache.mode", Learned),
    ("cache.tap", Learned),
    ("cache.dtype", Learned),
    ("cache.dir", Outside("where")),
    ("cache.budget", Outside("a bound")),
    ("cache.encoder_batch", Outside("the same features, computed differently")),
    ("cache.interval.epochs", Learned),
    ("cache.interval.steps", Learned),
    ("cache.live.epochs", Learned),
    ("cache.live.steps", Learned),
    ("cache.rebuild_above", Learned),
    ("cache.rebuild_below", Learned),
    ("cache.probe_samples", Learned),
    ("memory.capacity", Outside("a bound")),
    ("memory.offload", Outside("where")),
    ("memory.shard", Outside("where")),
    ("faults.mirror", Outside("redundancy")),
    ("faults.verify_every", Outside("how often it is checked, not what it learns")),
    ("faults.cordon_after", Outside("where")),
    ("faults.replace_slow", Outside("where")),
    ("faults.replay_every", Outside("how often it is checked, not what it learns")),
    ("launch.nproc_per_node", Outside("where")),
    ("launch.device", Outside("where")),
    ("launch.collectives", Outside("where")),
    ("launch.threads_per_worker", Outside("speed")),
    ("launch.bfloat16_matmul", Outside("what a processor computes with, as `launch.device`")),
    ("launch.listen", Outside("where")),
    ("launch.notify", Outside("who is notified")),
];

/// Whether a run may go on with another value of this key. The data set that `data.path` names is compared by
/// its content, wherever it is; peak rates are the task's keys, and what they are for is the engine's.
pub(crate) fn may_change(key: &str) -> bool {
    let of_group = |known: &str| key.strip_prefix(known).is_some_and(|group| group.starts_with('.'));
    let listed =
        |(known, class): &(&str, Class)| *class == LearnedUntilChanged && (*known == key || of_group(known));
    key.starts_with("optimizer.lr.") || ENGINE.iter().any(listed)
}

/// Keys that are no part of what names a run, and of which people want to read later that they were changed:
/// how long it trains, what it leaves out, what is looked at, and places.
pub(crate) const TOLD: &[&str] = &[
    "run.output_dir",
    "run.bucket",
    "train.steps",
    "train.epochs",
    "train.spike",
    "train.spike_factor",
    "train.skip_steps",
    "train.init_from",
    "eval.every",
    "eval.batch",
    "eval.seed",
];

/// What of a task's classes is not simply `Learned`, in the form that travels with a specification.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Marks {
    outside: BTreeSet<String>,
    ordered: BTreeSet<String>,
    /// Key to the value that says what versions without it did.
    since: BTreeMap<String, Value>,
    #[serde(skip_serializing_if = "Option::is_none")]
    base: Option<String>,
}

impl Marks {
    pub(crate) fn from_classes(classes: &Classes) -> Self {
        let mut marks = Self::default();
        for (key, class) in classes {
            let key = (*key).to_owned();
            match class {
                Class::Learned | Class::LearnedUntilChanged => {}
                Class::LearnedInOrder => drop(marks.ordered.insert(key)),
                Class::Base => marks.base = Some(key),
                Class::LearnedSince(before) => {
                    let before = serde_json::from_str(before).expect("classes give a default as JSON");
                    marks.since.insert(key, before);
                }
                Class::Outside(_) => drop(marks.outside.insert(key)),
            }
        }
        marks
    }

    /// What specifications meant that were written before they carried marks: their task was always
    /// `vla_flow`.
    pub(crate) fn before_marks_travelled() -> Self {
        Self::from_classes(&[
            ("model.activations_dtype", LearnedSince("\"float32\"")),
            ("lora.rank_pattern", Class::LearnedInOrder),
            ("lora.alpha_pattern", Class::LearnedInOrder),
        ])
    }

    /// The key that says where the task's pretrained model lies.
    pub(crate) fn base(&self) -> Option<&str> {
        self.base.as_deref()
    }

    fn and(mut self, other: &Self) -> Self {
        self.outside.extend(other.outside.iter().cloned());
        self.ordered.extend(other.ordered.iter().cloned());
        self.since.extend(other.since.iter().map(|(key, before)| (key.clone(), before.clone())));
        self
    }
}

/// The part of a specification that decides what is learned.
pub(crate) struct Identity {
    /// Dotted key to JSON value; without what is null.
    keys: BTreeMap<String, String>,
    marks: Marks,
}

impl Identity {
    /// The identity in a whole document, whose task's keys have these marks.
    pub(crate) fn from_document(document: &Map<String, Value>, task: &Marks) -> Self {
        let mut identity = Self { keys: BTreeMap::new(), marks: Marks::from_classes(ENGINE).and(task) };
        identity.take("", document);
        identity
    }

    fn take(&mut self, prefix: &str, map: &Map<String, Value>) {
        for (name, value) in map {
            let key = if prefix.is_empty() { name.clone() } else { format!("{prefix}.{name}") };
            match value {
                _ if self.marks.outside.contains(&key) => {}
                Value::Object(inner) if inner.is_empty() || !self.marks.ordered.contains(&key) => {
                    self.take(&key, inner);
                }
                Value::Null => {}
                leaf => drop(self.keys.insert(key, leaf.to_string())),
            }
        }
    }

    /// All keys, those that came later also where they are not written.
    pub(crate) fn keys(&self) -> BTreeMap<String, String> {
        let mut keys = self.keys.clone();
        for (key, before) in &self.marks.since {
            keys.entry(key.clone()).or_insert_with(|| before.to_string());
        }
        keys
    }

    /// Keys and values that name the run: without those that say what versions without them did.
    pub(crate) fn named(&self) -> impl Iterator<Item = (&str, &str)> {
        let as_before = |key: &str, value: &str| {
            self.marks.since.get(key).is_some_and(|before| {
                serde_json::from_str::<Value>(value).is_ok_and(|value| value == *before)
            })
        };
        let keys = self.keys.iter().map(|(key, value)| (key.as_str(), value.as_str()));
        keys.filter(move |(key, value)| !as_before(key, value))
    }
}

/// What is wrong with a list of classes for these keys, one line each: a key without a class or with two, a
/// class without a key.
pub fn misfits(known: &[String], classes: &Classes) -> Vec<String> {
    let mut wrong = Vec::new();
    for key in known {
        match classes.iter().filter(|(listed, _)| listed == key).count() {
            1 => {}
            0 => wrong.push(format!("{key}: say whether it decides what is learned")),
            times => wrong.push(format!("{key}: has {times} classes")),
        }
    }
    let strays = classes.iter().filter(|(key, _)| !known.iter().any(|known| known == key));
    wrong.extend(strays.map(|(key, _)| format!("{key}: there is no such key")));
    wrong
}
