//! Rows without features in micro-batches that are ready and wait for their turn: taken out, computed
//! together with those that are due, and put back.
//!
//! So features are computed in batches larger than a micro-batch. Nothing is waited for: what
//! is not ready is computed when it is due. Rows that were taken out and not put back leave their micro-batch
//! incomplete, so a caller that gives up must start again with [`Prefetcher::replan`], which makes those rows
//! anew, or [`Prefetcher::clear`].

use super::{
    prefetch::Prefetcher,
    rows::{RowBatch, UncachedRow},
};

/// A row that was taken out of a micro-batch which waits.
#[derive(Clone, Debug)]
pub struct DeferredRow {
    /// Which micro-batch.
    job: u64,
    /// The row.
    pub missing: UncachedRow,
}

impl Prefetcher {
    /// So many samples are kept ready from now on where features may be missing, if the pipeline's depth is
    /// less.
    pub fn keep_ahead(&mut self, samples: usize) {
        self.shared.lock().kept_ahead = samples;
        self.shared.wanted.notify_all();
    }

    /// Takes out up to `limit` rows without features, in the order in which they will be due. Never blocks.
    pub fn upcoming(&mut self, limit: usize) -> Vec<DeferredRow> {
        let mut state = self.shared.lock();
        let mut taken = Vec::new();
        for (&job, made) in &mut state.done {
            let Ok(RowBatch { missing, lent, .. }) = made else { break };
            let count = missing.len().min(limit - taken.len());
            lent.extend(missing[..count].iter().map(|missing| missing.row));
            taken.extend(missing.drain(..count).map(|missing| DeferredRow { job, missing }));
            if taken.len() == limit {
                break;
            }
        }
        taken
    }

    /// Puts the features of a row in their place. `computed` says whether they were made, and not found after
    /// all.
    pub fn put_back(&mut self, row: &DeferredRow, values: &[f32], computed: bool) {
        let mut state = self.shared.lock();
        let Some(Ok(prepared)) = state.done.get_mut(&row.job) else { return };
        if let Some(features) = prepared.batch.features_mut() {
            features.values[row.missing.place.clone()].copy_from_slice(values);
            prepared.computed.extend(computed.then_some(row.missing.row));
            prepared.lent.retain(|lent| *lent != row.missing.row);
        }
    }
}
