//! From a YAML file and dotted overrides to a checked [`RunSpec`].
//!
//! ```text
//! text ─tree─▶ Node with places ─sections─▶ one run's ─overrides─▶ Node ─de─▶ engine's part ─┬─▶ RunSpec
//!                                                                   │    └──▶ task's part ───┘     │
//!                                         keys that neither knows, wrong types        contradictions: check
//! ```
//!
//! Every complaint names the file, line and column (or the override) it is about, the dotted path of the
//! field, and what to do. Unknown keys are reported all at once, and so are contradictions; of wrong types
//! only the first is.
//!
//! What this does not do: look at the file system beyond reading the file itself. Whether the model and the
//! data set exist and fit each other is for the worker's checks.

pub mod bounds;
mod check;
mod de;
mod error;
mod findings;
mod keys;
mod overrides;
mod paths;
mod scalar;
mod sections;
mod task;
mod tree;

use std::{collections::HashMap, io::ErrorKind, path::Path};

use self::{de::UnknownKey, task::has, tree::Node};
pub use self::{
    error::{ConfigError, Place, Problem},
    findings::Findings,
    keys::of_other_trainers,
    task::{SettingsError, TaskSchema, TaskSettings, Tasks},
};
use crate::{
    bounded,
    limits::{MAX_CONFIG_BYTES, MAX_UNKNOWN_KEYS},
    run_spec::{EnginePart, MARKS, RunSpec, Task},
};

/// Reads any value from YAML, with the same complaints; `source_name` stands for the file in them.
pub fn from_yaml<T: for<'de> serde::Deserialize<'de>>(
    text: &str,
    source_name: &str,
) -> Result<T, ConfigError> {
    de::from_tree(&tree::parse(text, source_name)?)
}

/// What is wrong with the list of the engine's bounds, one line each; for a test.
pub fn engine_misfits() -> Vec<String> {
    bounds::misfits(&keys::number_keys::<EnginePart>(), &engine_keys(), bounds::ENGINE)
}

/// The dotted path of every key that the engine has, whatever the task, in the order of its declaration.
pub fn engine_keys() -> Vec<String> {
    keys::known_keys::<EnginePart>()
}

impl RunSpec {
    /// Reads the file at `path`, lays its chosen section and then `overrides` (`a.b=value`, later ones win)
    /// over it, and checks the result. The override `section=NAME` chooses the section.
    pub fn load(path: &Path, overrides: &[String], tasks: Tasks) -> Result<Self, ConfigError> {
        let name = path.display().to_string();
        let text = bounded::read_piped_text(path, MAX_CONFIG_BYTES).map_err(|error| match error.kind() {
            ErrorKind::FileTooLarge => ConfigError::TooLarge { file: name.clone(), limit: MAX_CONFIG_BYTES },
            _ => ConfigError::Unreadable { file: name.clone(), source: error },
        })?;
        Self::from_yaml(&text, &name, overrides, tasks)
    }

    /// As [`RunSpec::load`], from text; `source_name` stands for the file in errors.
    pub fn from_yaml(
        text: &str,
        source_name: &str,
        overrides: &[String],
        tasks: Tasks,
    ) -> Result<Self, ConfigError> {
        let mut root = tree::parse(text, source_name)?;
        if !matches!(root.value, tree::Value::Map(_)) {
            let problem = Problem::new("", "is not a run file: a run file is a map of keys").at(&root.place);
            return Err(ConfigError::one(
                problem.help("`cox init` writes one, and docs/reference/run-file.md lists the keys"),
            ));
        }
        let (choices, changes): (Vec<_>, Vec<_>) =
            overrides.iter().partition(|given| sections::is_choice(given));
        choices.iter().try_for_each(|given| overrides::apply(&mut root, given))?;
        sections::resolve(&mut root)?;
        changes.iter().try_for_each(|given| overrides::apply(&mut root, given))?;
        paths::expand(&mut root, std::env::var("HOME").ok().filter(|home| !home.is_empty()).as_deref())?;
        read(&root, tasks)
    }
}

