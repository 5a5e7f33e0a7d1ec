//! Text that becomes a part of a run file.

/// What plain YAML has for something else than text.
const WORDS: [&str; 9] = ["true", "false", "null", "yes", "no", "on", "off", "y", "n"];

/// A text as a scalar of YAML: as it is where that means itself.
pub fn yaml_scalar(text: &str) -> String {
    let plain = |letter: char| letter.is_alphanumeric() || "_-./".contains(letter);
    let begins = text.starts_with(|first: char| first.is_alphabetic() || "/.".contains(first));
    let is_text = !WORDS.contains(&&*text.to_lowercase()) && text.trim_matches('.').parse::<f64>().is_err();
    match begins && is_text && text.chars().all(plain) {
        true => text.to_owned(),
        // What JSON quotes YAML reads.
        false => serde_json::Value::from(text).to_string(),
    }
}

/// One name as a scalar, several as a list.
pub fn yaml_names(names: &[&str]) -> String {
    match names {
        [one] => yaml_scalar(one),
        _ => format!("[{}]", names.iter().map(|name| yaml_scalar(name)).collect::<Vec<_>>().join(", ")),
    }
}

#[cfg(test)]
mod tests {
    use super::yaml_scalar;

    #[test]
    fn what_yaml_would_read_as_something_else_is_quoted() {
        for text in ["observation.images.top", "/data/set-1", "./lab", "épée", "nothing"] {
            assert_eq!(yaml_scalar(text), text);
        }
        for text in ["/data/a: b", "yes", "Null", ".inf", ".NaN", "1e3", "- a", "#1", "a\nb", "", "it's"] {
            assert_eq!(yaml_scalar(text), serde_json::Value::from(text).to_string());
        }
    }
}
