//! A run specification as it travels and as it is recognised: JSON with a digest.
//!
//! The digest names *what is learned*. Keys that change how fast, how long, on how much memory or where a run trains do not
//! belong to it, so a run may be continued with more steps, another micro-batch, another number of processes or from another
//! directory, and is refused when the model, the data, the seed, the batch or the optimizer is another.

use serde_json::{Map, Value};

use crate::{run_spec::RunSpec, v1};

/// Keys outside the digest, each with the reason.
const OUTSIDE: &[&str] = &[
    "run.name",               // a label
    "run.output_dir",         // a run directory may be moved
    "train.steps",            // a run may be prolonged
    "train.epochs",           // likewise
    "train.micro_batch",      // the same global batch, cut otherwise
    "train.auto_micro_batch", // likewise
    "train.recompute",        // the same gradients, computed otherwise
    "train.checkpoint_every", // how often, not what
    "train.keep_checkpoints", // likewise
    "train.log_every",        // likewise
    "train.resume",           // likewise
    "data.prefetch",          // speed
    "data.threads",           // likewise
    "cache.dir",              // where
    "cache.budget",           // a bound
    "cache.encoder_batch",    // the same features, computed otherwise
    "memory",                 // a bound
    "faults",                 // redundancy
    "launch",                 // where
];

/// Keys that earlier versions did not have, with the value that says what they did. At that value a key is left out of the digest, so
/// that directories and journals of earlier versions still belong to their runs.
const LATER: &[(&str, &str)] = &[("model.activations_dtype", "\"float32\"")];

/// Maps that are one value: which of their entries comes first decides what is learned.
const ORDERED: &[&str] = &["lora.rank_pattern", "lora.alpha_pattern"];

/// Why a document is not a run specification.
#[derive(Debug, thiserror::Error)]
pub enum DocumentError {
    /// Not the JSON of a [`RunSpec`].
    #[error("spec.json is not a run specification of this version: {0}")]
    Json(#[from] serde_json::Error),
    /// The digest does not belong to the specification.
    #[error("spec.digest is {found}, but the document's own is {computed}: it was changed on the way")]
    Digest {
        /// As sent.
        found: String,
        /// As computed here.
        computed: String,
    },
}

/// One key on which two specifications differ, with both values as JSON.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Difference {
    /// Dotted key.
    pub key: String,
    /// Value of the first specification; `(absent)` without one.
    pub left: String,
    /// Value of the second.
    pub right: String,
}

impl std::fmt::Display for Difference {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} ({} there, {} here)", self.key, self.left, self.right)
    }
}

/// The digest that names what a specification learns: lower-case hex BLAKE3 over its sorted dotted keys.
pub fn digest(spec: &RunSpec) -> String {
    let mut hasher = blake3::Hasher::new();
    let as_ever = |key: &str, value: &str| LATER.contains(&(key, value));
    for (key, value) in identity(spec).into_iter().filter(|(key, value)| !as_ever(key, value)) {
        hasher.update(format!("{key}={value}\n").as_bytes());
    }
    hasher.finalize().to_hex().to_string()
}

/// The keys that decide what is learned and on which two specifications differ.
pub fn differences(left: &RunSpec, right: &RunSpec) -> Vec<Difference> {
    let (left, right) = (identity(left), identity(right));
    let absent = || "(absent)".to_owned();
    let keys: std::collections::BTreeSet<_> = left.keys().chain(right.keys()).collect();
    keys.into_iter()
        .filter(|key| left.get(*key) != right.get(*key))
        .map(|key| Difference {
            key: key.clone(),
            left: left.get(key).cloned().unwrap_or_else(absent),
            right: right.get(key).cloned().unwrap_or_else(absent),
        })
        .collect()
}

impl From<&RunSpec> for v1::RunSpecDocument {
    fn from(spec: &RunSpec) -> Self {
        Self { json: value(spec).to_string(), digest: digest(spec) }
    }
}

impl TryFrom<&v1::RunSpecDocument> for RunSpec {
    type Error = DocumentError;

    fn try_from(document: &v1::RunSpecDocument) -> Result<Self, DocumentError> {
        let spec: RunSpec = serde_json::from_str(&document.json)?;
        let computed = digest(&spec);
        if computed != document.digest {
            return Err(DocumentError::Digest { found: document.digest.clone(), computed });
        }
        Ok(spec)
    }
}

fn value(spec: &RunSpec) -> Value {
    serde_json::to_value(spec).expect("a run specification has string keys and finite checked numbers")
}

