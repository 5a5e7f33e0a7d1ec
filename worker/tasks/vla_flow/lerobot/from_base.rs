//! A policy directory for a data set, of a model that is only the base of policies.

use std::path::Path;

use coxswain_data::{
    DataError, FeatureReport, inspect,
    place::hub::{self, Repository},
};
use coxswain_policies::{
    directory::Feature,
    gr00t::nvidia::{BasePolicy, is_base},
};
use coxswain_task::StarterJob;

use crate::{settings::unread, vla_flow::starter::FoundFeatures};

/// Makes the directory of a policy for the job's data in `out`, if its model is only the base of one.
pub fn make_policy(job: &StarterJob<'_>, out: &Path) -> Option<Result<(), DataError>> {
    let model = job.model?;
    let dir = hub::directory(model, Repository::Model).ok().filter(|dir| is_base(dir))?;
    let made = inspect(job.data).and_then(|report| {
        let FoundFeatures { state, action, cameras } = FoundFeatures::from_report(job, &report)?;
        let width = |features: &[&FeatureReport]| {
            features.iter().map(|feature| feature.shape.iter().product::<usize>()).sum()
        };
        let feature = |name: &str, kind: &str, shape| Feature { name: name.into(), kind: kind.into(), shape };
        let camera = |camera: &&FeatureReport| {
            let shape = match camera.shape[..] {
                [height, width, channels @ 1..=4] => vec![channels, height, width],
                _ => camera.shape.clone(),
            };
            feature(&camera.name, "VISUAL", shape)
        };
        let state = feature("observation.state", "STATE", vec![width(&state)]);
        let inputs: Vec<_> = cameras.iter().map(camera).chain([state]).collect();
        let outputs = [feature("action", "ACTION", vec![width(&action)])];
        // The name on the hub is the same on every machine.
        let base =
            if model == dir { dir.canonicalize().unwrap_or_else(|_| dir.clone()) } else { model.into() };
        let name = &base.display().to_string();
        BasePolicy { dir: &dir, name, inputs: &inputs, outputs: &outputs }.write(out).map_err(unread)
    });
    Some(made)
}
