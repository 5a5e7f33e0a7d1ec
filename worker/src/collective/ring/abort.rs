//! Ending a ring from another thread: a reason is left behind and every socket is shut down, which wakes the
//! threads that wait on them.

use std::{
    net::{Shutdown, TcpStream},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use crate::collective::AbortHandle;

/// Ends a [`Ring`](super::Ring), also while it is still being connected.
#[derive(Debug, Default)]
pub struct RingAbort {
    state: Mutex<AbortState>,
}

#[derive(Debug, Default)]
struct AbortState {
    reason: Option<String>,
    sockets: Vec<Arc<TcpStream>>,
}

impl RingAbort {
    /// A handle for a ring that is about to be connected.
    pub fn new() -> Arc<Self> {
        Arc::default()
    }

    /// Why, if [`AbortHandle::abort`] was called.
    pub fn reason(&self) -> Option<String> {
        self.lock().reason.clone()
    }

    /// From now on an abort shuts this socket down; at once if there was one already.
    pub(super) fn watch(&self, socket: &Arc<TcpStream>) {
        let mut state = self.lock();
        if state.reason.is_some() {
            shut_down(socket);
        }
        state.sockets.push(socket.clone());
    }

    /// Shuts all sockets down so that the neighbours learn at once that this rank has left, and lets go of
    /// them.
    pub(super) fn close(&self) {
        self.lock().sockets.drain(..).for_each(|socket| shut_down(&socket));
    }

    fn lock(&self) -> MutexGuard<'_, AbortState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl AbortHandle for RingAbort {
    fn abort(&self, reason: &str) {
        let mut state = self.lock();
        state.reason.get_or_insert_with(|| reason.to_owned());
        state.sockets.iter().for_each(|socket| shut_down(socket));
    }
}

fn shut_down(socket: &TcpStream) {
    // A socket that is not connected any more cannot be shut down, and need not be.
    let _ = socket.shutdown(Shutdown::Both);
}