/// Dotted key to JSON value, of the keys inside the digest.
fn identity(spec: &RunSpec) -> std::collections::BTreeMap<String, String> {
    let mut keys = std::collections::BTreeMap::new();
    if let Value::Object(map) = value(spec) {
        flatten("", &map, &mut keys);
    }
    keys
}

fn flatten(prefix: &str, map: &Map<String, Value>, into: &mut std::collections::BTreeMap<String, String>) {
    for (name, value) in map {
        let key = if prefix.is_empty() { name.clone() } else { format!("{prefix}.{name}") };
        match value {
            _ if OUTSIDE.contains(&key.as_str()) => {}
            Value::Object(inner) if inner.is_empty() || !ORDERED.contains(&key.as_str()) => {
                flatten(&key, inner, into)
            }
            Value::Null => {}
            leaf => {
                into.insert(key, leaf.to_string());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::run_spec::ActivationsDtype;

    fn spec() -> RunSpec {
        serde_json::from_value(serde_json::json!({
            "run": {"name": "a", "output_dir": "runs/a", "seed": 7},
            "model": {"path": "m"},
            "lora": {},
            "data": {"path": "d", "cameras": ["front"]},
            "train": {"steps": 10, "global_batch": 8, "micro_batch": 2},
        }))
        .unwrap()
    }

    #[test]
    fn a_document_carries_the_specification_unchanged() {
        let document = v1::RunSpecDocument::from(&spec());
        assert_eq!(RunSpec::try_from(&document).unwrap(), spec());
    }

    #[test]
    fn a_changed_document_is_refused() {
        let mut document = v1::RunSpecDocument::from(&spec());
        document.json = document.json.replace("\"seed\":7", "\"seed\":8");
        assert!(matches!(RunSpec::try_from(&document), Err(DocumentError::Digest { .. })));
        document.json.truncate(20);
        assert!(matches!(RunSpec::try_from(&document), Err(DocumentError::Json(_))));
    }

    #[test]
    fn a_run_keeps_its_digest_when_it_is_prolonged_or_cut_otherwise() {
        let mut longer = spec();
        longer.train.steps = None;
        longer.train.epochs = Some(3);
        longer.train.micro_batch = 4;
        longer.run.output_dir = "/elsewhere".into();
        longer.launch.nproc_per_node = Some(4);
        longer.memory.capacity = Some(1 << 30);
        longer.data.threads = Some(3);
        assert_eq!(digest(&longer), digest(&spec()));
        assert_eq!(differences(&longer, &spec()), vec![]);
    }

    #[test]
    fn another_batch_seed_or_adapter_is_another_run_and_said_by_key() {
        let mut other = spec();
        other.train.global_batch = 16;
        other.run.seed = 8;
        other.lora = None;
        assert_ne!(digest(&other), digest(&spec()));
        let told: Vec<_> = differences(&spec(), &other).iter().map(Difference::to_string).collect();
        assert!(told.contains(&"train.global_batch (8 there, 16 here)".to_owned()), "{told:?}");
        assert!(told.contains(&"run.seed (7 there, 8 here)".to_owned()), "{told:?}");
        assert!(told.iter().any(|line| line.starts_with("lora.rank (16 there, (absent) here)")), "{told:?}");
    }

    #[test]
    fn a_key_that_came_later_names_another_run_only_where_it_does_something_else() {
        // Of the specification above, before there was `model.activations_dtype`.
        const BEFORE: &str = "8259f76864f10c48110a5cf04a9c6465eec42e2a09c1e9ea17c2000dd94b2660";
        assert_eq!(digest(&spec()), BEFORE);
        let mut rounded = spec();
        rounded.model.activations_dtype = ActivationsDtype::Bfloat16;
        assert_ne!(digest(&rounded), BEFORE);
        let told: Vec<_> = differences(&spec(), &rounded).iter().map(Difference::to_string).collect();
        assert_eq!(told, ["model.activations_dtype (\"float32\" there, \"bfloat16\" here)"]);
    }

    #[test]
    fn the_order_of_patterns_is_part_of_what_is_learned() {
        let [one, other] = [["self_attn.q_proj", "q_proj"], ["q_proj", "self_attn.q_proj"]].map(|order| {
            let mut spec = spec();
            let lora = spec.lora.as_mut().unwrap();
            lora.rank_pattern = order.map(|key| (key.to_owned(), key.len())).into_iter().collect();
            spec
        });
        assert_ne!(digest(&one), digest(&other));
        let [difference] = &differences(&one, &other)[..] else { panic!("{:?}", differences(&one, &other)) };
        assert_eq!(difference.key, "lora.rank_pattern");
        assert!(difference.left.starts_with(r#"{"self_attn.q_proj":16,"#), "{difference}");
    }
}
