//! A run specification as it travels and as it is recognised: JSON with a digest.
//!
//! The digest names *what is learned*: which keys belong to that, `identity` says.

use crate::{
    config::ConfigError,
    identity::{BASE_DIGEST, Identity, TOLD, may_change},
    run_spec::RunSpec,
    v1,
};

/// Why a document is not a run specification.
#[derive(Debug, thiserror::Error)]
pub enum DocumentError {
    /// Not the JSON of a [`RunSpec`].
    #[error("spec.json is not a run specification of this version: {0}")]
    Json(#[from] serde_json::Error),
    /// The digest does not belong to the specification.
    #[error("spec.digest is {found}, but spec.json hashes to {computed}: spec.json was changed in transit")]
    Digest {
        /// As sent.
        found: String,
        /// As computed here.
        computed: String,
    },
    /// The specification contradicts itself.
    #[error("spec.json is not a usable specification: {0}")]
    Invalid(#[from] ConfigError),
}

const ABSENT: &str = "(absent)";

/// One key on which two specifications differ, with both values as JSON.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Difference {
    /// Dotted key.
    pub key: String,
    /// Value of the first specification; `(absent)` without one.
    pub left: String,
    /// Value of the second.
    pub right: String,
    may_change: bool,
}

impl Difference {
    /// Whether a run may go on with it.
    pub fn may_change(&self) -> bool {
        self.may_change
    }
}

impl std::fmt::Display for Difference {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} ({} there, {} here)", self.key, self.left, self.right)
    }
}

/// The digest that names what a specification learns: lower-case hex BLAKE3 over its sorted dotted keys.
pub fn digest(spec: &RunSpec) -> String {
    let mut hasher = blake3::Hasher::new();
    for (key, value) in identity(spec).named() {
        hasher.update(format!("{key}={value}\n").as_bytes());
    }
    hasher.finalize().to_hex().to_string()
}

/// The digest without what may change where a run goes on: equal for all that a run has ever been.
pub fn core_digest(spec: &RunSpec) -> String {
    let mut hasher = blake3::Hasher::new();
    let moves = spec.marks().base().filter(|_| spec.train.base_digest.is_some());
    for (key, value) in identity(spec).named().filter(|(key, _)| !may_change(key) && moves != Some(*key)) {
        hasher.update(format!("{key}={value}\n").as_bytes());
    }
    hasher.finalize().to_hex().to_string()
}

/// The keys that decide what is learned and on which two specifications differ. Of two tasks only that is
/// told: their other keys mean nothing to each other.
pub fn differences(left: &RunSpec, right: &RunSpec) -> Vec<Difference> {
    let other_task = left.task != right.task;
    let same_base = left.train.base_digest.is_some() && left.train.base_digest == right.train.base_digest;
    let moves = right.marks().base().filter(|_| same_base).map(str::to_owned);
    let (left, right) = (identity(left).keys(), identity(right).keys());
    let absent = || ABSENT.to_owned();
    let keys: std::collections::BTreeSet<_> = left.keys().chain(right.keys()).collect();
    keys.into_iter()
        .filter(|key| left.get(*key) != right.get(*key))
        .filter(|key| !other_task || *key == "task.type")
        .map(|key| Difference {
            key: key.clone(),
            left: left.get(key).cloned().unwrap_or_else(absent),
            right: right.get(key).cloned().unwrap_or_else(absent),
            may_change: may_change(key) || moves.as_ref() == Some(key),
        })
        .collect()
}

/// Where two runs differ in their pretrained models and in nothing else that must not change: how.
pub fn other_base(left: &RunSpec, right: &RunSpec) -> Option<Vec<Difference>> {
    let mut differences = differences(left, right);
    differences.retain(|difference| !difference.may_change());
    let of_base = |key: &str| key == BASE_DIGEST || right.marks().base() == Some(key);
    let is_it = !differences.is_empty() && differences.iter().all(|difference| of_base(&difference.key));
    is_it.then_some(differences)
}

/// The keys outside of what is learned whose changes are told where a run goes on.
pub fn told_changes(left: &RunSpec, right: &RunSpec) -> Vec<Difference> {
    let (left, right) = (left.document(), right.document());
    let value = |document: &serde_json::Map<_, _>, key: &str| {
        let (section, name) = key.split_once('.').expect("keys are a section's");
        let value: Option<&serde_json::Value> = document.get(section).and_then(|section| section.get(name));
        value.filter(|value| !value.is_null()).map_or_else(|| ABSENT.to_owned(), ToString::to_string)
    };
    let difference = |key: &&str| {
        let (left, right) = (value(&left, key), value(&right, key));
        (left != right).then(|| Difference { key: (*key).to_owned(), left, right, may_change: true })
    };
    TOLD.iter().filter_map(difference).collect()
}

impl From<&RunSpec> for v1::RunSpecDocument {
    fn from(spec: &RunSpec) -> Self {
        let json = serde_json::to_string(spec).expect("a run specification has text as keys");
        Self { json, digest: digest(spec) }
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
        spec.check()?;
        Ok(spec)
    }
}

fn identity(spec: &RunSpec) -> Identity {
    Identity::from_document(&spec.document(), spec.marks())
}

#[cfg(test)]
mod tests;
