//! Requests are made by a few threads of their own, for which callers wait.

use std::sync::{OnceLock, mpsc};

use tokio::runtime::{Builder, Runtime};

use crate::error::RemoteError;

/// What a future makes of itself on this crate's own threads, which wait for servers and do nothing else.
pub fn wait<T: Send + 'static>(
    future: impl Future<Output = Result<T, RemoteError>> + Send + 'static,
) -> Result<T, RemoteError> {
    static RUNTIME: OnceLock<std::io::Result<Runtime>> = OnceLock::new();
    let start = || Builder::new_multi_thread().worker_threads(2).thread_name("bucket").enable_all().build();
    let lost =
        |why: &dyn std::fmt::Display| RemoteError::Refused(format!("the threads for requests failed: {why}"));
    let runtime = RUNTIME.get_or_init(start).as_ref().map_err(|error| lost(error))?;
    let (send, receive) = mpsc::sync_channel(1);
    runtime.spawn(async move {
        let _ = send.send(future.await);
    });
    receive.recv().map_err(|_| lost(&"a request ended without a result"))?
}
