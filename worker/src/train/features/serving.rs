//! A generation of kept features, ready to serve.

use std::sync::Arc;

use coxswain_nn::{kernels::Tape, params::Trainables};
use coxswain_proto::cache_plan::CacheGeneration;

use super::adapter::AdapterSnapshot;
use coxswain_feature_store::{Namespace, NamespaceKey};

use crate::feeder::KeptFeatures;

/// The generation that serves, or has served last.
pub(super) struct Serving<B: Tape<Base = B>> {
    pub generation: CacheGeneration,
    /// Names its namespace.
    pub key: NamespaceKey,
    /// None if the store has no place for it: then everything is computed, every time.
    pub namespace: Option<Namespace>,
    pub source: KeptFeatures,
    /// The adapter it was made with; none if none lies below the tap.
    pub adapter: Option<Arc<AdapterSnapshot>>,
    /// The adapter, ready to compute with, where it is another than the present one.
    pub older: Option<Trainables<B>>,
    /// The adapter it was made with cannot be had; this is the one that was there instead.
    pub stale: bool,
}

impl<B: Tape<Base = B>> Serving<B> {
    /// Bytes held for it.
    pub fn bytes(&self) -> u64 {
        let adapter = self.adapter.as_ref().map_or(0, |adapter| adapter.bytes());
        // Ready to compute with, it is there once more.
        let copies = 1 + u64::from(self.older.is_some());
        self.namespace.as_ref().map_or(0, Namespace::index_bytes) + copies * adapter
    }
}
