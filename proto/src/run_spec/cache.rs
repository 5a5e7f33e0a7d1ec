//! The section `cache`: which features of what does not train are kept, where, and for how long.

use serde::{Deserialize, Serialize};

/// Features of what does not train, kept instead of computed again.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Cache {
    /// Whether features are kept, and whether they may be older than the adapter.
    pub mode: CacheMode,
    /// Where in the model they are taken.
    pub tap: Tap,
    /// How a value is stored.
    pub dtype: CacheDtype,
    /// The store; `vl-cache` in the run's output directory if absent. Several runs may share one.
    pub dir: Option<String>,
    /// Bytes the store may take; the generations unused for longest give way. No bound if absent.
    pub budget: Option<u64>,
    /// Samples of one forward pass when missing features are computed; the micro-batch if absent. An
    /// out-of-memory halves it.
    pub encoder_batch: Option<usize>,
    /// `periodic`: from the beginning of one live phase to the next.
    pub interval: Span,
    /// `periodic`: how long everything trains at the beginning of an interval.
    pub live: Span,
    /// `periodic`: rebuild only if the features of the probes have moved by more than this relative L2; every
    /// time if absent.
    pub rebuild_above: Option<f64>,
    /// `periodic`: once drift has been above `rebuild_above`, rebuild every time until it is below this
    /// again; `rebuild_above` if absent.
    pub rebuild_below: Option<f64>,
    /// Samples on which drift is measured after a live phase, a few a step; 0 measures nothing.
    pub probe_samples: usize,
}

impl Default for Cache {
    fn default() -> Self {
        Self {
            mode: CacheMode::Off,
            tap: Tap::default(),
            dtype: CacheDtype::Float32,
            dir: None,
            budget: None,
            encoder_batch: None,
            interval: Span { epochs: Some(5), steps: None },
            live: Span { epochs: Some(1), steps: None },
            rebuild_above: None,
            rebuild_below: None,
            probe_samples: 32,
        }
    }
}

/// Whether features are kept, and whether they may be older than the adapter.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CacheMode {
    /// Every step computes everything.
    #[default]
    Off,
    /// What nothing trainable lies below is kept: the same losses as without.
    Exact,
    /// Features are kept as what trains below them makes them: in cached steps that rests, and the rest
    /// trains.
    Periodic,
}

/// Where in the model features are taken, in the words of the task: `auto` (as deep as the mode allows),
/// another name, or a name with a value (`layer: 3`).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Tap(pub serde_json::Value);

impl Default for Tap {
    fn default() -> Self {
        Self("auto".into())
    }
}

impl std::fmt::Display for Tap {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match &self.0 {
            serde_json::Value::String(name) => f.write_str(name),
            serde_json::Value::Object(map) if map.len() == 1 => {
                map.iter().try_for_each(|(name, value)| write!(f, "{name} {value}"))
            }
            other => other.fmt(f),
        }
    }
}

/// How a value of the cache is stored.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum CacheDtype {
    /// 4 bytes, exact.
    #[default]
    Float32,
    /// 2 bytes.
    Bfloat16,
    /// 1 byte, and a float32 scale for each token.
    Int8,
}

/// A length of training: give one of the two.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Span {
    /// Passes over the training samples.
    pub epochs: Option<u64>,
    /// Optimizer steps.
    pub steps: Option<u64>,
}

impl Span {
    /// In steps; at least one. A span that gives neither is refused by
    /// [`RunSpec::check`](super::RunSpec::check).
    pub fn in_steps(self, steps_per_epoch: u64) -> u64 {
        let epochs = self.epochs.unwrap_or(1).saturating_mul(steps_per_epoch);
        self.steps.unwrap_or(epochs).max(1)
    }
}
