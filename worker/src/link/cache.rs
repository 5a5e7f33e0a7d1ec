//! What trainer and control plane say to each other about the feature cache. The control plane decides where a step takes its features
//! from, and says it with the lease; the trainer reports what became of it.

use std::{ops::Range, time::Duration};

use coxswain_proto::{
    cache_plan::{CacheGeneration, Drift},
    ids::{Bytes, Step},
};

/// One step's share of work.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Leased {
    /// Positions within the step's batch.
    pub slice: Range<u64>,
    /// Where the step takes its features from.
    pub turn: CacheTurn,
}

/// Where a step takes its features from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CacheTurn {
    /// They are computed in the step; everything trains.
    Live {
        /// The generation that served last, which drift is measured against where the live phase ends; none if none did.
        kept: Option<CacheSpace>,
    },
    /// They come from this generation; what lies below the tap rests. At the first step of a generation (`since` is this step) every
    /// rank takes a snapshot of the adapter as it is before the step.
    Cached(CacheSpace),
}

impl CacheTurn {
    /// Everything is computed, and nothing was ever cached.
    pub const LIVE: Self = Self::Live { kept: None };

    /// As step reports have it: the generation that serves, or 0.
    pub fn number(&self) -> u64 {
        match self {
            Self::Live { .. } => 0,
            Self::Cached(space) => space.generation.number,
        }
    }
}

/// A generation of the cache, and where its features lie.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CacheSpace {
    /// Which, and since when.
    pub generation: CacheGeneration,
    /// Its directory in the store, once rank 0 has reported it.
    pub space: Option<String>,
}

/// What the cache did for one rank in one step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CacheUse {
    /// Samples whose features were there.
    pub hits: u64,
    /// Samples whose features were computed.
    pub misses: u64,
    /// Spent on reading.
    pub read: Duration,
    /// Spent on computing and storing what was missing.
    pub fill: Duration,
}

/// What rank 0 knows of a generation. Counts are levels: the last report wins.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct CacheReport {
    /// Which.
    pub generation: u64,
    /// Its directory in the store; empty if there is none yet.
    pub space: String,
    /// Samples whose features are stored.
    pub stored: u64,
    /// Samples in all.
    pub total: u64,
    /// Bytes they take.
    pub bytes: Bytes,
    /// Samples of one forward pass when missing features are computed now; 0 when nothing was missing yet.
    pub fill_batch: u32,
    /// Records that were damaged, and computed again.
    pub damaged: u64,
    /// How far its features have moved, where a live phase ends.
    pub drift: Option<CacheDrift>,
    /// Its adapter cannot be had: what is missing is computed with the present one, and the next turn must not keep it.
    pub stale_unavailable: bool,
}

/// A measurement of drift.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CacheDrift {
    /// The step before which it was measured: where a live phase ends.
    pub at: Step,
    /// What came out.
    pub drift: Drift,
    /// On how many probes.
    pub probes: u32,
}
