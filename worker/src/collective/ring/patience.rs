//! How long both halves of a join wait, and why they stop.

use std::{
    io,
    net::TcpStream,
    os::fd::BorrowedFd,
    sync::atomic::{AtomicBool, Ordering},
    time::{Duration, Instant},
};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use super::abort::RingAbort;
use crate::clock;
use crate::collective::JoinError;

/// Deadline, abort and the other half of the join are looked at this often.
pub(super) const SLICE: Duration = Duration::from_millis(20);

/// The outcome of half a join; `Err(None)` if it was given up for a reason known elsewhere.
pub(super) type Half = Result<TcpStream, Option<JoinError>>;

/// Why waiting ended without what was waited for.
pub(super) enum Stop {
    Deadline,
    /// Aborted, or the other half of the join has failed: our reason will not be read.
    GivenUp,
    Broken(io::Error),
}

/// How long both halves of a join wait.
pub(super) struct Patience<'a> {
    pub begin: Instant,
    deadline: Instant,
    abort: &'a RingAbort,
    given_up: AtomicBool,
}

impl<'a> Patience<'a> {
    /// From now on.
    pub(super) fn new(deadline: Instant, abort: &'a RingAbort) -> Self {
        Self { begin: clock::now(), deadline, abort, given_up: AtomicBool::new(false) }
    }

    /// The other half need not go on without this one.
    pub(super) fn note(&self, half: &Half) {
        if half.is_err() {
            self.given_up.store(true, Ordering::Relaxed);
        }
    }

    pub(super) fn check(&self) -> Result<(), Stop> {
        if self.given_up.load(Ordering::Relaxed) || self.abort.reason().is_some() {
            return Err(Stop::GivenUp);
        }
        if clock::now() >= self.deadline { Err(Stop::Deadline) } else { Ok(()) }
    }

    /// Waits for one of the sockets, at most `slice`.
    pub(super) fn poll(&self, sockets: &mut [PollFd<'_>], slice: Duration) -> Result<(), Stop> {
        self.check()?;
        let left = self.deadline.saturating_duration_since(clock::now()).min(slice);
        let timeout = PollTimeout::try_from(left.as_millis().max(1)).unwrap_or(PollTimeout::MAX);
        match poll(sockets, timeout) {
            Ok(_) | Err(nix::errno::Errno::EINTR) => Ok(()),
            Err(error) => Err(Stop::Broken(error.into())),
        }
    }

    /// Waits until the socket is ready.
    pub(super) fn ready(&self, socket: BorrowedFd<'_>, flags: PollFlags) -> Result<(), Stop> {
        loop {
            let mut sockets = [PollFd::new(socket, flags)];
            self.poll(&mut sockets, SLICE)?;
            if sockets[0].any().unwrap_or(true) {
                return Ok(());
            }
        }
    }

    /// Lets time pass.
    pub(super) fn pause(&self, pause: Duration) -> Result<(), Stop> {
        let until = clock::now() + pause;
        while clock::now() < until {
            self.poll(&mut [], until.saturating_duration_since(clock::now()).min(SLICE))?;
        }
        Ok(())
    }
}
