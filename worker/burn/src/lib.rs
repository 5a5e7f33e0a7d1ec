//! The parts of burn that we compute with, under the names that the crate `burn` has for them.
//!
//! `burn` brings layers, optimisers, records and data loaders along, and with them a minute of building.
//! We have our own.

pub use burn_tensor as tensor;

/// Where tensors live.
pub mod backend {
    pub use burn_autodiff::{self as autodiff, Autodiff};
    pub use burn_flex::{self as flex, Flex};
}
