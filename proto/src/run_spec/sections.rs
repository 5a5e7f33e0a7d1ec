//! A task's keys inside a specification: carried as JSON, merged with the engine's when it is written, told apart when it is read.

use std::collections::BTreeMap;

use serde::{Deserialize, Deserializer, Serialize, Serializer, de::Error as _};
use serde_json::{Map, Value};

use super::RunSpec;
use crate::{config::TaskSettings, identity::Marks};

/// Where [`Marks`] stand in the document. Not a key that people write: a specification that a program wrote has it, and whoever reads that
/// as a run file takes them from the task's schema.
pub(crate) const MARKS: &str = "identity";

/// What a task's schema wrote.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Sections {
    /// Without the engine's keys.
    values: Map<String, Value>,
    marks: Marks,
}

/// A specification that does not say what its task needs.
#[derive(Debug, thiserror::Error)]
#[error("the specification is none of the task `{task}`: {reason}")]
pub struct SettingsError {
    /// The task that was to read it.
    pub task: &'static str,
    /// What is missing or of another type.
    pub reason: String,
}

impl RunSpec {
    /// The task's keys with their types, and the engine's where the task asks for them as well.
    pub fn settings<T: TaskSettings>(&self) -> Result<T, SettingsError> {
        let refuse = |reason| SettingsError { task: T::TYPE, reason };
        if self.task.kind != T::TYPE {
            return Err(refuse(format!("its task.type is `{}`", self.task.kind)));
        }
        T::deserialize(Value::Object(self.document())).map_err(|error| refuse(error.to_string()))
    }

    /// Replaces the task's keys. They are not checked.
    pub fn set_settings<T: TaskSettings>(&mut self, settings: &T) {
        T::TYPE.clone_into(&mut self.task.kind);
        self.sections = Sections { values: object(settings), marks: Marks::of(T::IDENTITY) };
    }

    /// Peak learning rate of each group of trainables, by the group's name: `optimizer.lr`, whose keys are the task's.
    pub fn learning_rates(&self) -> BTreeMap<String, f64> {
        self.rates().filter_map(|(group, rate)| Some((group.clone(), rate.as_f64()?))).collect()
    }

    /// All keys, the engine's and the task's.
    pub(crate) fn document(&self) -> Map<String, Value> {
        let mut document = self.engine();
        merge(&mut document, &self.sections.values);
        document
    }

    pub(crate) fn marks(&self) -> &Marks {
        &self.sections.marks
    }

    fn engine(&self) -> Map<String, Value> {
        match Self::serialize(self, serde_json::value::Serializer) {
            Ok(Value::Object(map)) => map,
            other => unreachable!("a specification is a map with text as keys: {other:?}"),
        }
    }

    fn rates(&self) -> impl Iterator<Item = (&String, &Value)> {
        let rates = self.sections.values.get("optimizer").and_then(|optimizer| optimizer.get("lr"));
        rates.and_then(Value::as_object).into_iter().flatten()
    }

    fn check_learning_rates(&self) -> Result<(), String> {
        for (group, rate) in self.rates() {
            if !rate.as_f64().is_some_and(|rate| rate >= 0.0 && rate.is_finite()) {
                return Err(format!("optimizer.lr.{group}: {rate} is no learning rate"));
            }
        }
        Ok(())
    }
}

impl Serialize for RunSpec {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut document = self.document();
        document.insert(MARKS.into(), object(&self.sections.marks).into());
        document.serialize(serializer)
    }
}

impl<'de> Deserialize<'de> for RunSpec {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let mut document = Map::deserialize(deserializer)?;
        let marks = match document.remove(MARKS) {
            Some(marks) => Marks::deserialize(marks).map_err(D::Error::custom)?,
            None => Marks::before_marks_travelled(),
        };
        let mut spec = Self::deserialize(Value::Object(document.clone())).map_err(D::Error::custom)?;
        take_out(&mut document, &spec.engine());
        spec.sections = Sections { values: document, marks };
        spec.check_learning_rates().map_err(D::Error::custom)?;
        Ok(spec)
    }
}

/// The engine's part of a specification, for a reader that takes any type.
#[derive(Deserialize)]
#[serde(transparent)]
pub(crate) struct EnginePart(#[serde(deserialize_with = "RunSpec::deserialize")] pub(crate) RunSpec);

fn object(value: &impl Serialize) -> Map<String, Value> {
    match serde_json::to_value(value) {
        Ok(Value::Object(map)) => map,
        other => unreachable!("settings are a map with text as keys: {other:?}"),
    }
}

/// Adds what `more` has; no key is in both.
fn merge(into: &mut Map<String, Value>, more: &Map<String, Value>) {
    for (key, value) in more {
        match (into.get_mut(key), value) {
            (Some(Value::Object(into)), Value::Object(more)) => merge(into, more),
            _ => drop(into.insert(key.clone(), value.clone())),
        }
    }
}

/// Removes the keys that `other` has, and sections of which nothing is left.
fn take_out(from: &mut Map<String, Value>, other: &Map<String, Value>) {
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
