//! The specification itself, and how it is written and read: the engine's keys and the task's as one
//! document.

use std::collections::BTreeMap;

use serde::{Deserialize, Deserializer, Serialize, Serializer, de::Error as _};
use serde_json::{Map, Value};

use super::{
    cache::Cache,
    resources::{Faults, Launch, Memory},
    sections::{Sections, merge, object, take_out},
    training::{Data, Eval, Optimizer, Train},
};
use crate::identity::{Classes, Marks};

/// Where [`Marks`] stand in the document. Not a key that people write: a specification that a program wrote
/// has it, and code that reads that as a run file takes them from the task's schema.
pub(crate) const MARKS: &str = "identity";

/// The task of a run that names none: there was no other when run files did not name one.
pub const DEFAULT_TASK: &str = "vla_flow";

/// One run: its task, data, optimizer, schedule, and how it is launched.
// `remote = "Self"` makes serde's code for the fields inherent functions. The traits, which add the task's
// keys, are below.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(remote = "Self")]
pub struct RunSpec {
    /// Name, output directory and seed.
    pub run: Run,
    /// What is learned, and what reads the keys that are not the engine's.
    #[serde(default)]
    pub task: Task,
    /// The data set and how it is read.
    pub data: Data,
    /// Steps, batch, recompute, checkpoints.
    pub train: Train,
    /// AdamW and its schedule.
    #[serde(default)]
    pub optimizer: Optimizer,
    /// Held-out evaluation before the first step and after the last.
    #[serde(default)]
    pub eval: Eval,
    /// Features of what does not train, kept instead of computed again.
    #[serde(default)]
    pub cache: Cache,
    /// Peak-memory accounting, and what is kept elsewhere than where a rank computes.
    #[serde(default)]
    pub memory: Memory,
    /// What is kept in store for a lost worker.
    #[serde(default)]
    pub faults: Faults,
    /// Processes and threads; the command line wins over it.
    #[serde(default)]
    pub launch: Launch,
    /// The task's keys.
    #[serde(skip)]
    sections: Sections,
}

/// Name, output directory and seed.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Run {
    /// Used in logs and file names: letters, digits, `-`, `_`, `.`.
    pub name: String,
    /// Everything the run writes goes below it.
    pub output_dir: String,
    /// Where in a bucket checkpoints, journal and results are kept, too: what a launch on a machine with an
    /// empty disk goes on from.
    #[serde(default)]
    pub bucket: Option<String>,
    /// Keys every random draw of the run.
    #[serde(default)]
    pub seed: u64,
}

/// What is learned.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Task {
    /// Name of the task whose schema reads the keys that are not the engine's.
    #[serde(rename = "type")]
    pub kind: String,
}

impl Default for Task {
    fn default() -> Self {
        Self { kind: DEFAULT_TASK.into() }
    }
}

/// Where a task's pretrained model lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BasePlace<'a> {
    /// Dotted, of the task.
    pub key: &'a str,
    /// What it says.
    pub path: &'a str,
}

impl RunSpec {
    /// The task's keys, as its schema wrote them, in the place of those that are there. They are not checked.
    pub(crate) fn set_sections(&mut self, task: &str, settings: &impl Serialize, identity: &Classes) {
        task.clone_into(&mut self.task.kind);
        self.sections = Sections { values: object(settings), marks: Marks::from_classes(identity) };
    }

    /// Peak learning rate of each group of trainables, by the group's name: `optimizer.lr`, whose keys are
    /// the task's.
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

    /// Where the pretrained model lies that the task names: the key and its value; none if it names none.
    pub fn base(&self) -> Option<BasePlace<'_>> {
        let key = self.sections.marks.base()?;
        let mut sections = key.split('.');
        let section = self.sections.values.get(sections.next()?)?;
        let path = sections.try_fold(section, |value, name| value.get(name))?.as_str()?;
        Some(BasePlace { key, path })
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
                return Err(format!(
                    "optimizer.lr.{group}: must be a finite number of at least 0, is {rate}"
                ));
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
