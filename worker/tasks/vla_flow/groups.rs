//! What trains besides adapters, by the names that learning rates and files have.

use coxswain_nn::params::Group;

/// The action expert.
pub use coxswain_policies::EXPERT;
/// The sensor encoder.
pub const SENSOR: Group = Group("sensor");
