//! The runtime of a command.

/// Runs a future on this thread: commands that talk to a coordinator, and the launcher, whose children live
/// as long as the thread that started them.
pub(super) fn block_on<T>(future: impl Future<Output = T>) -> T {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .expect("a runtime needs only a poll descriptor and memory");
    runtime.block_on(future)
}
