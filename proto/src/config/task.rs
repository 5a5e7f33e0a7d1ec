//! What a task says of its keys in a run file, and the tasks there are.
//!
//! A task brings one type with its keys in their sections ([`TaskSettings`]); sections may be the engine's,
//! keys may not. The engine reads them with its own from the same file, so that a user sees one run file.

use serde::{Serialize, de::DeserializeOwned};
use serde_json::Value;

use super::{
    bounds::{self, Bounds},
    de::{self, Reading},
    error::{ConfigError, Problem},
    findings::Findings,
    keys,
    tree::Node,
};
use crate::{
    identity::{self, Classes},
    run_spec::{RunSpec, Task},
};

/// The keys of a task, as a type: a struct of sections, every optional key with its default.
///
/// The type of a section that the engine has as well (`data`, `optimizer`) must not deny unknown fields.
pub trait TaskSettings: Serialize + DeserializeOwned + 'static {
    /// As in `task.type`.
    const TYPE: &'static str;

    /// Every key with what another value of it means for the identity of a run.
    const IDENTITY: &'static Classes;

    /// Every key that is a number with the least and the most that it may be.
    const BOUNDS: &'static Bounds;

    /// Tells what cannot be: of these keys, between them, and between them and the engine's. `spec` has
    /// passed its own check.
    fn check(&self, spec: &RunSpec, findings: &mut Findings);
}

/// A specification that does not say what its task needs.
#[derive(Debug, thiserror::Error)]
#[error("the specification does not fit the task `{task}`: {reason}")]
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
        self.set_sections(T::TYPE, settings, T::IDENTITY);
    }
}

/// A task's keys, for code that does not know its type.
#[derive(Clone, Copy, Debug)]
pub struct TaskSchema {
    /// As in `task.type`.
    pub name: &'static str,
    identity: &'static Classes,
    /// What its numbers may be.
    pub bounds: &'static Bounds,
    known_keys: fn() -> Vec<String>,
    number_keys: fn() -> Vec<String>,
    read: fn(&Node) -> Reading<Box<dyn Settings>>,
    check: fn(&RunSpec, &mut Findings) -> Result<(), SettingsError>,
}

impl TaskSchema {
    /// The schema of a type.
    pub const fn of<T: TaskSettings>() -> Self {
        Self {
            name: T::TYPE,
            identity: T::IDENTITY,
            bounds: T::BOUNDS,
            known_keys: keys::known_keys::<T>,
            number_keys: keys::number_keys::<T>,
            read: read::<T>,
            check: check::<T>,
        }
    }

    /// The dotted path of every key of the task, in the order of its declaration.
    pub fn known_keys(&self) -> Vec<String> {
        (self.known_keys)()
    }

    /// What is wrong with the task's own list of keys, one line each; for a test of the task. A key without a
    /// class, with two, one that is not there, and one that the engine has; a number without bounds.
    pub fn misfits(&self) -> Vec<String> {
        let known = self.known_keys();
        let mut wrong = identity::misfits(&known, self.identity);
        let taken = identity::ENGINE.iter().map(|(key, _)| *key).filter(|key| has(&known, key));
        wrong.extend(taken.map(|key| format!("{key}: is a key of the engine")));
        wrong.extend(bounds::misfits(&(self.number_keys)(), &known, self.bounds));
        wrong
    }

    /// Checks the task's keys of a specification that came from elsewhere than a file.
    pub fn check(&self, spec: &RunSpec) -> Result<(), ConfigError> {
        let mut findings = Findings::default();
        bounds::check(&spec.document(), self.bounds, &mut findings);
        if !findings.is_empty() {
            return findings.into_result();
        }
        (self.check)(spec, &mut findings)
            .map_err(|error| ConfigError::one(Problem::new("", error.to_string())))?;
        findings.into_result()
    }

    pub(super) fn read(&self, root: &Node) -> Reading<Box<dyn Settings>> {
        (self.read)(root)
    }

    /// Whether the task has a key, keys below it, or a value that it is a part of.
    pub(super) fn has(&self, path: &str) -> bool {
        has(&self.known_keys(), path)
    }
}

/// Whether `path` is one of the keys, a section of theirs, or inside the value of one.
pub(super) fn has(keys: &[String], path: &str) -> bool {
    keys.iter().any(|key| key == path || within(key, path) || within(path, key))
}

/// Whether `path` is below `section`.
fn within(path: &str, section: &str) -> bool {
    path.strip_prefix(section).is_some_and(|rest| rest.starts_with('.'))
}

/// A task's keys, read.
pub(super) trait Settings {
    fn check(&self, spec: &RunSpec, findings: &mut Findings);
    fn put_into(&self, spec: &mut RunSpec);
}

impl<T: TaskSettings> Settings for T {
    fn check(&self, spec: &RunSpec, findings: &mut Findings) {
        TaskSettings::check(self, spec, findings);
    }

    fn put_into(&self, spec: &mut RunSpec) {
        spec.set_settings(self);
    }
}

fn read<T: TaskSettings>(root: &Node) -> Reading<Box<dyn Settings>> {
    let Reading { value, unknown } = de::read::<T>(root);
    Reading { value: value.map(|settings| Box::new(settings) as Box<dyn Settings>), unknown }
}

fn check<T: TaskSettings>(spec: &RunSpec, findings: &mut Findings) -> Result<(), SettingsError> {
    TaskSettings::check(&spec.settings::<T>()?, spec, findings);
    Ok(())
}

/// The tasks that there are.
#[derive(Clone, Copy, Debug)]
pub struct Tasks(pub &'static [TaskSchema]);

impl Tasks {
    /// The schema of a `task.type`.
    pub fn named(self, kind: &str) -> Option<&'static TaskSchema> {
        self.0.iter().find(|schema| schema.name == kind)
    }

    /// Checks the task's keys of a specification that came from elsewhere than a file.
    pub fn check(self, spec: &RunSpec) -> Result<(), ConfigError> {
        let schema = self.named(&spec.task.kind).ok_or_else(|| ConfigError::one(self.unknown(&spec.task)))?;
        schema.check(spec)
    }

    pub(super) fn unknown(self, task: &Task) -> Problem {
        let names = self.0.iter().map(|schema| format!("`{}`", schema.name)).collect::<Vec<_>>().join(", ");
        let problem = Problem::new("task.type", format!("`{}` is not one of {names}", task.kind));
        match keys::closest(&task.kind, self.0.iter().map(|schema| schema.name)) {
            Some(near) => problem.help(format!("did you mean `{near}`?")),
            None => problem,
        }
    }

    /// The task other than `this` that has the key.
    pub(super) fn other_with(self, this: &str, path: &str) -> Option<&'static str> {
        self.0.iter().find(|schema| schema.name != this && schema.has(path)).map(|schema| schema.name)
    }
}
