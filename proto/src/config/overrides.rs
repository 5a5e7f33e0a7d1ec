//! Dotted overrides: `optimizer.lr.lora=1e-4`, `data.cameras=[front, wrist]`, `cache.dir=` (nothing).
//!
//! The value is YAML, so lists and maps are written in flow style; a text with ` #` in it is taken whole.
//! Maps on the way that the file does not have are made; a scalar on the way (`train.recompute.every=2` over
//! `recompute: full`) gives way to a map. Lists are replaced as a whole. `train.recompute?=auto` only says
//! what a file means that does not have the key.

use std::sync::Arc;

use super::{
    error::{ConfigError, Place, Problem},
    scalar,
    tree::{MapKey, Node, Value, parse_override},
};
use crate::limits::MAX_CONFIG_DEPTH;

/// Lays one `path=value` over the tree.
pub(super) fn apply(root: &mut Node, given: &str) -> Result<(), ConfigError> {
    let place = Place::Override(Arc::from(given));
    let refuse = |message: &str| {
        ConfigError::one(
            Problem::new("", message)
                .at(&place)
                .help("write `section.key=value`, for instance `train.steps=100`"),
        )
    };
    let (path, text) = given.split_once('=').ok_or_else(|| refuse("there is no `=` in it"))?;
    let (path, yields) = path.strip_suffix('?').map_or((path, false), |path| (path, true));
    let parts: Vec<&str> = path.split('.').map(str::trim).collect();
    if parts.iter().any(|part| part.is_empty()) {
        return Err(refuse("a part of the key is empty"));
    }
    if parts.len() > MAX_CONFIG_DEPTH {
        return Err(refuse(&format!("the key has more than {MAX_CONFIG_DEPTH} parts")));
    }
    if yields && is_there(root, &parts) {
        return Ok(());
    }
    let text = text.trim();
    let value = match is_literal(text) {
        true => Node { place: place.clone(), value: Value::Scalar { text: text.to_owned(), plain: true } },
        false => parse_override(text, &place).map_err(|error| unless_quoted(error, given, path.trim()))?,
    };
    set(root, &parts, &parts, value, &place)
}

/// As a shell takes it, the override of the key at `path` whose value is the text that was given; none where
/// the value of another key is.
pub(super) fn quoted(given: &str, path: &str) -> Option<String> {
    let (key, text) = given.split_once('=').filter(|(key, _)| key.trim() == path)?;
    let argument = format!("{}={}", key.trim(), scalar::quoted(text.trim()));
    Some(format!("quote the value: `'{}'`", argument.replace('\'', r"'\''")))
}

/// What is not YAML may be text that is not quoted.
fn unless_quoted(error: ConfigError, given: &str, path: &str) -> ConfigError {
    let ConfigError::Invalid(mut problems) = error else { return error };
    for problem in problems.iter_mut().filter(|problem| problem.help.is_none()) {
        problem.help = quoted(given, path).map(|help| format!("to pass it as text, {help}"));
    }
    ConfigError::Invalid(problems)
}

/// Whether YAML would read less than what is there: a shell's argument has neither comments nor lines.
fn is_literal(text: &str) -> bool {
    let is_text = !text.starts_with(['"', '\'', '[', '{', '#']);
    is_text && (text.contains('\n') || text.split_whitespace().skip(1).any(|word| word.starts_with('#')))
}

fn is_there(node: &Node, path: &[&str]) -> bool {
    let Some((part, deeper)) = path.split_first() else { return true };
    let Value::Map(entries) = &node.value else { return false };
    entries.iter().any(|(key, value)| key.text == *part && is_there(value, deeper))
}

fn set(node: &mut Node, all: &[&str], rest: &[&str], value: Node, place: &Place) -> Result<(), ConfigError> {
    let Some((part, deeper)) = rest.split_first() else {
        *node = value;
        return Ok(());
    };
    if matches!(node.value, Value::Scalar { .. }) {
        *node = Node { place: place.clone(), value: Value::Map(Vec::new()) };
    }
    let Value::Map(entries) = &mut node.value else {
        let list = all[..all.len() - rest.len()].join(".");
        let problem = Problem::new(&list, "is a list and cannot be changed in part").at(place);
        return Err(ConfigError::one(
            problem.help(format!("replace it as a whole: `{list}=[first, second]`")),
        ));
    };
    let index = entries.iter().position(|(key, _)| key.text == *part).unwrap_or_else(|| {
        let nothing =
            Node { place: place.clone(), value: Value::Scalar { text: String::new(), plain: true } };
        entries.push((MapKey { text: (*part).to_owned(), place: place.clone() }, nothing));
        entries.len() - 1
    });
    set(&mut entries[index].1, all, deeper, value, place)
}
