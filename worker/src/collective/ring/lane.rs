//! The two directions of a ring, as the pump sees them: write what goes, read what is there, sleep until one
//! of them can move.
//!
//! A lane is the socket to a neighbour, or shared memory beside it if the neighbour is on the same machine.
//! The socket then carries nothing but wake-up calls, and its end, which is how either side learns that the
//! other is gone.

use std::{
    io::{self, ErrorKind, Read, Write},
    net::TcpStream,
    os::fd::AsFd,
    sync::Arc,
};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use super::shared::{Reader, Writer};

/// A direction to or from a neighbour, with its end of shared memory if there is any.
#[derive(Debug)]
pub(super) struct Lane<S> {
    socket: Arc<TcpStream>,
    shared: Option<S>,
    ended: Option<io::Error>,
}

/// The lane to the next rank.
pub(super) type Outbound = Lane<Writer>;
/// The lane from the previous rank.
pub(super) type Inbound = Lane<Reader>;

impl<S> Lane<S> {
    pub fn new(socket: Arc<TcpStream>, shared: Option<S>) -> Self {
        Self { socket, shared, ended: None }
    }

    /// Whether it goes through memory.
    #[cfg(test)]
    pub fn is_shared(&self) -> bool {
        self.shared.is_some()
    }

    /// Whether the neighbour has closed its side. On a socket that carries data a byte that is waiting is the
    /// beginning of a later collective: its sender was alive then, and the neighbour on the sender's other
    /// side will notice if it has died since.
    pub fn has_ended(&mut self) -> bool {
        if self.shared.is_some() {
            self.hear();
            return self.ended.is_some();
        }
        match self.socket.peek(&mut [0]) {
            Ok(count) => count == 0,
            Err(error) => !matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted),
        }
    }

    /// What to wait for: `data`, or where memory is shared to be woken; nothing if it can move by now.
    fn awaits(
        &self,
        data: PollFlags,
        may_sleep: impl Fn(&S) -> io::Result<bool>,
    ) -> io::Result<Option<PollFlags>> {
        match &self.shared {
            None => Ok(Some(data)),
            Some(shared) => Ok(may_sleep(shared)?.then_some(PollFlags::POLLIN)),
        }
    }

    /// Takes wake-up calls off the socket; keeps the error if that is all that will come.
    fn hear(&mut self) {
        if self.shared.is_some() && self.ended.is_none() {
            self.ended = heard(&self.socket);
        }
    }
}

impl Outbound {
    /// Writes what goes now; 0 if nothing does.
    pub fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let Some(shared) = &mut self.shared else { return now((&*self.socket).write(bytes)) };
        // What will not be read need not be written.
        if let Some(error) = self.ended.take() {
            return Err(error);
        }
        let count = shared.write(bytes)?;
        if count > 0 && shared.must_wake() {
            wake(&self.socket);
        }
        Ok(count)
    }
}

impl Inbound {
    /// Copies what is there now without taking it; 0 if nothing is, or nothing will come any more.
    pub fn peek(&self, bytes: &mut [u8]) -> usize {
        let seen = match &self.shared {
            Some(shared) => shared.peek(bytes),
            None => self.socket.peek(bytes),
        };
        // Whatever is wrong with it ends the collective that reads it.
        seen.unwrap_or(0)
    }

    /// Reads what is there now; 0 if nothing is.
    pub fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        let Some(shared) = &mut self.shared else {
            return match (&*self.socket).read(bytes) {
                Ok(0) => Err(closed()),
                other => now(other),
            };
        };
        let count = shared.read(bytes)?;
        if count > 0 && shared.must_wake() {
            wake(&self.socket);
        }
        // A neighbour that has left may have left something behind.
        match self.ended.take() {
            Some(error) if count == 0 => Err(error),
            ended => {
                self.ended = ended;
                Ok(count)
            }
        }
    }
}

/// Sleeps until one of the given lanes can move, or is at its end.
pub(super) fn sleep(next: Option<&mut Outbound>, previous: Option<&mut Inbound>) -> io::Result<()> {
    let mut sockets = Vec::with_capacity(2);
    if let Some(lane) = &next {
        let Some(flags) = lane.awaits(PollFlags::POLLOUT, Writer::may_sleep)? else { return Ok(()) };
        sockets.push(PollFd::new(lane.socket.as_fd(), flags));
    }
    if let Some(lane) = &previous {
        let Some(flags) = lane.awaits(PollFlags::POLLIN, Reader::may_sleep)? else { return Ok(()) };
        sockets.push(PollFd::new(lane.socket.as_fd(), flags));
    }
    match poll(&mut sockets, PollTimeout::NONE) {
        Ok(_) | Err(nix::errno::Errno::EINTR) => {}
        Err(error) => return Err(error.into()),
    }
    drop(sockets);
    if let Some(lane) = next {
        lane.hear();
    }
    if let Some(lane) = previous {
        lane.hear();
    }
    Ok(())
}

/// Takes wake-up calls off a socket; the error if that is all that will come.
fn heard(mut socket: &TcpStream) -> Option<io::Error> {
    loop {
        match socket.read(&mut [0; 64]) {
            Ok(0) => return Some(closed()),
            Ok(_) => {}
            Err(error) if error.kind() == ErrorKind::WouldBlock => return None,
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return Some(error),
        }
    }
}

/// Wakes the neighbour. One that is gone, or has a full queue of calls already, need not be.
fn wake(mut socket: &TcpStream) {
    let _ = socket.write(&[1]);
}

fn closed() -> io::Error {
    io::Error::new(ErrorKind::UnexpectedEof, "connection closed")
}

/// A call that would block has moved nothing.
fn now(result: io::Result<usize>) -> io::Result<usize> {
    match result {
        Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => Ok(0),
        other => other,
    }
}
