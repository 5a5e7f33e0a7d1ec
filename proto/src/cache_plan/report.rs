//! What is said of the feature cache: by a rank of its steps, by rank 0 of a generation. Workers say it, the
//! coordinator keeps records of it.

use std::time::Duration;

use super::Drift;
use crate::ids::{Bytes, Step};

/// What the cache did in one step, or in several.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CacheUse {
    /// Samples whose features were there.
    pub hits: u64,
    /// Samples whose features were computed.
    pub misses: u64,
    /// Records written to the store since the step before; others may not see all of them yet.
    pub kept: u64,
    /// Spent on reading.
    pub read: Duration,
    /// Spent on computing what was missing.
    pub fill: Duration,
}

impl CacheUse {
    /// Adds another rank's, or step's.
    pub fn add(&mut self, other: &Self) {
        self.hits = self.hits.saturating_add(other.hits);
        self.misses = self.misses.saturating_add(other.misses);
        self.kept = self.kept.saturating_add(other.kept);
        self.read += other.read;
        self.fill += other.fill;
    }

    /// All samples of `ranks` ranks that were added up, and the mean of their times.
    pub fn mean_of(self, ranks: u32) -> Self {
        let n = ranks.max(1);
        Self { read: self.read / n, fill: self.fill / n, ..self }
    }
}

/// What rank 0 knows of a generation, for all ranks. Counts are levels: the last report wins.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct CacheReport {
    /// Which.
    pub generation: u64,
    /// Directory in the store; empty if there is none yet.
    pub namespace: String,
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
    /// How far its features have moved since it began, once that has been measured after a live phase.
    pub drift: Option<CacheDrift>,
    /// Adapter cannot be had: what is missing is computed with the present one, and the next cache phase
    /// must not keep it.
    pub lost: bool,
}

/// A measurement of drift.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CacheDrift {
    /// The cache phase that it belongs to: the step where a cached phase begins, or, where drift decides, the
    /// one from which on it decides. Both have the same features, since the adapter rests between them.
    pub at: Step,
    /// What came out.
    pub drift: Drift,
    /// On how many probes.
    pub probes: u32,
}
