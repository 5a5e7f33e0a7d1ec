//! What a rank consumes in a step, and how generations of kept features are handed on.

use std::ops::Range;

use coxswain_feature_store::Digest;
use coxswain_proto::cache_plan::CacheGeneration;
use serde::{Deserialize, Serialize};

use crate::link::CachePhase;

/// What this rank consumes in a step, and where the step takes its features from.
#[derive(Clone, Debug)]
pub(in crate::train) struct Claim {
    /// Positions of the epoch's order.
    pub positions: Vec<Range<u64>>,
    /// As leased.
    pub cache_phase: CachePhase,
}

/// The generation that serves or served last, as ranks and checkpoints hand it on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Mark {
    /// Which, and where.
    #[serde(flatten)]
    pub newest: FeatureVersion,
    /// The one before it, while the drift since then is being measured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub before: Option<FeatureVersion>,
}

/// A generation, and where its features are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FeatureVersion {
    /// Which.
    pub generation: CacheGeneration,
    /// The key of its namespace.
    #[serde(rename = "space")]
    pub namespace: Digest,
}
