//! What the operating system says this process holds.

use std::fs;

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

    /// Bytes that this machine can still give to processes, or this container to its own; `u64::MAX` if neither tells.
    pub fn free_on_this_machine() -> u64 {
        let number = |path: &str| fs::read_to_string(path).ok()?.trim().parse::<u64>().ok();
        let machine = fs::read_to_string("/proc/meminfo").ok().and_then(|text| {
            let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
            line.split_whitespace().next()?.parse::<u64>().ok()
        });
        let limit = number("/sys/fs/cgroup/memory.max");
        let container =
            limit.map(|limit| limit.saturating_sub(number("/sys/fs/cgroup/memory.current").unwrap_or(0)));
        [machine.map(|kib| kib * 1024), container].into_iter().flatten().min().unwrap_or(u64::MAX)
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn status_is_read_in_kibibytes() {
        let text = "Name:\tcox\nVmHWM:\t  300 kB\nVmRSS:\t  200 kB\nRssAnon:\t  150 kB\nVmSwap:\t  50 kB\n";
        assert_eq!(
            Resident::parse(text),
            Resident { total: 200 << 10, anonymous: 150 << 10, high_water: 300 << 10, swapped: 50 << 10 }
        );
    }
}
