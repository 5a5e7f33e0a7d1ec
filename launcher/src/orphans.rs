//! What the first process of a container owes the others: to wait for those whose parents are gone.
//!
//! `cox` is process 1 where a container's command is `cox run` or `cox serve`. The kernel hands it every
//! process below it whose own parent has ended, of a hook or of `kubectl exec`, and keeps each of them
//! after its end until somebody asks how it ended. Signals need nothing: the ones that `cox` answers have
//! handlers, which is all that the kernel asks of a first process.

use std::{collections::BTreeSet, fs, time::Duration};

use nix::{
    sys::wait::{WaitPidFlag, waitpid},
    unistd::{Pid, getpid},
};

/// Between two looks. Those who have started a process wait for it within a moment: one that is still there
/// at the next look is nobody's.
const LOOK: Duration = Duration::from_secs(5);

/// Waits for orphans from now on, in a thread of its own, if this is the first process.
pub fn wait_for_them() {
    if getpid() != Pid::from_raw(1) {
        return;
    }
    let started = std::thread::Builder::new().name("orphans".into()).spawn(|| {
        let mut last = BTreeSet::new();
        loop {
            std::thread::sleep(LOOK);
            let ended = ended_children();
            for orphan in ended.intersection(&last) {
                // Its parent may have asked meanwhile.
                let _ = waitpid(Pid::from_raw(*orphan), Some(WaitPidFlag::WNOHANG));
            }
            last = ended;
        }
    });
    if let Err(error) = started {
        eprintln!("cox is process 1 and cannot reap orphaned processes: {error}");
    }
}

/// Children that have ended and that nobody has asked about.
fn ended_children() -> BTreeSet<i32> {
    let tasks = fs::read_dir("/proc/self/task").into_iter().flatten().flatten();
    let lists = tasks.filter_map(|task| fs::read_to_string(task.path().join("children")).ok());
    let pids = lists.flat_map(|list| list.split_whitespace().map(str::to_owned).collect::<Vec<_>>());
    let has_ended = |pid: &String| {
        fs::read_to_string(format!("/proc/{pid}/stat")).is_ok_and(|stat| stat.contains(") Z "))
    };
    pids.filter(has_ended).filter_map(|pid| pid.parse().ok()).collect()
}
