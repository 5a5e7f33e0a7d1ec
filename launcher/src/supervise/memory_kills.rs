//! Kills by the kernel because memory ran out, told from kills by hand.
//!
//! Both are SIGKILL. The kernel counts its own: for the control group of the process
//! (`memory.events.local`, in hierarchies of version 1 `memory.oom_control`), and for the machine
//! (`/proc/vmstat`), which counts where a process is in no group of its own. A worker that SIGKILL ended
//! while the count rose is taken for its victim. Workers are in their launcher's group: it is asked for once.
//!
//! What this does not do: see that a whole group was killed (`memory.oom.group`, as Kubernetes sets it),
//! which ends the launcher, too.

use std::{
    fs,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

/// Kills that no end of a worker followed in this time were other processes'.
const WINDOW: Duration = Duration::from_secs(5);

/// What counts in a group of version 2: its own processes; those of groups below it, too.
const UNIFIED: [&str; 2] = ["memory.events.local", "memory.events"];
/// What counts in a group of version 1.
const SEPARATE: [&str; 1] = ["memory.oom_control"];

/// The kernel's count, as far as workers account for it.
#[derive(Debug)]
pub struct MemoryKills {
    /// Files that count; the first one that can be read does.
    places: Vec<PathBuf>,
    /// Kills that are accounted for.
    known: u64,
    /// The count when it was looked at last, and when that was.
    latest: (Instant, u64),
}

impl MemoryKills {
    /// Kills in this process's control group, or on its machine, from now on.
    pub fn of_this_process(now: Instant) -> Self {
        let groups = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
        Self::at(Path::new("/"), &groups, now)
    }

    fn at(root: &Path, groups: &str, now: Instant) -> Self {
        let mut places = places(&root.join("sys/fs/cgroup"), groups);
        places.push(root.join("proc/vmstat"));
        let mut kills = Self { places, known: 0, latest: (now, 0) };
        let count = kills.count();
        (kills.known, kills.latest.1) = (count, count);
        kills
    }

    /// Kills that are older than a worker's end takes to be heard of are no worker's.
    pub fn look(&mut self, now: Instant) {
        if now.duration_since(self.latest.0) >= WINDOW {
            self.known = self.known.max(self.latest.1);
            self.latest = (now, self.count());
        }
    }

    /// Whether a process that SIGKILL has just ended was the kernel's victim. Each kill is one process's.
    pub fn claim(&mut self) -> bool {
        let killed = self.count() > self.known;
        self.known += u64::from(killed);
        killed
    }

    fn count(&self) -> u64 {
        self.places.iter().find_map(|place| count_in(&fs::read_to_string(place).ok()?)).unwrap_or(0)
    }
}

/// `oom_kill 3`, a line of all three kinds of files.
fn count_in(text: &str) -> Option<u64> {
    text.lines().find_map(|line| line.strip_prefix("oom_kill ")?.trim().parse().ok())
}

/// The files of the groups that a process is in, each followed by those of the groups above it: in a
/// container its own group may be all that it sees, under another name. The root of version 2 has no such
/// file, and that of version 1 counts nothing but its own processes.
fn places(mounted: &Path, groups: &str) -> Vec<PathBuf> {
    let upwards = |root: PathBuf, path: &str, files: &[&str]| -> Vec<PathBuf> {
        let own = root.join(path.trim_start_matches('/'));
        let groups = own.ancestors().take_while(|group| group.starts_with(&root));
        groups.flat_map(|group| files.iter().map(|file| group.join(file))).collect()
    };
    let of_line = |line: &str| {
        let mut parts = line.splitn(3, ':').skip(1);
        match (parts.next()?, parts.next()?) {
            ("", path) => Some(upwards(mounted.to_owned(), path, &UNIFIED)),
            (controllers, path) if controllers.split(',').any(|it| it == "memory") => {
                Some(upwards(mounted.join("memory"), path, &SEPARATE))
            }
            _ => None,
        }
    };
    groups.lines().filter_map(of_line).flatten().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What a kernel shows below `root`, with these files.
    fn shown(root: &Path, files: &[(&str, &str)]) {
        for (name, text) in files {
            let path = root.join(name);
            fs::create_dir_all(path.parent().expect("a directory")).expect("a directory of our own");
            fs::write(path, text).expect("a file of our own");
        }
    }

    #[test]
    fn a_kill_is_counted_where_the_process_is_and_is_one_process_s() {
        let dir = tempfile::tempdir().expect("a directory");
        let (unified, separate) =
            ("sys/fs/cgroup/job/memory.events.local", "sys/fs/cgroup/memory/job/memory.oom_control");
        for (groups, file, before) in [
            ("0::/job/task\n", unified, "low 0\nhigh 7\nmax 3\noom 2\n"),
            ("9:pids:/\n4:memory:/job\n0::/\n", separate, "oom_kill_disable 0\nunder_oom 0\n"),
            ("0::/\n", "proc/vmstat", "nr_free_pages 9\n"),
        ] {
            let root = dir.path().join(file.replace('/', "-"));
            let count = |kills: u64| shown(&root, &[(file, &format!("{before}oom_kill {kills}\n"))]);
            count(2);
            let now = Instant::now();
            let mut kills = MemoryKills::at(&root, groups, now);
            assert!(!kills.claim(), "{file}: earlier ones are none of ours");
            count(4);
            assert_eq!([(); 3].map(|()| kills.claim()), [true, true, false], "{file}");
        }
    }

    #[test]
    fn a_kill_of_another_process_is_not_held_against_a_worker_that_is_killed_by_hand_later() {
        let dir = tempfile::tempdir().expect("a directory");
        let count = |kills: u64| shown(dir.path(), &[("proc/vmstat", &format!("oom_kill {kills}\n"))]);
        count(0);
        let begin = Instant::now();
        let mut kills = MemoryKills::at(dir.path(), "", begin);
        count(1);
        kills.look(begin + WINDOW);
        kills.look(begin + WINDOW + WINDOW / 2);
        assert!(kills.claim(), "it may be a worker's that is not heard of yet");
        count(2);
        kills.look(begin + 2 * WINDOW);
        kills.look(begin + 3 * WINDOW);
        assert!(!kills.claim());
    }

    #[test]
    fn where_nothing_counts_nobody_was_killed_for_memory() {
        let dir = tempfile::tempdir().expect("a directory");
        assert!(!MemoryKills::at(dir.path(), "0::/job\n", Instant::now()).claim());
    }
}
