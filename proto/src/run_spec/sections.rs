//! A task's keys inside a specification: carried as JSON, merged with the engine's when it is written, told
//! apart when it is read.

use serde::Serialize;
use serde_json::{Map, Value};

use crate::identity::Marks;

/// What a task's schema wrote.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Sections {
    /// Without the engine's keys.
    pub(super) values: Map<String, Value>,
    pub(super) marks: Marks,
}

/// Settings as the map that they are written as.
pub(super) fn object(value: &impl Serialize) -> Map<String, Value> {
    match serde_json::to_value(value) {
        Ok(Value::Object(map)) => map,
        other => unreachable!("settings are a map with text as keys: {other:?}"),
    }
}

/// Adds what `more` has; no key is in both.
pub(super) fn merge(into: &mut Map<String, Value>, more: &Map<String, Value>) {
    for (key, value) in more {
        match (into.get_mut(key), value) {
            (Some(Value::Object(into)), Value::Object(more)) => merge(into, more),
            _ => drop(into.insert(key.clone(), value.clone())),
        }
    }
}

/// Removes the keys that `other` has, and sections of which nothing is left.
pub(super) fn take_out(from: &mut Map<String, Value>, other: &Map<String, Value>) {
    for (key, value) in other {
        if let (Some(Value::Object(section)), Value::Object(other)) = (from.get_mut(key), value) {
            take_out(section, other);
            if !section.is_empty() {
                continue;
            }
        }
        from.shift_remove(key);
    }
}
