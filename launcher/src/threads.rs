//! Threads and processes that the system refuses to start (`EAGAIN`), named: its own words are "Resource
//! temporarily unavailable", which says neither of what nor who has set the limit.

use std::{
    fs,
    panic::{set_hook, take_hook},
    path::Path,
    sync::Mutex,
};

use nix::{
    libc,
    sys::resource::{Resource, getrlimit},
};

use crate::exit::{CliError, Exit, Outcome};

/// Has a panic over a thread that cannot be started followed by a line that says what to change.
#[expect(clippy::disallowed_methods, reason = "the first thing that a program does")]
pub fn explain_panics() {
    let before = take_hook();
    set_hook(Box::new(move |panic| {
        before(panic);
        if let Some(why) = panic.payload_as_str().and_then(explain) {
            eprintln!("error: {why}");
        }
    }));
}

/// Tries whether so many threads can be started: a process that cannot have its threads waits for what they
/// were to do, or dies of it later, in words that do not help.
pub fn require(count: usize) -> Outcome {
    let gate = Mutex::new(());
    let started = std::thread::scope(|scope| {
        let held = gate.lock();
        let start = |_| std::thread::Builder::new().spawn_scoped(scope, || drop(gate.lock())).map(drop);
        let started = (0..count).try_for_each(start);
        drop(held);
        started
    });
    started.map_err(|error| {
        let limits = limits(Path::new("/"));
        CliError::new(Exit::Internal, format!("no more threads can be started here ({error}): {limits}"))
    })
}

/// What is behind an error, if it is that no thread or process could be started.
pub fn explain(message: &str) -> Option<String> {
    let lower = message.to_lowercase();
    let of_system = lower.contains("resource temporarily unavailable") || lower.contains("code: 11,");
    let of_start = ["thread", "cannot be started", "cannot start"].iter().any(|word| lower.contains(word));
    (of_system && of_start)
        .then(|| format!("no more threads can be started here: {}", limits(Path::new("/"))))
}

/// The limits that there are, the control group's first.
pub fn limits(root: &Path) -> String {
    let groups = fs::read_to_string(root.join("proc/self/cgroup")).unwrap_or_default();
    let group = groups.lines().find_map(|line| of_group(root, line)).map(|(max, file)| {
        format!("this control group is limited to {max} processes and threads ({file}): raise the limit")
    });
    let user = getrlimit(Resource::RLIMIT_NPROC).ok().filter(|(soft, _)| *soft != libc::RLIM_INFINITY);
    let user = user.map(|(soft, _)| format!("the user's limit is {soft} threads (ulimit -u): raise it"));
    let told: Vec<_> = [group, user].into_iter().flatten().collect();
    match told.is_empty() {
        true => "the machine's limit is reached (kernel.threads-max, kernel.pid_max)".to_owned(),
        false => format!("{}; or lower launch.threads_per_worker", told.join("; ")),
    }
}

/// The bound of the nearest group that has one, and the file that says so.
fn of_group(root: &Path, line: &str) -> Option<(String, String)> {
    let mut parts = line.splitn(3, ':').skip(1);
    let mounted = match parts.next()? {
        "" => root.join("sys/fs/cgroup"),
        controllers if controllers.split(',').any(|it| it == "pids") => root.join("sys/fs/cgroup/pids"),
        _ => return None,
    };
    let own = mounted.join(parts.next()?.trim_start_matches('/'));
    let bound = |group: &Path| {
        let file = group.join("pids.max");
        let max = fs::read_to_string(&file).ok()?.trim().to_owned();
        (max != "max").then(|| (max, file.display().to_string()))
    };
    own.ancestors().take_while(|group| group.starts_with(&mounted)).find_map(bound)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_that_cannot_be_started_is_told_apart_from_a_socket_that_has_nothing_yet() {
        for thread in [
            r#"failed to spawn thread: Os { code: 11, kind: WouldBlock, message: "Resource temporarily unavailable" }"#,
            "OS can't spawn worker thread: Resource temporarily unavailable (os error 11)",
            "The global thread pool has not been initialized.: ThreadPoolBuildError { kind: IOError(Os { code: 11, kind: WouldBlock }) }",
            "rank 1 cannot be started again: Resource temporarily unavailable (os error 11)",
        ] {
            assert!(explain(thread).is_some_and(|why| why.contains("no more threads")), "{thread}");
        }
        assert_eq!(explain("recv: Resource temporarily unavailable (os error 11)"), None);
        assert_eq!(explain("failed to spawn thread: out of memory"), None);
    }

    #[test]
    fn the_group_that_bounds_is_named_in_either_version() {
        let dir = tempfile::tempdir().expect("a directory");
        for (groups, file) in [
            ("0::/job/task\n", "sys/fs/cgroup/job/pids.max"),
            ("9:cpu:/\n8:pids:/job/task\n0::/\n", "sys/fs/cgroup/pids/job/pids.max"),
        ] {
            let root = dir.path().join(file.replace('/', "-"));
            for (name, text) in [(file, "64\n"), ("proc/self/cgroup", groups)] {
                let path = root.join(name);
                fs::create_dir_all(path.parent().expect("a directory")).expect("a directory of our own");
                fs::write(path, text).expect("a file of our own");
            }
            let told = limits(&root);
            assert!(told.contains("64 processes and threads") && told.contains(file), "{told}");
        }
    }
}
