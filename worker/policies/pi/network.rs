//! A policy of pi's on a device, read from its directory.

use coxswain_models::pretrained::error::ModelError;
use coxswain_nn::kernels::Tape;

use super::{
    config::PiConfig,
    names::{PiKind, is_reached},
    timed_suffix::TimedSuffix,
};
use crate::{
    network::{PolicyFile, PolicyLoad, PolicyNetwork},
    policy::Policy,
    state_suffix::StateSuffix,
};

/// Reads a policy of this configuration.
pub(crate) fn load<B: Tape<Base = B>>(
    config: &PiConfig,
    job: PolicyLoad<'_, B>,
) -> Result<Box<dyn Policy<B>>, ModelError> {
    let file = PolicyFile { rules: config.kind.rules(), within: PiConfig::within(), reached: is_reached };
    match config.kind {
        PiKind::Pi0 => {
            let network = PolicyNetwork::load(job, file, |source, vlm| {
                StateSuffix::load(source, config.form(), vlm, |_| config.expert(&vlm.layer))
            });
            Ok(Box::new(network?))
        }
        PiKind::Pi05 => {
            let network =
                PolicyNetwork::load(job, file, |source, vlm| TimedSuffix::load(source, config, vlm));
            Ok(Box::new(network?))
        }
    }
}
