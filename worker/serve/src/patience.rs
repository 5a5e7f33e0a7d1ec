//! How long a connection may take for what it is at, however it cuts that into pieces: who it is, and each of
//! its observations.

use std::{
    cell::Cell,
    io::{self, ErrorKind, Read, Write},
    net::TcpStream,
    time::Duration,
};

use crate::{
    clock::Stopwatch,
    limits::{AUTHENTICATION, GLANCE, OBSERVATION_TIME, STALL},
};

/// A connection with a limit.
pub struct PacedStream<'s> {
    stream: &'s TcpStream,
    patience: &'s Patience,
}

/// What a connection is at, and since when.
pub struct Patience {
    since: Cell<Stopwatch>,
    limit: Cell<Duration>,
    /// It is at nothing: it may be silent for as long as it lives.
    rests: Cell<bool>,
    /// It is looked at in passing, and not waited for.
    is_glance: Cell<bool>,
}

impl Patience {
    /// Patience with a stranger that has just come.
    pub fn with_a_stranger() -> Self {
        Self {
            since: Cell::new(Stopwatch::start()),
            limit: Cell::new(AUTHENTICATION),
            rests: Cell::new(false),
            is_glance: Cell::new(false),
        }
    }

    /// What reads within `look` get is what has come already; nothing is an error of the kind
    /// [`WouldBlock`](ErrorKind::WouldBlock), and so is an end, which the next read finds.
    pub fn glance<R>(&self, look: impl FnOnce() -> R) -> R {
        self.is_glance.set(true);
        let seen = look();
        self.is_glance.set(false);
        seen
    }

    /// What it was at is done. The next thing begins with its next byte, and is an observation.
    pub fn rest(&self) {
        self.rests.set(true);
    }

    /// What is left; an error if nothing is.
    fn left(&self) -> io::Result<Option<Duration>> {
        if self.rests.get() {
            return Ok(None);
        }
        let limit = self.limit.get();
        let left = limit.saturating_sub(self.since.get().elapsed());
        match left.is_zero() {
            false => Ok(Some(left.min(STALL))),
            true => {
                let late = format!("it did not complete what it began to send within {} s", limit.as_secs());
                Err(io::Error::new(ErrorKind::TimedOut, late))
            }
        }
    }

    fn came(&self, count: usize) {
        if count > 0 && self.rests.replace(false) {
            self.since.set(Stopwatch::start());
            self.limit.set(OBSERVATION_TIME);
        }
    }
}

impl<'s> PacedStream<'s> {
    /// This one.
    pub fn new(stream: &'s TcpStream, patience: &'s Patience) -> Self {
        Self { stream, patience }
    }

    /// First byte, which stays there; nothing if it has gone.
    pub fn first(&self) -> io::Result<Option<u8>> {
        self.stream.set_read_timeout(self.patience.left()?)?;
        let mut first = [0];
        Ok((self.stream.peek(&mut first)? > 0).then_some(first[0]))
    }
}

impl Read for PacedStream<'_> {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        if self.patience.is_glance.get() {
            self.stream.set_read_timeout(Some(GLANCE))?;
            if self.stream.peek(&mut [0])? == 0 {
                return Err(ErrorKind::WouldBlock.into());
            }
        } else {
            self.stream.set_read_timeout(self.patience.left()?)?;
        }
        let count = self.stream.read(bytes)?;
        self.patience.came(count);
        Ok(count)
    }
}

impl Write for PacedStream<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.stream.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.stream.flush()
    }
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;

    /// Sends a byte whenever the last one has been read, until that is refused.
    fn drip(sender: &mut TcpStream, receiver: &mut PacedStream<'_>) -> io::Error {
        loop {
            sender.write_all(b"G").expect("the other end is open");
            if let Err(error) = receiver.read(&mut [0]) {
                return error;
            }
        }
    }

    #[test]
    fn who_sends_a_byte_at_a_time_is_given_up_and_who_rests_is_not() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut sender = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (stream, _) = listener.accept().unwrap();
        let patience = Patience::with_a_stranger();
        let mut receiver = PacedStream::new(&stream, &patience);
        assert_eq!(patience.limit.get(), AUTHENTICATION);
        patience.limit.set(Duration::from_millis(50));
        assert_eq!(drip(&mut sender, &mut receiver).kind(), ErrorKind::TimedOut);
        patience.rest();
        assert_eq!(patience.left().unwrap(), None, "for as long as it lives");
        sender.write_all(b"G").unwrap();
        // What is left of the byte that came too late, and the first one of an observation.
        receiver.read_exact(&mut [0; 2]).unwrap();
        assert_eq!((patience.limit.get(), patience.left().unwrap()), (OBSERVATION_TIME, Some(STALL)));
        patience.limit.set(Duration::from_millis(50));
        assert_eq!(drip(&mut sender, &mut receiver).kind(), ErrorKind::TimedOut);
    }
}
