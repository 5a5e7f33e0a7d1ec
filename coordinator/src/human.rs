//! Numbers as people read them.

use std::time::Duration;

use coxswain_proto::ids::Bytes;

/// `512 B`, `3.2 GiB`.
pub fn bytes(bytes: Bytes) -> String {
    const UNITS: [&str; 5] = ["B", "KiB", "MiB", "GiB", "TiB"];
    let mut value = bytes.0 as f64;
    let mut unit = 0;
    while value >= 1024.0 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    match unit {
        0 => format!("{} B", bytes.0),
        _ if value < 9.95 => format!("{value:.1} {}", UNITS[unit]),
        _ => format!("{value:.0} {}", UNITS[unit]),
    }
}

/// `950`, `12.3k`, `4.0M`.
pub fn count(value: f64) -> String {
    match value {
        v if v >= 999_500.0 => format!("{:.1}M", v / 1e6),
        v if v >= 9_995.0 => format!("{:.1}k", v / 1e3),
        v if v >= 99.5 => format!("{v:.0}"),
        v => format!("{v:.1}"),
    }
}

/// `480 ms`, `2.3 s`, `1 min 5 s`, `2 h 3 min`.
pub fn time(time: Duration) -> String {
    let seconds = time.as_secs();
    match seconds {
        0 => format!("{} ms", time.as_millis()),
        1..60 => format!("{:.1} s", time.as_secs_f64()),
        60..3600 => format!("{} min {} s", seconds / 60, seconds % 60),
        _ => format!("{} h {} min", seconds / 3600, seconds % 3600 / 60),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_keep_two_or_three_digits() {
        assert_eq!(bytes(Bytes(900)), "900 B");
        assert_eq!(bytes(Bytes(3_435_973_836)), "3.2 GiB");
        assert_eq!(bytes(Bytes(512 << 20)), "512 MiB");
        assert_eq!(count(12_345.0), "12.3k");
        assert_eq!(count(7.25), "7.2");
        assert_eq!(time(Duration::from_millis(480)), "480 ms");
        assert_eq!(time(Duration::from_secs(65)), "1 min 5 s");
        assert_eq!(time(Duration::from_secs(7380)), "2 h 3 min");
    }
}
