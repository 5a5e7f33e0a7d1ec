//! What trainer and control plane say to each other about the feature cache. The control plane decides where
//! a step takes its features from, and says it with the lease; the trainer reports what became of it.

use std::ops::Range;

use coxswain_proto::cache_plan::CacheGeneration;

/// One step's share of work.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StepShare {
    /// Positions within the step's batch.
    pub slice: Range<u64>,
    /// Where the step takes its features from.
    pub cache_phase: CachePhase,
}

/// Where a step takes its features from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CachePhase {
    /// They are computed in the step; everything trains.
    Live {
        /// The generation that served last, which drift is measured against when the live phase is over; none
        /// if none did.
        kept: Option<CacheNamespace>,
    },
    /// They come from this generation; what lies below the tap rests. At the first step of a generation
    /// (`since` is this step) every rank takes a snapshot of the adapter as it is before the step.
    Cached(CacheNamespace),
}

impl CachePhase {
    /// Everything is computed, and nothing was ever cached.
    pub const LIVE: Self = Self::Live { kept: None };

    /// As step reports have it: the generation that serves, or 0.
    pub fn number(&self) -> u64 {
        match self {
            Self::Live { .. } => 0,
            Self::Cached(namespace) => namespace.generation.number,
        }
    }
}

/// A generation of the cache, and where its features lie.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CacheNamespace {
    /// Which, and since when.
    pub generation: CacheGeneration,
    /// Directory in the store, once rank 0 has reported it.
    pub namespace: Option<String>,
}
