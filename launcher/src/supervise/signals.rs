//! The signals a launcher answers: SIGINT, SIGTERM, SIGHUP, SIGQUIT.

use std::io;

use tokio::{
    signal::unix::{SignalKind, signal},
    sync::mpsc,
};

/// Signals waiting to be answered; a user who presses Ctrl-C more often than this is understood already.
const QUEUE: usize = 16;

/// From now on these signals end nothing by themselves; they arrive at the receiver.
pub fn catch() -> io::Result<mpsc::Receiver<i32>> {
    let (sender, receiver) = mpsc::channel(QUEUE);
    for kind in [SignalKind::interrupt(), SignalKind::terminate(), SignalKind::hangup(), SignalKind::quit()] {
        let mut caught = signal(kind)?;
        let sender = sender.clone();
        tokio::spawn(async move {
            while caught.recv().await.is_some() {
                if sender.send(kind.as_raw_value()).await.is_err() {
                    return;
                }
            }
        });
    }
    Ok(receiver)
}

/// `SIGINT` for 2.
pub fn name(number: i32) -> String {
    nix::sys::signal::Signal::try_from(number)
        .map_or_else(|_| format!("signal {number}"), |s| s.as_str().to_owned())
}
