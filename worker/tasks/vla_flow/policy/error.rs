//! What can go wrong when a policy is built or runs.

use coxswain_proto::{config::SettingsError, ids::Step};

use coxswain_models::{
    pretrained::error::{ModelError, TokenError, UnreadableWeights},
    vision_language::PassError,
};

use crate::vla_flow::data::batch::MicroBatch;

/// A policy that cannot be built.
#[derive(Debug, thiserror::Error)]
pub enum PolicyError {
    /// The vision-language model or its adapter.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// The run's settings are none of this task's.
    #[error(transparent)]
    Task(#[from] SettingsError),
    /// A setting of the run file that does not fit the data set or the model.
    #[error("{field}: {problem}")]
    Setting {
        /// Dotted path in the run file.
        field: &'static str,
        /// What was found, what was expected, and what to do.
        problem: String,
    },
}

/// A micro-batch that cannot be run.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum StepError {
    /// Tokens or images of the micro-batch do not fit the model.
    #[error("step {step}, samples {samples:?}: {source}")]
    Tokens {
        /// Optimizer step.
        step: Step,
        /// Samples of the micro-batch.
        samples: Vec<u64>,
        /// What does not fit.
        source: TokenError,
    },
    /// Cached features of the micro-batch do not fit its tokens.
    #[error("step {step}, samples {samples:?}: cached features: {problem}")]
    Features {
        /// Optimizer step.
        step: Step,
        /// Samples of the micro-batch.
        samples: Vec<u64>,
        /// What was found, and what was expected.
        problem: String,
    },
    /// Frozen weights that are streamed cannot be read any more.
    #[error("step {step}: {source}")]
    Weights {
        /// Optimizer step.
        step: Step,
        /// Which, and why.
        source: UnreadableWeights,
    },
    /// The loss is infinite or not a number.
    #[error(
        "step {step}: the loss of samples {samples:?} is not finite; look for NaN in their data and in the statistics, or lower the learning rate"
    )]
    NonFiniteLoss {
        /// Optimizer step.
        step: Step,
        /// The samples concerned, by `index`.
        samples: Vec<u64>,
    },
}

/// Why a pass of this micro-batch ends early.
pub(in crate::vla_flow) fn failed(batch: &MicroBatch, broken: impl Into<PassError>) -> StepError {
    match broken.into() {
        PassError::Tokens(source) => {
            StepError::Tokens { step: batch.step, samples: batch.sample_indices.clone(), source }
        }
        PassError::Weights(source) => StepError::Weights { step: batch.step, source },
    }
}

/// Refuses losses that are infinite or not a number, with the samples whose they are.
pub(in crate::vla_flow) fn check_finite(batch: &MicroBatch, per_sample: &[f64]) -> Result<(), StepError> {
    let losses = batch.sample_indices.iter().zip(per_sample);
    let samples: Vec<u64> = losses.filter(|(_, loss)| !loss.is_finite()).map(|(&sample, _)| sample).collect();
    match samples.is_empty() {
        true => Ok(()),
        false => Err(StepError::NonFiniteLoss { step: batch.step, samples }),
    }
}
