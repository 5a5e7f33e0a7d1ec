//! Who is connected: strangers, who have not shown yet that they may come in, and clients. Each kind has a
//! bound of its own. A stranger who finds all their places taken gets that of the one who has been there
//! longest: who is silent keeps nobody out.

use std::{
    collections::BTreeMap,
    net::{Shutdown, SocketAddr, TcpStream},
    sync::{Condvar, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use crate::{
    clock::Stopwatch,
    limits::{MAX_CLIENTS, MAX_STRANGERS},
};

/// Between two lines of the log about those who were turned away.
const LINE_PAUSE: Duration = Duration::from_secs(60);

/// Connections, by their number.
#[derive(Debug, Default)]
pub struct Clients {
    connected: Mutex<ClientTable>,
    gone: Condvar,
    refusals: Mutex<Refusals>,
}

#[derive(Debug, Default)]
struct ClientTable {
    next: u64,
    strangers: BTreeMap<u64, TcpStream>,
    clients: BTreeMap<u64, TcpStream>,
    closing: bool,
}

/// Since the last line about them.
#[derive(Debug, Default)]
struct Refusals {
    count: u64,
    told: Option<Stopwatch>,
}

impl Refusals {
    /// One more; how many there are to be told, if the last line was `pause` ago.
    fn add(&mut self, pause: Duration) -> Option<u64> {
        self.count += 1;
        if self.told.is_some_and(|told| told.elapsed() < pause) {
            return None;
        }
        self.told = Some(Stopwatch::start());
        Some(std::mem::take(&mut self.count))
    }
}

impl ClientTable {
    fn is_empty(&self) -> bool {
        self.strangers.is_empty() && self.clients.is_empty()
    }
}

impl Clients {
    fn lock(&self) -> MutexGuard<'_, ClientTable> {
        self.connected.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The number of a new connection, or why it gets none.
    pub fn admit(&self, stream: &TcpStream, from: SocketAddr) -> Result<u64, String> {
        let stream = stream.try_clone().map_err(|error| error.to_string())?;
        let mut connected = self.lock();
        if connected.closing {
            return Err("the server is shutting down".to_owned());
        }
        let longest = match connected.strangers.len() < MAX_STRANGERS {
            true => None,
            false => connected.strangers.pop_first(),
        };
        let number = connected.next;
        connected.next += 1;
        connected.strangers.insert(number, stream);
        drop(connected);
        if let Some((_, stranger)) = longest {
            // Its thread finds the end of its stream.
            let _ = stranger.shutdown(Shutdown::Both);
            self.refuse(
                from,
                &format!("it had not identified itself, and {MAX_STRANGERS} others have connected since"),
            );
        }
        Ok(number)
    }

    /// A stranger has shown that it may come in; false if there is no room for it, or it has been cut off.
    pub fn let_in(&self, number: u64) -> bool {
        let mut connected = self.lock();
        if connected.clients.len() >= MAX_CLIENTS {
            return false;
        }
        let stranger = connected.strangers.remove(&number);
        let is_there = stranger.is_some();
        connected.clients.extend(stranger.map(|stream| (number, stream)));
        is_there
    }

    /// One has gone.
    pub fn remove(&self, number: u64) {
        let mut connected = self.lock();
        connected.strangers.remove(&number);
        connected.clients.remove(&number);
        drop(connected);
        self.gone.notify_all();
    }

    /// Whether no more are let in.
    pub fn are_closing(&self) -> bool {
        self.lock().closing
    }

    /// Lets no more in.
    pub fn close(&self) {
        self.lock().closing = true;
    }

    /// Waits a moment for one to go.
    pub fn wait_for_room(&self) {
        drop(self.gone.wait_timeout(self.lock(), Duration::from_secs(1)));
    }

    /// Reads no more of any, and waits for their end; how many had not gone in time.
    pub fn drain(&self, patience: Duration) -> usize {
        let connected = self.lock();
        // A client's thread finds the end of its stream behind the observation that it is at.
        let all = connected.strangers.values().chain(connected.clients.values());
        all.for_each(|stream| drop(stream.shutdown(Shutdown::Read)));
        let waited = self.gone.wait_timeout_while(connected, patience, |connected| !connected.is_empty());
        let left = waited.unwrap_or_else(PoisonError::into_inner).0;
        left.strangers.len() + left.clients.len()
    }

    /// Counts one that was not let in, and says so at most once a minute.
    pub fn refuse(&self, from: SocketAddr, why: &str) {
        let mut refusals = self.refusals.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(count) = refusals.add(LINE_PAUSE) {
            tracing::warn!(%from, count, "connections rejected since the last such line: {count}; reason for the last: {why}");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_caller_that_does_not_give_up_fills_no_log() {
        let mut refusals = Refusals::default();
        assert_eq!(refusals.add(LINE_PAUSE), Some(1), "the first is told at once");
        assert!((0..1_000).all(|_| refusals.add(LINE_PAUSE).is_none()));
        assert_eq!(refusals.add(Duration::ZERO), Some(1_001), "and the others with the next line");
    }
}
