//! Processes below a launcher, as Linux shows them, and what a test does to them.

use std::time::{Duration, Instant};

use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};

/// Longer than anything waited for here takes on a loaded machine.
const PATIENCE: Duration = Duration::from_secs(120);

/// Children of a process, whichever of its threads started them.
pub fn children(parent: u32) -> Vec<i32> {
    let tasks = std::fs::read_dir(format!("/proc/{parent}/task")).into_iter().flatten().flatten();
    let lists = tasks.filter_map(|task| std::fs::read_to_string(task.path().join("children")).ok());
    let pids: Vec<String> = lists.collect();
    pids.iter().flat_map(|list| list.split_whitespace()).filter_map(|pid| pid.parse().ok()).collect()
}

/// The launcher's coordinator.
pub fn coordinator_of(launcher: u32) -> Option<i32> {
    let is_coordinator =
        |pid: &i32| entries(*pid, "cmdline").iter().any(|argument| argument == b"coordinator");
    children(launcher).into_iter().find(is_coordinator)
}

/// The launcher's worker of a rank.
pub fn worker_of(launcher: u32, rank: u32) -> Option<i32> {
    let wanted = format!("RANK={rank}").into_bytes();
    children(launcher).into_iter().find(|pid| entries(*pid, "environ").contains(&wanted))
}

/// What a process is called.
pub fn name(pid: i32) -> String {
    std::fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default().trim().to_owned()
}

fn entries(pid: i32, file: &str) -> Vec<Vec<u8>> {
    let text = std::fs::read(format!("/proc/{pid}/{file}")).unwrap_or_default();
    text.split(|byte| *byte == 0).map(<[u8]>::to_vec).collect()
}

/// Waits for a coordinator that is not process `last`.
pub fn wait_for_coordinator(launcher: u32, last: i32) -> i32 {
    wait_for("a coordinator", || coordinator_of(launcher).filter(|pid| *pid != last))
}

/// Waits for a worker of `rank` that is not process `last`.
pub fn wait_for_worker(launcher: u32, rank: u32, last: i32) -> i32 {
    wait_for("a worker", || worker_of(launcher, rank).filter(|pid| *pid != last))
}

/// Waits until something can be observed.
pub fn wait_for<T>(what: &str, mut look: impl FnMut() -> Option<T>) -> T {
    let give_up = Instant::now() + PATIENCE;
    loop {
        if let Some(seen) = look() {
            return seen;
        }
        assert!(Instant::now() < give_up, "{what} did not come");
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// Waits until none of the processes runs any more. Nobody reaps an orphan's orphan at once everywhere: a
/// process that is dead but unreaped counts as gone.
pub fn wait_until_gone(pids: &[i32]) {
    for pid in pids {
        wait_for("the end of a process", || {
            let stat = std::fs::read_to_string(format!("/proc/{pid}/stat"));
            stat.map_or(true, |stat| stat.contains(") Z ") && threads(*pid) <= 1).then_some(())
        });
    }
}

/// Threads of a process. One that was killed is a zombie as soon as its first thread is, and may have others
/// for a moment, which hold its sockets open.
fn threads(pid: i32) -> usize {
    std::fs::read_dir(format!("/proc/{pid}/task")).map_or(0, Iterator::count)
}

/// Sends a signal.
pub fn signal(pid: i32, signal: Signal) {
    kill(Pid::from_raw(pid), signal).unwrap_or_else(|error| panic!("{signal} to {pid}: {error}"));
}

/// What Ctrl-C sends; SIGTERM where this process ignores SIGINT, as background jobs of scripts do, because a
/// launch inherits that.
pub fn interrupt() -> Signal {
    let status = std::fs::read_to_string("/proc/self/status").expect("Linux");
    let ignored = status.lines().find_map(|line| line.strip_prefix("SigIgn:")).expect("a mask");
    let ignored = u64::from_str_radix(ignored.trim(), 16).expect("hexadecimal");
    match ignored & (1 << (Signal::SIGINT as i32 - 1)) {
        0 => Signal::SIGINT,
        _ => Signal::SIGTERM,
    }
}
