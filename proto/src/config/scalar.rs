//! Numbers and booleans of YAML 1.2, and what is meant by those of other languages.

/// YAML 1.2's booleans; `yes` and `on` are text.
pub(super) fn boolean(text: &str) -> Option<bool> {
    match text {
        "true" | "True" | "TRUE" => Some(true),
        "false" | "False" | "FALSE" => Some(false),
        _ => None,
    }
}

/// What stands for a text that is no boolean: one where other languages read one.
pub(super) fn boolean_meant(text: &str) -> &'static str {
    match text {
        "yes" | "Yes" | "YES" | "on" | "On" | "ON" => "`true`",
        "no" | "No" | "NO" | "off" | "Off" | "OFF" => "`false`",
        _ => "`true` or `false`",
    }
}

/// The number that other languages read in a spelling that is none in YAML 1.2, or none of a whole number.
pub(super) fn whole_number_meant(text: &str) -> Option<i128> {
    let digits = text.replace('_', "");
    let hexadecimal = digits.strip_prefix("0x").and_then(|digits| i128::from_str_radix(digits, 16).ok());
    let scientific = || float(&digits).filter(|number| number.fract() == 0.0 && number.abs() < 1e15);
    hexadecimal.or_else(|| digits.parse().ok()).or_else(|| scientific().map(|number| number as i128))
}

/// Both meanings of digits after a zero: octal in YAML 1.1, which PyYAML reads, and decimal in YAML 1.2.
pub(super) fn octal_elsewhere(text: &str) -> Option<(i128, i128)> {
    let digits = text.strip_prefix('0').filter(|digits| !digits.is_empty())?;
    Some((i128::from_str_radix(digits, 8).ok()?, digits.parse().ok()?))
        .filter(|(octal, decimal)| octal != decimal)
}

/// A text in YAML's double quotation marks.
pub(super) fn quoted(text: &str) -> String {
    format!("\"{}\"", text.replace('\\', r"\\").replace('"', r#"\""#).replace('\n', r"\n"))
}

/// A text as it stands between the brackets of a list: as it is, commas included, unless YAML would read
/// more out of it.
pub(super) fn in_list(text: &str) -> String {
    let means_more = text
        .contains(['[', ']', '{', '}', '"', '\'', '#', '&', '*', '!', '|', '>', '%', '@', '`'])
        || text.contains(": ")
        || text.ends_with(':');
    if means_more { quoted(text) } else { text.to_owned() }
}

/// YAML 1.2's numbers. Rust's own parser would also take `inf`, `nan` and `infinity`, which are text in YAML.
pub(super) fn float(text: &str) -> Option<f64> {
    match text.trim_start_matches(['+', '-']) {
        ".inf" | ".Inf" | ".INF" => {
            Some(if text.starts_with('-') { f64::NEG_INFINITY } else { f64::INFINITY })
        }
        ".nan" | ".NaN" | ".NAN" => Some(f64::NAN),
        digits if digits.starts_with(|c: char| c.is_ascii_digit() || c == '.') => text.parse().ok(),
        _ => None,
    }
}
