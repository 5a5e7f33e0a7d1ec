//! Dotted overrides: `optimizer.lr.lora=1e-4`, `data.cameras=[front, wrist]`, `cache.dir=` (nothing).
//!
//! The value is YAML, so lists and maps are written in flow style. Maps on the way that the file does not
//! have are made; a scalar on the way (`train.recompute.every=2` over `recompute: full`) gives way to a map.
//! Lists are replaced as a whole.

use std::sync::Arc;

use super::{
    error::{ConfigError, Place, Problem},
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
    let parts: Vec<&str> = path.split('.').map(str::trim).collect();
    if parts.iter().any(|part| part.is_empty()) {
        return Err(refuse("a part of the key is empty"));
    }
    if parts.len() > MAX_CONFIG_DEPTH {
        return Err(refuse(&format!("the key has more than {MAX_CONFIG_DEPTH} parts")));
    }
    let value = parse_override(text.trim(), &place)?;
    set(root, &parts, &parts, value, &place)
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
