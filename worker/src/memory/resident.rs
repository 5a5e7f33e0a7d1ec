//! What the operating system says this process holds.

use std::{
    fs,
    path::{Path, PathBuf},
};

/// A sighting of the process's memory, in bytes. Zero where the system does not tell.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Resident {
    /// Resident set.
    pub total: u64,
    /// The part of it that is not backed by a file.
    pub anonymous: u64,
    /// Largest resident set of the process's life.
    pub high_water: u64,
    /// Swapped out.
    pub swapped: u64,
}

impl Resident {
    /// Reads `/proc/self/status`; elsewhere than on Linux everything is 0.
    pub fn now() -> Self {
        fs::read_to_string("/proc/self/status").map(|text| Self::parse(&text)).unwrap_or_default()
    }

    /// Bytes that this machine can still give to processes, or this process's control groups to theirs;
    /// `u64::MAX` if neither tells.
    pub fn free_on_this_machine() -> u64 {
        let machine = fs::read_to_string("/proc/meminfo").ok().and_then(|text| {
            let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
            line.split_whitespace().next()?.parse::<u64>().ok()
        });
        let groups = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
        let groups = free_in_groups(Path::new("/sys/fs/cgroup"), &groups);
        [machine.map(|kib| kib * 1024), groups].into_iter().flatten().min().unwrap_or(u64::MAX)
    }

    fn parse(status: &str) -> Self {
        let field = |name: &str| {
            let line = status.lines().find_map(|line| line.strip_prefix(name))?;
            line.trim_start_matches(':').split_whitespace().next()?.parse::<u64>().ok()
        };
        let bytes = |name| field(name).unwrap_or(0) * 1024;
        Self {
            total: bytes("VmRSS"),
            anonymous: bytes("RssAnon"),
            high_water: bytes("VmHWM"),
            swapped: bytes("VmSwap"),
        }
    }
}

/// The least that a control group of this process, or one above it, has left; none if none of them has a
/// limit. `groups` is `/proc/self/cgroup`, `mounted` where the groups are.
///
/// A scheduler's limit is on a group somewhere on the way from the process's own to the root; in a container
/// the root is all one sees.
fn free_in_groups(mounted: &Path, groups: &str) -> Option<u64> {
    let places = groups.lines().filter_map(|line| {
        let mut parts = line.splitn(3, ':').skip(1);
        match (parts.next()?, parts.next()?) {
            ("", path) => Some((mounted.to_owned(), path, UNIFIED)),
            (controllers, path) if controllers.split(',').any(|it| it == "memory") => {
                Some((mounted.join("memory"), path, SEPARATE))
            }
            _ => None,
        }
    });
    places.filter_map(|(root, path, files)| free_upwards(&root, path, files)).min()
}

/// Names of a group's limit, its use, and the part of it that is a cache of files not used lately.
type Files = [&'static str; 3];
const UNIFIED: Files = ["memory.max", "memory.current", "inactive_file "];
const SEPARATE: Files = ["memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file "];

fn free_upwards(root: &Path, path: &str, [limit, used, cache]: Files) -> Option<u64> {
    let number = |at: PathBuf| fs::read_to_string(at).ok()?.trim().parse::<u64>().ok();
    let free = |group: &Path| {
        let limit = number(group.join(limit))?;
        let stat = fs::read_to_string(group.join("memory.stat")).unwrap_or_default();
        let cached = stat.lines().find_map(|line| line.strip_prefix(cache)?.trim().parse::<u64>().ok());
        let used = number(group.join(used)).unwrap_or(0).saturating_sub(cached.unwrap_or(0));
        Some(limit.saturating_sub(used))
    };
    let own = root.join(path.trim_start_matches('/'));
    own.ancestors().take_while(|group| group.starts_with(root)).filter_map(free).min()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Makes a group with these files.
    fn group(at: &Path, files: &[(&str, &str)]) {
        fs::create_dir_all(at).expect("a directory of our own");
        files.iter().for_each(|(name, text)| fs::write(at.join(name), text).expect("a file of our own"));
    }

    #[test]
    fn the_tightest_group_on_the_way_up_counts_without_the_files_it_caches() {
        let dir = tempfile::tempdir().expect("a directory for temporary files");
        let root = dir.path();
        let job = root.join("slurm/job_7");
        group(&job, &[("memory.max", "1000\n"), ("memory.current", "700\n")]);
        group(&job, &[("memory.stat", "anon 500\ninactive_file 150\nactive_file 50\n")]);
        group(&job.join("step_0/task"), &[("memory.max", "max\n"), ("memory.current", "600\n")]);
        let free = |groups: &str| free_in_groups(root, groups);
        assert_eq!(free("0::/slurm/job_7/step_0/task\n"), Some(450));
        group(&root.join("slurm"), &[("memory.max", "800"), ("memory.current", "700")]);
        assert_eq!(free("0::/slurm/job_7/step_0/task\n"), Some(100));
        assert_eq!(free("0::/elsewhere\n"), None);
        assert_eq!(free(""), None);
    }

    #[test]
    fn separate_hierarchies_have_other_names() {
        let dir = tempfile::tempdir().expect("a directory for temporary files");
        let files = [("memory.limit_in_bytes", "900"), ("memory.usage_in_bytes", "300")];
        group(&dir.path().join("memory/job"), &files);
        let groups = "12:cpu,cpuacct:/job\n5:memory:/job/step\n0::/\n";
        assert_eq!(free_in_groups(dir.path(), groups), Some(600));
    }

    #[test]
    fn status_is_read_in_kibibytes() {
        let text = "Name:\tcox\nVmHWM:\t  300 kB\nVmRSS:\t  200 kB\nRssAnon:\t  150 kB\nVmSwap:\t  50 kB\n";
        assert_eq!(
            Resident::parse(text),
            Resident { total: 200 << 10, anonymous: 150 << 10, high_water: 300 << 10, swapped: 50 << 10 }
        );
    }
}
