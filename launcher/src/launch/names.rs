//! Names of machines, looked up while nothing else can go on: a name server that hangs is waited for once,
//! and named.

use std::{
    net::{SocketAddr, ToSocketAddrs},
    sync::{Mutex, PoisonError, mpsc},
    time::{Duration, Instant},
};

use crate::clock;

/// The system asks a second server after five seconds.
const PATIENCE: Duration = Duration::from_secs(7);
/// A name that had no answer in time is not waited for again in this time.
const SILENCE: Duration = Duration::from_secs(60);

/// The name that had no answer last, and when it was asked for.
static SILENT: Mutex<Option<(String, Instant)>> = Mutex::new(None);

/// Addresses of a host, as far as they are found in a few seconds; an address is its own.
pub fn look_up(host: &str, port: u16) -> Vec<SocketAddr> {
    let bare = host.trim_start_matches('[').trim_end_matches(']').to_owned();
    if let Ok(ip) = bare.parse() {
        return vec![SocketAddr::new(ip, port)];
    }
    let is_recent = |(name, at): &(String, Instant)| *name == bare && at.elapsed() < SILENCE;
    if SILENT.lock().unwrap_or_else(PoisonError::into_inner).as_ref().is_some_and(is_recent) {
        return Vec::new();
    }
    let (tell, told) = mpsc::channel();
    let name = bare.clone();
    // The lookup cannot be called off; it ends by itself.
    std::thread::spawn(move || {
        let found = (name.as_str(), port).to_socket_addrs().map(Iterator::collect::<Vec<_>>);
        let _ = tell.send(found.unwrap_or_default());
    });
    told.recv_timeout(PATIENCE).unwrap_or_else(|_| {
        tracing::warn!(
            "{bare} cannot be looked up: no name server has answered in {} s (/etc/resolv.conf); \
             continuing without its address",
            PATIENCE.as_secs()
        );
        *SILENT.lock().unwrap_or_else(PoisonError::into_inner) = Some((bare, clock::now()));
        Vec::new()
    })
}
