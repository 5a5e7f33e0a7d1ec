//! What a run file says where it begins with a policy of LeRobot's: its cameras, its chunk, and its own
//! preset of the optimizer.

use std::path::Path;

use coxswain_data::{
    DataError, FeatureReport, NormMode,
    place::hub::{self, Repository},
    yaml::yaml_scalar,
};
use coxswain_models::pretrained::error::ModelError;
use coxswain_policies::{
    PolicyKind,
    directory::{PolicyDirectory, is_policy},
};
use coxswain_task::StarterJob;

use crate::{settings::unread, starter::Starter};

/// Part of the name of a camera that LeRobot fills by itself.
const EMPTY: &str = ".empty_camera_";

/// A policy that a run is to begin with.
pub struct PolicyStart {
    directory: PolicyDirectory,
    kind: PolicyKind,
    modes: [NormMode; 2],
}

impl PolicyStart {
    /// The policy of `cox init --model`; none if it is a plain model, or not given.
    pub fn for_job(job: &StarterJob<'_>) -> Result<Option<Self>, DataError> {
        let dir = job.model.map(|dir| hub::directory(dir, Repository::Model)).transpose()?;
        let Some(dir) = dir.filter(|dir| is_policy(dir)) else { return Ok(None) };
        Self::from_dir(&dir).map(Some).map_err(unread)
    }

    fn from_dir(dir: &Path) -> Result<Self, ModelError> {
        let directory = PolicyDirectory::from_dir(dir)?;
        let kind = PolicyKind::from_directory(&directory)?;
        let modes = PolicyKind::normalization(&directory)?;
        Ok(Self { directory, kind, modes })
    }

    /// `data.normalization`, where it is not what a run file without it says.
    pub fn normalization(&self) -> Option<String> {
        let [state, action] = self.modes;
        let (state, action) = (state.name(), action.name());
        (self.modes != [NormMode::MeanStd; 2]).then(|| format!("{{ state: {state}, action: {action} }}"))
    }

    /// Actions of a chunk.
    pub fn horizon(&self) -> usize {
        self.kind.sizes().chunk
    }

    /// Cameras of a data set that the policy has places for, each with the policy's name: in its order, those
    /// of equal names in their places and the others in what is left.
    pub fn cameras<'r>(&self, there: &[&'r FeatureReport]) -> Vec<(&'r FeatureReport, &str)> {
        let own = || self.kind.sizes().cameras.iter().filter(|name| !name.contains(EMPTY));
        let named = |name: &str| there.iter().copied().find(|camera| camera.name == name);
        let mut others = there.iter().copied().filter(|camera| own().all(|name| *name != camera.name));
        let place = |name: &'_ String| named(name).or_else(|| others.next());
        let chosen: Vec<_> = own().map(String::as_str).zip(own().map(place)).collect();
        chosen.into_iter().filter_map(|(name, camera)| Some((camera?, name))).collect()
    }

    /// The lines below `cameras`: which is which, where names differ, and which have no place.
    pub fn renames(&self, file: &mut Starter, there: &[&FeatureReport], taken: &[(&FeatureReport, &str)]) {
        let other = taken.iter().filter(|(camera, name)| camera.name != *name);
        let map: Vec<_> = other
            .map(|(camera, name)| format!("{}: {}", yaml_scalar(&camera.name), yaml_scalar(name)))
            .collect();
        if !map.is_empty() {
            let map = map.join(", ");
            file.lines(format_args!("  rename_map: {{ {map} }} # to the policy's names: check each of them"));
        }
        let left = there.iter().filter(|camera| taken.iter().all(|(taken, _)| taken.name != camera.name));
        let left: Vec<_> = left.map(|camera| yaml_scalar(&camera.name)).collect();
        if !left.is_empty() {
            file.lines(format_args!("  # cameras that the policy has no place for: {}", left.join(", ")));
        }
    }

    /// LeRobot's own preset.
    pub fn optimizer(&self, file: &mut Starter) -> Result<(), DataError> {
        let fields = self.directory.fields().map_err(unread)?;
        let number = |key: &str, otherwise: f64| {
            fields.get(key).and_then(serde_json::Value::as_f64).unwrap_or(otherwise)
        };
        let betas = fields.get("optimizer_betas").and_then(serde_json::Value::as_array);
        let beta =
            |at: usize, otherwise: f64| betas.and_then(|betas| betas.get(at)?.as_f64()).unwrap_or(otherwise);
        let (rate, warm_up, decay) = (
            number("optimizer_lr", 1e-4),
            number("scheduler_warmup_steps", 1000.0),
            number("scheduler_decay_steps", 30_000.0).max(1.0),
        );
        file.lines("optimizer: # the policy's own preset");
        file.lines(format_args!("  lr: {{ expert: {rate:e} }}"));
        file.lines(format_args!("  betas: [{}, {}]", beta(0, 0.9), beta(1, 0.95)));
        file.lines(format_args!("  eps: {:e}", number("optimizer_eps", 1e-8)));
        file.lines(format_args!("  weight_decay: {:e}", number("optimizer_weight_decay", 1e-10)));
        // Its preset says it in code, and of its schedule the file has the warm-up alone.
        let ratio = fields.get("warmup_ratio").filter(|_| matches!(self.kind, PolicyKind::Gr00t(_)));
        if let Some(ratio) = ratio {
            file.lines(format_args!("  clip_norm: 1\n  warmup_ratio: {ratio}\n  min_lr_ratio: 0\n"));
            return Ok(());
        }
        file.lines(format_args!("  clip_norm: {}", number("optimizer_grad_clip_norm", 10.0)));
        file.lines(format_args!(
            "  warmup_ratio: {:.4} # for runs longer than {decay} steps, use `warmup_steps: {warm_up}` and `decay_steps: {decay}` instead",
            warm_up / decay
        ));
        let least = number("scheduler_decay_lr", 2.5e-6) / rate;
        file.lines(format_args!("  min_lr_ratio: {least:.4}\n"));
        Ok(())
    }
}
