//! What a flag that does not exist was probably meant to be.

use clap::{
    builder::StyledStr,
    error::{ContextKind, ContextValue, Error, ErrorKind},
};
use coxswain_proto::config::of_other_trainers;

/// The error with the right spelling where a key of a run file was given as a flag, by its name or by the one
/// that other trainers have for it: `--lora.rank 16`, `--lr 1e-4`.
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

/// What takes a run file and overrides.
const TAKE_KEYS: [&str; 3] = ["run", "check", "plan"];

/// `lora.rank=16` for the flag `--lora.rank` or `--lora_rank` among these arguments; none where it is no key.
fn as_key(flag: &str, given: &[String]) -> Option<String> {
    let name = flag.trim_start_matches('-').split('=').next()?;
    let takes_keys = || given.iter().any(|word| TAKE_KEYS.contains(&word.as_str()));
    let key = match name.contains('.') {
        true => name,
        false => of_other_trainers(&name.replace('-', "_")).filter(|_| takes_keys())?,
    };
    let at = given.iter().position(|given| given.trim_start_matches('-').split('=').next() == Some(name))?;
    let value = match given[at].split_once('=') {
        Some((_, value)) => value,
        None => given.get(at + 1).filter(|next| !next.starts_with("--")).map_or("VALUE", String::as_str),
    };
    Some(format!("{key}={value}"))
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
        assert_eq!(of("--lora-rank", "run a.yaml --lora-rank 16").as_deref(), Some("lora.rank=16"));
        assert_eq!(of("--lr", "check --lr=1 a.yaml").as_deref(), Some("optimizer.lr=1"));
        assert_eq!(of("--steps", "run a.yaml --steps=2").as_deref(), Some("train.steps=2"));
        assert_eq!(of("--batch_size", "run a.yaml --batch_size 4").as_deref(), Some("train.global_batch=4"));
        let ranks = of("--nproc-per-node", "plan a.yaml --nproc-per-node 4");
        assert_eq!(ranks.as_deref(), Some("launch.nproc_per_node=4"));
        assert_eq!(of("--lr", "serve runs/a --lr 1"), None, "it takes no keys");
        assert_eq!(of("--colour", "run a.yaml --colour 16"), None);
    }
}
