//! What a policy's configuration says of the samples that it is made for.

use coxswain_models::pretrained::{error::ModelError, fields::Fields};

use crate::{
    directory::{Feature, PolicyDirectory},
    policy::{NoiseEnd, PolicySizes},
};

/// Cameras, states and actions.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct PolicyFeatures {
    /// Cameras, by the names of their features, in the order in which the prefix has them.
    pub cameras: Vec<String>,
    /// Values of a state.
    pub state: usize,
    /// Values of an action.
    pub action: usize,
    /// Steps of a chunk.
    pub chunk: usize,
    /// What states and actions are padded to.
    pub padded: [usize; 2],
    /// Euler steps of sampling.
    pub steps: usize,
    /// Whether the loss counts the steps of a chunk that an episode does not have.
    pub counts_padding: bool,
    /// Whether such steps are 0, normalised, and not as they were recorded.
    pub blanks_padding: bool,
    /// At which time actions are noise.
    pub noise: NoiseEnd,
    /// Whether training drops something beside what adapters drop.
    pub drops: bool,
}

impl PolicyFeatures {
    /// The features of a directory, checked, whose key of sampling's steps is `steps`.
    pub fn from_directory(
        directory: &PolicyDirectory,
        steps: &str,
        counts_padding: bool,
    ) -> Result<Self, ModelError> {
        let fields = directory.fields()?;
        let [inputs, outputs] = ["input_features", "output_features"].map(|key| directory.features(key));
        let (inputs, outputs) = (inputs?, outputs?);
        let number =
            |key: &str, otherwise: usize| Ok::<_, ModelError>(fields.uint(key)?.unwrap_or(otherwise));
        let features = Self {
            cameras: inputs.iter().filter(|one| one.kind == "VISUAL").map(|one| one.name.clone()).collect(),
            state: width_of(&fields, "input_features", &inputs, "STATE")?,
            action: width_of(&fields, "output_features", &outputs, "ACTION")?,
            chunk: number("chunk_size", 50)?,
            padded: [number("max_state_dim", 32)?, number("max_action_dim", 32)?],
            steps: number(steps, 10)?.max(1),
            counts_padding,
            blanks_padding: false,
            noise: NoiseEnd::One,
            drops: false,
        };
        features.check(&fields)?;
        Ok(features)
    }

    /// What they say of samples.
    pub fn sizes(&self) -> PolicySizes<'_> {
        let Self {
            cameras,
            state,
            action,
            chunk,
            padded,
            steps,
            counts_padding,
            blanks_padding,
            noise,
            drops,
        } = self;
        PolicySizes {
            cameras,
            state: *state,
            action: *action,
            chunk: *chunk,
            padded: *padded,
            steps: *steps,
            counts_padding: *counts_padding,
            blanks_padding: *blanks_padding,
            noise: *noise,
            drops: *drops,
        }
    }

    fn check(&self, fields: &Fields<'_>) -> Result<(), ModelError> {
        if self.cameras.is_empty() {
            return Err(fields.error("input_features", "no feature of type VISUAL; expected at least one"));
        }
        if self.chunk == 0 {
            return Err(fields.error("chunk_size", "0; expected at least 1"));
        }
        for (key, found, most) in
            [("max_state_dim", self.state, self.padded[0]), ("max_action_dim", self.action, self.padded[1])]
        {
            if found > most {
                return Err(fields.error(key, format!("{most}, but the feature has {found} values")));
            }
        }
        if fields.uint("n_obs_steps")?.is_some_and(|steps| steps != 1) {
            return Err(fields.error("n_obs_steps", "only 1 is supported"));
        }
        Ok(())
    }
}

/// Values of the one feature of this type.
fn width_of(fields: &Fields<'_>, key: &str, features: &[Feature], kind: &str) -> Result<usize, ModelError> {
    let mut found = features.iter().filter(|feature| feature.kind == kind);
    match (found.next().map(|feature| &feature.shape[..]), found.next()) {
        (Some(&[width]), None) if width > 0 => Ok(width),
        _ => {
            Err(fields.error(key, format!("expected exactly one feature of type {kind}, with one dimension")))
        }
    }
}
