//! The null object of [`Collective`]: a world of one, where every operation is the identity.

use std::sync::{Arc, Mutex, PoisonError, atomic::Ordering};

use coxswain_proto::ids::Rank;

use super::{AbortHandle, Buf, BufMut, Collective, CollectiveError, Cuts, Progress, Reduce};

/// A world of one.
#[derive(Debug, Default)]
pub struct Solo {
    abort: Arc<SoloAbort>,
    progress: Arc<Progress>,
}

/// Nothing is ever in flight, but what was aborted stays aborted.
#[derive(Debug, Default)]
struct SoloAbort {
    reason: Mutex<Option<String>>,
}

impl AbortHandle for SoloAbort {
    fn abort(&self, reason: &str) {
        let mut slot = self.reason.lock().unwrap_or_else(PoisonError::into_inner);
        slot.get_or_insert_with(|| reason.to_owned());
    }
}

impl Solo {
    fn pass(&mut self, operation: &'static str) -> Result<(), CollectiveError> {
        let sequence = self.progress.entered.fetch_add(1, Ordering::Relaxed) + 1;
        let reason = self.abort.reason.lock().unwrap_or_else(PoisonError::into_inner).clone();
        if let Some(reason) = reason {
            return Err(CollectiveError::Aborted { sequence, operation, reason });
        }
        self.progress.finished.store(sequence, Ordering::Relaxed);
        Ok(())
    }
}

impl Collective for Solo {
    fn rank(&self) -> Rank {
        Rank(0)
    }

    fn world(&self) -> usize {
        1
    }

    fn all_reduce(&mut self, _buffer: BufMut<'_>, _reduce: Reduce) -> Result<(), CollectiveError> {
        self.pass("all_reduce")
    }

    fn all_gather(&mut self, shard: Buf<'_>, mut output: BufMut<'_>) -> Result<(), CollectiveError> {
        output.put("all_gather", 0..output.len(), shard)?;
        self.pass("all_gather")
    }

    fn reduce_scatter_parts(
        &mut self,
        _buffer: BufMut<'_>,
        _cuts: &Cuts,
        _reduce: Reduce,
    ) -> Result<(), CollectiveError> {
        self.pass("reduce_scatter")
    }

    fn all_gather_parts(&mut self, _buffer: BufMut<'_>, _cuts: &Cuts) -> Result<(), CollectiveError> {
        self.pass("all_gather")
    }

    fn shift_parts(
        &mut self,
        _buffer: BufMut<'_>,
        _cuts: &Cuts,
        distance: usize,
    ) -> Result<(), CollectiveError> {
        super::check_distance(distance, 1)?;
        self.pass("shift")
    }

    fn broadcast(&mut self, _buffer: BufMut<'_>, root: Rank) -> Result<(), CollectiveError> {
        super::check_root("broadcast", root, 1)?;
        self.pass("broadcast")
    }

    fn barrier(&mut self) -> Result<(), CollectiveError> {
        self.pass("barrier")
    }

    fn abort_handle(&self) -> Arc<dyn AbortHandle> {
        self.abort.clone()
    }

    fn progress(&self) -> Arc<Progress> {
        self.progress.clone()
    }

    fn buffer_bytes(&self) -> usize {
        0
    }
}