fn read(root: &Node, tasks: Tasks) -> Result<RunSpec, ConfigError> {
    let schema = schema(root, tasks)?;
    let engine = de::read::<EnginePart>(root);
    let task = schema.read(root);
    let unknown = unknown_to_both(engine.unknown, task.unknown, schema);
    let mut problems = describe(&unknown, schema, tasks);
    match (engine.value, task.value) {
        (Ok(EnginePart(mut spec)), Ok(settings)) if problems.is_empty() => {
            settings.put_into(&mut spec);
            let mut findings = Findings::default();
            let document = spec.document();
            bounds::check(&document, bounds::ENGINE, &mut findings);
            bounds::check(&document, schema.bounds, &mut findings);
            // Rules compute with what is within them.
            if findings.is_empty() {
                spec.find(&mut findings);
                settings.check(&spec, &mut findings);
            }
            problems = findings.into_problems();
            if problems.is_empty() {
                return Ok(spec);
            }
            for problem in &mut problems {
                problem.place = Some(root.nearest(&problem.path).place.clone());
            }
        }
        (Err(problem), _) | (Ok(_), Err(problem)) => problems.push(problem),
        (Ok(_), Ok(_)) => {}
    }
    Err(ConfigError::Invalid(problems))
}

/// The schema of the task that the file names.
fn schema(root: &Node, tasks: Tasks) -> Result<&'static TaskSchema, ConfigError> {
    #[derive(serde::Deserialize)]
    struct TaskAlone {
        #[serde(default)]
        task: Task,
    }
    let task = de::read::<TaskAlone>(root).value.map_err(ConfigError::one)?.task;
    let unknown = || ConfigError::one(tasks.unknown(&task).at(&root.nearest("task.type").place));
    tasks.named(&task.kind).ok_or_else(unknown)
}

/// Unknown keys of both readers: those of one that the other does not have either.
fn unknown_to_both(engine: Vec<UnknownKey>, task: Vec<UnknownKey>, schema: &TaskSchema) -> Vec<UnknownKey> {
    let (engines, tasks) = (engine_keys(), schema.known_keys());
    let mut unknown: Vec<_> = engine.into_iter().filter(|key| !has(&tasks, &key.path())).collect();
    let mut places: HashMap<_, _> = unknown.iter().enumerate().map(|(at, key)| (key.path(), at)).collect();
    for key in task.into_iter().filter(|key| !has(&engines, &key.path())) {
        match places.get(&key.path()) {
            Some(at) => unknown[*at].fields.extend(key.fields),
            None => {
                places.insert(key.path(), unknown.len());
                unknown.push(key);
            }
        }
    }
    unknown.retain(|key| key.path() != MARKS);
    for key in &mut unknown {
        let mut seen = std::collections::BTreeSet::new();
        key.fields.retain(|field| seen.insert(*field));
    }
    unknown
}

/// Says what may have been meant by each key: another task's, or one of this file's. Of many the first are
/// told.
fn describe(unknown: &[UnknownKey], schema: &TaskSchema, tasks: Tasks) -> Vec<Problem> {
    if unknown.is_empty() {
        return Vec::new();
    }
    let known = [engine_keys(), schema.known_keys()].concat();
    let problem = |key: &UnknownKey| match tasks.other_with(schema.name, &key.path()) {
        Some(other) => Problem::new(
            key.path(),
            format!("is a key of the task `{other}`, but the task of this file is `{}`", schema.name),
        )
        .at(&key.place)
        .help("remove it, or set `task.type`"),
        None => key.problem(&known),
    };
    let more = unknown.len().saturating_sub(MAX_UNKNOWN_KEYS);
    let rest = (more > 0).then(|| {
        Problem::new("", format!("unknown keys that are not listed here: {more}")).help("is this a run file?")
    });
    unknown.iter().take(MAX_UNKNOWN_KEYS).map(problem).chain(rest).collect()
}

#[cfg(test)]
mod tests;
