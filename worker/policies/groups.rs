//! What of a policy trains, by the name that learning rates and files have.

use coxswain_nn::params::Group;

/// The action expert and its projections: what trains by default.
pub const EXPERT: Group = Group("expert");
