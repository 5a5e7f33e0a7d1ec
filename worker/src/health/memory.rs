//! What the system can still give.

/// Less than this is available: a worker's own libraries hardly fit.
const LITTLE: u64 = 128 << 20;

/// A warning that it is little; nothing if it is not, or where the system does not say.
pub(super) fn little() -> Option<String> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let available = available(&text).filter(|available| *available < LITTLE)?;
    Some(format!("only {} MiB of memory are available on this machine", available >> 20))
}

/// Bytes, of the system's own estimate.
fn available(meminfo: &str) -> Option<u64> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kib: u64 = line.split_whitespace().next()?.parse().ok()?;
    kib.checked_mul(1 << 10)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_available_is_the_systems_estimate() {
        assert_eq!(available("MemTotal: 9 kB\nMemAvailable:   131072 kB\n"), Some(128 << 20));
        assert_eq!(available("MemTotal: 9 kB\n"), None);
        assert_eq!(available("MemAvailable: much kB\n"), None);
    }
}
