//! A caller's line, down which it is told what to do: open, or closed since a moment.

use std::time::Duration;

use super::{event::StreamId, time::Timestamp};

/// The line of a worker or a launcher.
#[derive(Clone, Debug)]
pub struct Line {
    /// The open one.
    pub stream: Option<StreamId>,
    /// Lines opened so far.
    pub opened: u64,
    closed_at: Timestamp,
    reopen_within: Duration,
}

impl Line {
    /// It is to be opened for the first time in this time.
    pub fn closed(now: Timestamp, within: Duration) -> Self {
        Self { stream: None, opened: 0, closed_at: now, reopen_within: within }
    }

    /// It was opened in an earlier life of the coordinator.
    pub fn opened_before(now: Timestamp, within: Duration) -> Self {
        Self { opened: 1, ..Self::closed(now, within) }
    }

    /// It is open; the line that it replaces, if that was.
    pub fn open(&mut self, stream: StreamId) -> Option<StreamId> {
        self.opened += 1;
        self.stream.replace(stream)
    }

    /// It was closed, and must be opened again in this time.
    pub fn close(&mut self, now: Timestamp, within: Duration) {
        (self.stream, self.closed_at, self.reopen_within) = (None, now, within);
    }

    /// When its owner is missed for too long, unless it is open.
    pub fn missed_at(&self) -> Option<Timestamp> {
        self.stream.is_none().then(|| self.closed_at.after(self.reopen_within))
    }
}
