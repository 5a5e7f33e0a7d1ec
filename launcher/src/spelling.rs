//! What a flag that does not exist was probably meant to be.

use clap::{
    builder::StyledStr,
    error::{ContextKind, ContextValue, Error, ErrorKind},
};

/// The error with the right spelling where a key of a run file was given as a flag: `--lora.rank 16`.
pub fn explained(mut error: Error) -> Error {
    let given: Vec<String> = std::env::args_os().map(|given| given.to_string_lossy().into_owned()).collect();
    let key = match error.get(ContextKind::InvalidArg) {
        Some(ContextValue::String(flag)) if error.kind() == ErrorKind::UnknownArgument => {
            as_key(flag, &given)
        }
        _ => None,
    };
    if let Some(key) = key {
        for other in
            [ContextKind::SuggestedArg, ContextKind::SuggestedSubcommand, ContextKind::SuggestedValue]
        {
            error.remove(other);
        }
        let tip = StyledStr::from(format!("keys of a run file are given without dashes: {key}"));
        error.insert(ContextKind::Suggested, ContextValue::StyledStrs(vec![tip]));
    }
    error
}

/// `lora.rank=16` for the flag `--lora.rank` among these arguments; none where it is no key.
fn as_key(flag: &str, given: &[String]) -> Option<String> {
    let name = flag.trim_start_matches('-').split('=').next().filter(|name| name.contains('.'))?;
    let at = given.iter().position(|given| given.trim_start_matches('-').split('=').next() == Some(name))?;
    let value = match given[at].split_once('=') {
        Some((_, value)) => value,
        None => given.get(at + 1).filter(|next| !next.starts_with("--")).map_or("VALUE", String::as_str),
    };
    Some(format!("{name}={value}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_that_was_given_as_a_flag_is_shown_as_it_is_written() {
        let of =
            |flag: &str, line: &str| as_key(flag, &line.split(' ').map(str::to_owned).collect::<Vec<_>>());
        assert_eq!(of("--lora.rank", "run a.yaml --lora.rank 16").as_deref(), Some("lora.rank=16"));
        assert_eq!(of("--lora.rank", "run a.yaml --lora.rank=16").as_deref(), Some("lora.rank=16"));
        assert_eq!(of("--lora.rank", "run a.yaml --lora.rank").as_deref(), Some("lora.rank=VALUE"));
        assert_eq!(of("--lora-rank", "run a.yaml --lora-rank 16"), None);
    }
}
