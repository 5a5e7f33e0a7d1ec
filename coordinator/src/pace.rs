//! How fast a connection is read. One on which a read was refused a moment ago is read a little at a time:
//! who asks without a pause waits, instead of costing the run the time to say no.

use std::sync::{
    Mutex, PoisonError,
    atomic::{AtomicUsize, Ordering},
};

use coxswain_identity::Caller;
use coxswain_proto::limits::{MAX_READS_OF_CONNECTION, REFUSAL_REMEMBERED};
use tokio::time::Instant;

use crate::standing::Attendance;

/// What is known of a connection, shared by its calls.
#[derive(Debug)]
pub struct Peer {
    /// Who has called.
    pub caller: Caller,
    /// Place among all connections.
    pub attendance: Attendance,
    reads: AtomicUsize,
    refused: Mutex<Option<Instant>>,
}

impl Peer {
    /// Of a connection that was just accepted.
    pub fn new(caller: Caller, attendance: Attendance) -> Self {
        Self { caller, attendance, reads: AtomicUsize::new(0), refused: Mutex::new(None) }
    }

    /// One more read, unless there are as many as may be.
    pub fn begin_read(&self) -> bool {
        let more = |reads| (reads < MAX_READS_OF_CONNECTION).then_some(reads + 1);
        self.reads.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more).is_ok()
    }

    /// One less.
    pub fn end_read(&self) {
        self.reads.fetch_sub(1, Ordering::Relaxed);
    }

    /// A read was refused.
    pub fn refuse(&self, now: Instant) {
        *self.refused.lock().unwrap_or_else(PoisonError::into_inner) = Some(now);
    }

    /// Whether one was refused a moment ago.
    pub fn was_refused(&self, now: Instant) -> bool {
        let refused = *self.refused.lock().unwrap_or_else(PoisonError::into_inner);
        refused.is_some_and(|at| now.duration_since(at) < REFUSAL_REMEMBERED)
    }
}
