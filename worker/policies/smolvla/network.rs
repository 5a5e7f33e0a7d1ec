//! A SmolVLA policy, read from its directory.

use coxswain_models::pretrained::error::ModelError;
use coxswain_nn::kernels::Tape;

use super::{
    config::SmolVlaConfig,
    names::{RULES, is_reached},
    tuning::expert_inner,
};
use crate::{
    network::{PolicyFile, PolicyLoad, PolicyNetwork},
    policy::Policy,
    state_suffix::StateSuffix,
};

/// Reads a policy of this configuration.
pub(crate) fn load<B: Tape<Base = B>>(
    config: &SmolVlaConfig,
    job: PolicyLoad<'_, B>,
) -> Result<Box<dyn Policy<B>>, ModelError> {
    let inner = expert_inner(&job.files.directory.dir);
    let file = PolicyFile { rules: RULES, within: config.within(), reached: is_reached };
    let network = PolicyNetwork::load(job, file, |source, vlm| {
        StateSuffix::load(source, config.form(), vlm, |number| config.expert(&vlm.layer, number, inner))
    });
    Ok(Box::new(network?))
}
