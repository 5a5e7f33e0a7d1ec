//! Quantities as people read them: one rounding for logs, tables and messages.

use std::{borrow::Cow, fmt::Display, time::Duration};

/// `812 B`, `1.5 KiB`, `2.0 GiB`.
pub fn bytes(count: u64) -> String {
    const UNITS: [&str; 5] = ["KiB", "MiB", "GiB", "TiB", "PiB"];
    if count < 1024 {
        return format!("{count} B");
    }
    let mut amount = count as f64 / 1024.0;
    let mut unit = 0;
    // What would be rounded to 1024.0 is one of the next unit.
    while amount >= 1023.95 && unit + 1 < UNITS.len() {
        amount /= 1024.0;
        unit += 1;
    }
    format!("{amount:.1} {}", UNITS[unit])
}

/// `812 B`, `1.5 KiB`, `950.0 MiB`, `24,576 MiB`: for amounts of a similar size that are to be told apart.
pub fn bytes_closely(count: u64) -> String {
    const MIB: u64 = 1 << 20;
    if count < 1000 * MIB { bytes(count) } else { format!("{} MiB", grouped((count + MIB / 2) / MIB)) }
}

/// `812 FLOP`, `1.5 GFLOP`, `2.0 TFLOP`: multiplications and additions.
pub fn flops(count: u64) -> String {
    const UNITS: [&str; 6] = ["FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP"];
    let (mut amount, mut unit) = (count as f64, 0);
    while amount >= 999.95 && unit + 1 < UNITS.len() {
        amount /= 1000.0;
        unit += 1;
    }
    if unit == 0 { format!("{count} FLOP") } else { format!("{amount:.1} {}", UNITS[unit]) }
}

/// `4.2`, `950`, `12.3k`, `4.0M`.
pub fn count(number: f64) -> String {
    match number {
        n if n >= 999_950.0 => format!("{:.1}M", n / 1e6),
        n if n >= 9_999.5 => format!("{:.1}k", n / 1e3),
        n if n >= 99.95 => format!("{n:.0}"),
        n => format!("{n:.1}"),
    }
}

/// Every digit, thousands apart: `3,754,622,976`.
pub fn grouped(number: u64) -> String {
    let digits = number.to_string();
    let mut out = String::with_capacity(digits.len() + digits.len() / 3);
    for (place, digit) in digits.chars().enumerate() {
        if place > 0 && (digits.len() - place).is_multiple_of(3) {
            out.push(',');
        }
        out.push(digit);
    }
    out
}

/// `480 ms`, `3.2 s`, `4m 05s`, `2h 03m`, `1d 04h`.
pub fn time(time: Duration) -> String {
    let seconds = time.as_secs();
    match seconds {
        0 => format!("{} ms", time.as_millis()),
        1..=59 => format!("{:.1} s", time.as_secs_f64()),
        60..=3_599 => format!("{}m {:02}s", seconds / 60, seconds % 60),
        3_600..=86_399 => format!("{}h {:02}m", seconds / 3_600, seconds % 3_600 / 60),
        _ => format!("{}d {:02}h", seconds / 86_400, seconds % 86_400 / 3_600),
    }
}

/// [`time`] of a number of seconds that came over the wire; empty if it is none.
pub fn seconds(seconds: f64) -> String {
    Duration::try_from_secs_f64(seconds).map(time).unwrap_or_default()
}

/// The first characters of a text, as many as `most`, and an ellipsis if there are more.
pub fn start(text: &str, most: usize) -> String {
    match text.char_indices().nth(most) {
        Some((end, _)) => format!("{}...", text[..end].trim_end()),
        None => text.to_owned(),
    }
}

/// A text from elsewhere that does nothing to a terminal and hides nothing: control characters, and those
/// that turn the direction of writing, become escapes such as `\u001b`, which JSON reads as what they were.
/// Line breaks and tabs stay.
pub fn escaped(text: &str) -> Cow<'_, str> {
    let acts = |c: char| {
        (c.is_control() && !matches!(c, '\n' | '\t'))
            || matches!(c, '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
    };
    if !text.contains(acts) {
        return Cow::Borrowed(text);
    }
    let shown = |c| if acts(c) { format!("\\u{:04x}", u32::from(c)) } else { c.to_string() };
    Cow::Owned(text.chars().map(shown).collect())
}

/// A word of a command line as a shell takes it: in quotation marks where it has to be.
pub fn word(text: impl Display) -> String {
    let text = text.to_string();
    let is_odd = |c: char| !c.is_alphanumeric() && !"/._-+=:,@%".contains(c);
    if text.is_empty() || text.contains(is_odd) { format!("'{}'", text.replace('\'', r"'\''")) } else { text }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shell_takes_a_word_as_it_was() {
        for (text, there) in [
            ("runs/a-1", "runs/a-1"),
            ("data.path=/d/öl", "data.path=/d/öl"),
            ("my runs/a", "'my runs/a'"),
            ("~/a", "'~/a'"),
            ("it's", r"'it'\''s'"),
            ("", "''"),
        ] {
            assert_eq!(word(text), there);
        }
    }

    #[test]
    fn quantities_read_naturally() {
        assert_eq!(bytes(812), "812 B");
        assert_eq!(bytes(1536), "1.5 KiB");
        assert_eq!(bytes((1 << 20) - 1), "1.0 MiB");
        assert_eq!(bytes(2 << 30), "2.0 GiB");
        assert_eq!(bytes_closely(38 << 20), "38.0 MiB");
        assert_eq!(bytes_closely((24 << 30) - 1), "24,576 MiB");
        assert_eq!(flops(812), "812 FLOP");
        assert_eq!(flops(999_960), "1.0 MFLOP");
        assert_eq!(flops(2_340_000_000_000), "2.3 TFLOP");
        assert_eq!(count(9.25), "9.2");
        assert_eq!(count(420.0), "420");
        assert_eq!(count(9_999.7), "10.0k");
        assert_eq!(count(31_000.0), "31.0k");
        assert_eq!(count(999_999.0), "1.0M");
        assert_eq!(grouped(3_754_622_976), "3,754,622,976");
        assert_eq!(grouped(12), "12");
        assert_eq!(start("a long word", 7), "a long...");
        assert_eq!(start("short", 5), "short");
        assert_eq!(time(Duration::from_millis(480)), "480 ms");
        assert_eq!(seconds(3.25), "3.2 s");
        assert_eq!(seconds(245.0), "4m 05s");
        assert_eq!(seconds(7_380.0), "2h 03m");
        assert_eq!(seconds(100_800.0), "1d 04h");
        assert_eq!(seconds(f64::NAN), "");
    }

    #[test]
    fn what_a_terminal_would_act_on_is_shown() {
        assert_eq!(escaped("rank 1: gr\u{fc}n\n\tand more"), "rank 1: gr\u{fc}n\n\tand more");
        let hostile = "a\u{1b}[2Jb\rc\u{9b}d\u{202e}e";
        assert_eq!(escaped(hostile), r"a\u001b[2Jb\u000dc\u009bd\u202ee");
        let json = serde_json::to_string(hostile).unwrap();
        assert_eq!(serde_json::from_str::<String>(&escaped(&json)).unwrap(), hostile);
    }
}
