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
