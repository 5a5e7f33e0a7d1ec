//! Under which names observations carry what a policy sees: the section `serve`.
//!
//! Robots that speak openpi's protocol have names of their own for their cameras and joints. What is said
//! here is about the wire alone: nothing that is learned depends on it.

use std::{collections::BTreeSet, slice};

use coxswain_proto::config::Findings;
use serde::{Deserialize, Serialize};

use super::data::Data;

/// What an observation may have besides, under names that cannot be changed.
const TAKEN: [&str; 2] = ["seed", "noise"];

/// The names of an observation's values; where none is given, that of the data set's feature.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Serve {
    /// One for each of `data.cameras`, in their order; or none.
    pub cameras: Vec<String>,
    /// The state's. Numbers under several names are put side by side.
    pub state: Vec<String>,
    /// The sensor's.
    pub sensor: Option<String>,
    /// The instruction's.
    pub prompt: String,
    /// The data set whose robot the policy acts on, if it was trained on several.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub set: Option<String>,
}

impl Default for Serve {
    fn default() -> Self {
        Self { cameras: Vec::new(), state: Vec::new(), sensor: None, prompt: "prompt".into(), set: None }
    }
}

impl Serve {
    /// These names, with the data set's for every one that is not given.
    pub fn with_names_of(&self, data: &Data) -> Self {
        let or = |given: &[String], own: &[String]| if given.is_empty() { own } else { given }.to_vec();
        Self {
            cameras: or(&self.cameras, &data.cameras),
            state: or(&self.state, data.state.names()),
            sensor: data.sensor.as_ref().map(|own| self.sensor.as_ref().unwrap_or(&own.key).clone()),
            prompt: self.prompt.clone(),
            set: None,
        }
    }

    pub(super) fn check(&self, data: &Data, f: &mut Findings) {
        f.require(
            self.cameras.is_empty() || self.cameras.len() == data.cameras.len(),
            "serve.cameras",
            format_args!("has {} names for {} cameras", self.cameras.len(), data.cameras.len()),
            "give one name for each of `data.cameras`, in their order",
        );
        f.require(
            self.state.is_empty() || !data.state.is_none(),
            "serve.state",
            "names a value that the policy does not use: `data.state` is `none`",
            "remove it",
        );
        f.require(
            self.sensor.is_none() || data.sensor.is_some(),
            "serve.sensor",
            "names a value that the policy does not use: `data.sensor` is not set",
            "remove it",
        );
        if let Some(name) = &self.set {
            let there = data.set(name).map(drop);
            f.require(
                there.is_ok(),
                "serve.set",
                format_args!("is `{name}`, which is not one of `data.sets`"),
                &match &there {
                    Err(names) if !names.is_empty() => format!("choose one of {names}"),
                    _ => "remove it".to_owned(),
                },
            );
        }
        if *self == Self::default() {
            return;
        }
        let all = self.with_names_of(data);
        let mut seen = BTreeSet::new();
        for (key, names) in [
            ("serve.cameras", &all.cameras[..]),
            ("serve.state", &all.state[..]),
            ("serve.sensor", all.sensor.as_slice()),
            ("serve.prompt", slice::from_ref(&all.prompt)),
        ] {
            for name in names {
                f.require(!name.trim().is_empty(), key, "has an empty name", "remove it");
                f.require(
                    seen.insert(name) && !TAKEN.contains(&name.as_str()),
                    key,
                    format_args!("names `{name}`, which is already the name of another value"),
                    "give every value a name of its own; `seed` and `noise` are reserved",
                );
            }
        }
    }
}
