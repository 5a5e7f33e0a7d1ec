//! Several runs in one file: what they share, and under `sections` what each has of its own.
//!
//! ```yaml
//! train: { steps: 1000, global_batch: 64, micro_batch: 8 }
//! sections:
//!   base:  { model: { path: models/t5-base } }
//!   large: { model: { path: models/t5-large }, train: { micro_batch: 2 } }
//! section: base        # the one that is meant where nothing else is said
//! ```
//!
//! The chosen section is laid over the rest of the file, maps over maps and all else in the place of what is
//! there; then come overrides. A run that has been read knows nothing of sections any more.

use super::{
    error::{ConfigError, Problem},
    tree::{Node, Value},
};

/// The key that chooses; `--section NAME` on the command line is the override `section=NAME`.
const CHOICE: &str = "section";
const SECTIONS: &str = "sections";

/// Whether an override chooses a section; it has to be known before the others are applied.
pub(super) fn is_choice(given: &str) -> bool {
    given.split_once('=').is_some_and(|(key, _)| key.trim() == CHOICE)
}

/// Lays the chosen section over the rest, and takes both keys out of the tree.
pub(super) fn resolve(root: &mut Node) -> Result<(), ConfigError> {
    let [sections, choice] = [SECTIONS, CHOICE].map(|key| take(root, key).filter(|node| !node.is_null()));
    match (sections, choice) {
        (None, None) => Ok(()),
        (None, Some(choice)) => {
            let problem = Problem::new(CHOICE, "is set, but this file has no `sections`");
            Err(ConfigError::one(problem.at(&choice.place).help("remove it, or name a file with `sections`")))
        }
        (Some(sections), choice) => {
            merge(root, chosen(sections, choice)?);
            Ok(())
        }
    }
}

/// The section that is meant.
fn chosen(sections: Node, choice: Option<Node>) -> Result<Node, ConfigError> {
    let refuse = |problem: Problem, help: String| Err(ConfigError::one(problem.help(help)));
    let Value::Map(mut named) = sections.value else {
        let problem = Problem::new(SECTIONS, "is not a map from names to keys of a run").at(&sections.place);
        return refuse(problem, "write `sections: { first: { train: { steps: 10 } } }`".into());
    };
    let names = named.iter().map(|(name, _)| format!("`{}`", name.text)).collect::<Vec<_>>().join(", ");
    let Some(choice) = choice else {
        let problem = Problem::new(SECTIONS, format!("none of {names} is chosen"));
        let help = "choose one with `--section NAME`, or with `section: NAME` in the file";
        return refuse(problem.at(&sections.place), help.into());
    };
    let name = match &choice.value {
        Value::Scalar { text, .. } => text.as_str(),
        Value::List(_) | Value::Map(_) => "",
    };
    let Some(at) = named.iter().position(|(key, _)| key.text == name) else {
        let problem = Problem::new(CHOICE, format!("there is no section `{name}`")).at(&choice.place);
        return refuse(problem, format!("this file has {names}"));
    };
    let (_, section) = named.swap_remove(at);
    match section.value {
        Value::Map(_) => Ok(section),
        // A run that has nothing of its own.
        _ if section.is_null() => Ok(Node { value: Value::Map(Vec::new()), ..section }),
        _ => {
            let problem = Problem::new(format!("{SECTIONS}.{name}"), "is not a map of keys");
            refuse(problem.at(&section.place), "write keys below it, as in the rest of the file".into())
        }
    }
}

fn take(root: &mut Node, key: &str) -> Option<Node> {
    let Value::Map(entries) = &mut root.value else { return None };
    let at = entries.iter().position(|(found, _)| found.text == key)?;
    Some(entries.remove(at).1)
}

fn merge(into: &mut Node, over: Node) {
    match (&mut into.value, over.value) {
        (Value::Map(there), Value::Map(entries)) => {
            for (key, node) in entries {
                match there.iter_mut().find(|(known, _)| known.text == key.text) {
                    Some((_, under)) => merge(under, node),
                    None => there.push((key, node)),
                }
            }
        }
        (_, value) => *into = Node { place: over.place, value },
    }
}
