//! What of a communicator may leave its thread.

use std::sync::atomic::AtomicU64;

/// Ends a communicator from another thread, at once.
pub trait AbortHandle: Send + Sync {
    /// The collective in flight, and every later one, fails with
    /// [`CollectiveError::Aborted`](super::CollectiveError::Aborted).
    fn abort(&self, reason: &str);
}

/// How far a communicator has come, readable from any thread.
#[derive(Debug, Default)]
pub struct Progress {
    /// Sequence number of the last collective entered; they count from 1.
    pub entered: AtomicU64,
    /// Sequence number of the last collective finished.
    pub finished: AtomicU64,
    /// Nanoseconds spent in collectives so far, waiting for slower ranks included.
    pub busy_nanos: AtomicU64,
}
