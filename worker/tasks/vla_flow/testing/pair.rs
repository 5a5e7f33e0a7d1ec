//! Two small data sets that differ in all that sets of a mixture may.

use coxswain_models::families::shelf;
use std::collections::BTreeMap;

use coxswain_proto::run_spec::RunSpec;
use tempfile::TempDir;

use super::recording::Recording;
use crate::vla_flow::{
    config::{DataSet, VlaSpec},
    data::{Dataset, Mixture},
};

/// The camera that both have.
pub const FRONT: &str = "observation.images.front";
/// The other one.
pub const WRIST: &str = "observation.images.wrist";

/// Two recordings, and a run on both.
pub struct TwoSets {
    _data: [TempDir; 2],
    /// The run.
    pub spec: RunSpec,
}

impl TwoSets {
    /// The second set has 9 samples beside 17, shorter states, longer actions, and no camera at the wrist:
    /// what is the wrist's there is the run's front.
    pub fn new(change: impl FnOnce(&mut Vec<DataSet>)) -> Self {
        Self::with_second(Recording { episodes: vec![(3, 0), (6, 0)], ..Recording::default() }, change)
    }

    /// Two recordings of which the second is this one, and a run on both.
    pub fn with_second(second: Recording, change: impl FnOnce(&mut Vec<DataSet>)) -> Self {
        let first = Recording::default();
        let data = [first.write(), second.write()];
        let mut spec = first.spec(data[0].path());
        spec.vla_mut().data.sensor = None;
        let set = |name: &str, dir: &TempDir| DataSet {
            path: dir.path().display().to_string(),
            name: Some(name.into()),
            ..DataSet::default()
        };
        let mut sets = vec![set("lab", &data[0]), set("field", &data[1])];
        sets[1].state = Some("action".into());
        sets[1].action = Some("observation.state".into());
        sets[1].cameras = Some(BTreeMap::from([(FRONT.into(), WRIST.into())]));
        change(&mut sets);
        spec.vla_mut().data.sets = sets;
        Self { _data: data, spec }
    }

    /// Both.
    pub fn mixture(&self) -> Mixture {
        Mixture::from_spec(&self.spec, shelf()).unwrap_or_else(|error| panic!("{error}"))
    }

    /// One set, as a run on it alone sees it.
    pub fn alone(&self, at: usize) -> Dataset {
        let vla = self.spec.vla();
        let spec = vla.spec_of_set(&self.spec, &vla.data.sets[at]);
        Dataset::from_spec(&spec, shelf()).unwrap_or_else(|error| panic!("{error}"))
    }
}
