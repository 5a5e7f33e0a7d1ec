//! What makes a run the same run.
//!
//! A state directory may be continued by a spec with the same digest. The digest covers everything that the losses and the adapter
//! depend on; it leaves out what may change between two launches of one run: how far it goes, how work is cut into micro-batches,
//! how often something is written or logged, where things lie, and on how many processes it runs.

use serde_json::Value;

use crate::run_spec::RunSpec;

/// Fields that may differ between two launches of one run, each with the reason.
const MAY_CHANGE: &[(&str, &str)] = &[
    ("run.output_dir", "a run directory may be moved"),
    ("train.steps", "a finished run may be extended"),
    ("train.epochs", "a finished run may be extended"),
    ("train.micro_batch", "splits the same global batch; gradients agree to rounding"),
    ("train.recompute", "gradients are equal with and without"),
    ("train.checkpoint_every", "when state is written does not change it"),
    ("train.keep_checkpoints", "as above"),
    ("train.log_every", "as above"),
    ("train.resume", "says whether to look for state at all"),
    ("data.prefetch", "depth of a queue"),
    ("memory", "bounds, not results"),
    ("launch", "any world size continues any checkpoint"),
];

/// A field in which two specs describe different runs.
#[derive(Clone, Debug, PartialEq)]
pub struct Difference {
    /// Dotted path.
    pub path: String,
    /// Its value in the older spec; absent if it had none.
    pub before: Option<Value>,
    /// Its value in this spec; absent if it has none.
    pub now: Option<Value>,
}

impl std::fmt::Display for Difference {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let show = |value: &Option<Value>| value.as_ref().map_or("nothing".to_owned(), Value::to_string);
        write!(f, "{}: was {}, now {}", self.path, show(&self.before), show(&self.now))
    }
}

impl RunSpec {
    /// The fields that make this run what it is, as canonical JSON: keys sorted, no white space.
    pub fn identity_json(&self) -> String {
        let mut value =
            serde_json::to_value(self).expect("a run spec has string keys and no fallible serializer");
        for (path, _) in MAY_CHANGE {
            remove(&mut value, path);
        }
        value.sort_all_objects();
        value.to_string()
    }

    /// BLAKE3 of [`RunSpec::identity_json`] in lower-case hex: equal for all launches of one run.
    pub fn digest(&self) -> String {
        blake3::hash(self.identity_json().as_bytes()).to_hex().to_string()
    }

    /// What separates this spec from one whose [`RunSpec::identity_json`] was kept; empty if it is the same run.
    pub fn differences(&self, kept_identity: &str) -> Result<Vec<Difference>, serde_json::Error> {
        let before: Value = serde_json::from_str(kept_identity)?;
        let now: Value = serde_json::from_str(&self.identity_json())?;
        let mut found = Vec::new();
        compare("", Some(&before), Some(&now), &mut found);
        Ok(found)
    }
}

fn remove(value: &mut Value, path: &str) {
    let (parents, last) = path.rsplit_once('.').unwrap_or(("", path));
    let parent = parents.split('.').filter(|p| !p.is_empty()).try_fold(value, |v, key| v.get_mut(key));
    if let Some(fields) = parent.and_then(Value::as_object_mut) {
        fields.shift_remove(last);
    }
}

fn compare(path: &str, before: Option<&Value>, now: Option<&Value>, found: &mut Vec<Difference>) {
    if let (Some(Value::Object(a)), Some(Value::Object(b))) = (before, now) {
        let added = b.keys().filter(|key| !a.contains_key(*key));
        for key in a.keys().chain(added) {
            let child = if path.is_empty() { key.clone() } else { format!("{path}.{key}") };
            compare(&child, a.get(key), b.get(key), found);
        }
    } else if before != now {
        found.push(Difference { path: path.to_owned(), before: before.cloned(), now: now.cloned() });
    }
}
