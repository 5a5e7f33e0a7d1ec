//! A limit for a call into a library that cannot be interrupted: the process ends, and its launcher starts
//! another one in its place.

use std::{
    sync::mpsc::{self, RecvTimeoutError},
    thread,
    time::Duration,
};

/// For an abort: it waits for kernels in flight, which end within milliseconds unless the driver hangs.
pub(super) const ABORT_LIMIT: Duration = Duration::from_secs(60);

/// Does `call`; if it has not returned after `limit`, the process aborts with a line that names `what`.
pub(super) fn within<T>(limit: Duration, what: &'static str, call: impl FnOnce() -> T) -> T {
    let (returned, watched) = mpsc::channel::<()>();
    let watch = move || {
        if watched.recv_timeout(limit) == Err(RecvTimeoutError::Timeout) {
            tracing::error!("{what} has not returned within {limit:?}: this worker exits and is replaced");
            std::process::abort();
        }
    };
    // Without a thread for it there is no limit, as before.
    let _ = thread::Builder::new().name("limit".into()).spawn(watch);
    let result = call();
    drop(returned);
    result
}

#[cfg(test)]
mod tests {
    use std::{env, os::unix::process::ExitStatusExt, process::Command};

    use super::*;

    const CHILD: &str = "COX_TEST_LIMIT_CHILD";
    const SIGABRT: i32 = 6;

    #[test]
    fn a_call_that_does_not_return_ends_the_process_and_one_that_does_goes_on() {
        if env::var_os(CHILD).is_some() {
            within::<()>(Duration::from_millis(50), "a test's call", || {
                loop {
                    thread::park();
                }
            });
        }
        assert_eq!(within(Duration::from_secs(600), "a test's call", || 7), 7);
        let name =
            "nccl::limit::tests::a_call_that_does_not_return_ends_the_process_and_one_that_does_goes_on";
        let mut child = Command::new(env::current_exe().unwrap());
        let ended = child.args([name, "--exact"]).env(CHILD, "1").output().unwrap();
        assert_eq!(ended.status.signal(), Some(SIGABRT), "{ended:?}");
    }
}
