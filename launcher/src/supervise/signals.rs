//! The signals a launcher answers: those of a person or a scheduler that ends it, and those by which
//! schedulers announce an end (Slurm's `--signal=USR1@90`, a limit on processor time, a power supply that
//! fails).
//!
//! A process that was started with one of them ignored leaves it ignored: `nohup` asks for that with SIGHUP,
//! and a launcher asks its coordinator and its workers for it with all of them (`child`). What is sent to
//! everything of a launch at once, as systemd's stop and `pkill cox` do, is thus answered by the launcher
//! alone, which has the run drained before it ends its children.

use std::io;

use nix::sys::signal::Signal;
use tokio::{
    signal::unix::{SignalKind, signal},
    sync::mpsc,
};

/// Signals that are answered.
pub const ANSWERED: [Signal; 9] = [
    Signal::SIGINT,
    Signal::SIGTERM,
    Signal::SIGHUP,
    Signal::SIGQUIT,
    Signal::SIGUSR1,
    Signal::SIGUSR2,
    Signal::SIGXCPU,
    Signal::SIGALRM,
    Signal::SIGPWR,
];
/// Signals waiting to be answered; a user who presses Ctrl-C more often than this is understood already.
const QUEUE: usize = 16;

/// Signals as they arrive.
#[derive(Debug)]
pub struct Signals(mpsc::Receiver<i32>);

impl Signals {
    /// The next one; waits for ever where all of them are ignored.
    pub async fn next(&mut self) -> i32 {
        match self.0.recv().await {
            Some(number) => number,
            None => std::future::pending().await,
        }
    }

    /// The next one that insists, after `first` if one came before.
    pub async fn insistence(&mut self, first: Option<i32>) -> i32 {
        loop {
            let number = self.next().await;
            if first.map_or_else(|| insists(number), |first| insists_after(first, number)) {
                return number;
            }
        }
    }
}

/// Waits for a signal that comes from now on and insists, after `first` if one came before; for ever where
/// none can be caught.
pub async fn insistence(first: Option<i32>) {
    match catch() {
        Ok(mut signals) => drop(signals.insistence(first).await),
        Err(_) => std::future::pending().await,
    }
}

/// From now on these signals end nothing by themselves; they are read from what is returned.
pub fn catch() -> io::Result<Signals> {
    let (sender, receiver) = mpsc::channel(QUEUE);
    // Where Linux does not tell, none is taken to be ignored.
    let ignored = ignored(&std::fs::read_to_string("/proc/self/status").unwrap_or_default());
    for number in ANSWERED.map(|signal| signal as i32) {
        if ignored & (1 << (number - 1)) != 0 {
            continue;
        }
        let mut caught = signal(SignalKind::from_raw(number))?;
        let sender = sender.clone();
        tokio::spawn(async move {
            while caught.recv().await.is_some() {
                if sender.send(number).await.is_err() {
                    return;
                }
            }
        });
    }
    Ok(Signals(receiver))
}

/// The ignored signals of a process, signal n as bit n - 1, from its `/proc/PID/status`.
fn ignored(status: &str) -> u64 {
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or(0)
}

/// Whether a second signal of this kind asks to end at once. A hangup does not: it says that a terminal has
/// gone, and the kernel, the shell and systemd all say so, often beside another signal. An announcement does
/// not either: the kernel repeats SIGXCPU every second.
pub fn insists(number: i32) -> bool {
    use nix::libc::{SIGINT, SIGQUIT, SIGTERM};
    [SIGINT, SIGTERM, SIGQUIT].contains(&number)
}

/// Whether a second signal that comes after `first` asks to end at once: a scheduler that has announced an
/// end says SIGTERM when it comes.
pub fn insists_after(first: i32, number: i32) -> bool {
    let was_announced = announces_end(first) && !insists(first);
    insists(number) && !(was_announced && number == nix::libc::SIGTERM)
}

/// Whether the machine is to be taken away, which is one node's affair; else a person means the run.
pub fn announces_end(number: i32) -> bool {
    use nix::libc::{SIGHUP, SIGINT, SIGQUIT};
    ![SIGINT, SIGHUP, SIGQUIT].contains(&number)
}

/// `SIGINT` for 2.
pub fn name(number: i32) -> String {
    Signal::try_from(number).map_or_else(|_| format!("signal {number}"), |s| s.as_str().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_announcement_is_one_nodes_affair_and_never_insists() {
        for announced in [Signal::SIGUSR1, Signal::SIGUSR2, Signal::SIGXCPU, Signal::SIGALRM, Signal::SIGPWR]
        {
            let number = announced as i32;
            assert!(announces_end(number) && !insists(number), "{announced}");
            assert!(!insists_after(number, Signal::SIGTERM as i32), "as Slurm does at the time limit");
            assert!(insists_after(number, Signal::SIGINT as i32));
        }
        assert!(announces_end(Signal::SIGTERM as i32) && insists(Signal::SIGTERM as i32));
        assert!(insists_after(Signal::SIGHUP as i32, Signal::SIGTERM as i32));
        assert!(!announces_end(Signal::SIGINT as i32) && insists(Signal::SIGINT as i32));
    }

    #[test]
    fn what_a_process_ignores_is_read_from_its_status() {
        let status = "Name:\tcox\nSigBlk:\t0000000000000002\nSigIgn:\t0000000000000001\n";
        assert_eq!(ignored(status), 1 << (nix::libc::SIGHUP - 1));
        assert_eq!(ignored("Name:\tcox\n"), 0);
    }
}
