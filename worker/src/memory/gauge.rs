//! What is read of memory, in three scopes; of a card by whoever knows the card.

use std::fmt;

use serde::{Deserialize, Serialize};

/// Peaks of one phase in three scopes, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PhasePeak {
    /// Allocator, in use.
    pub in_use: u64,
    /// Allocator, reserved.
    pub reserved: u64,
    /// Driver, or resident set.
    pub driver: u64,
}

impl PhasePeak {
    /// The larger of each.
    pub fn or(self, other: Self) -> Self {
        Self {
            in_use: self.in_use.max(other.in_use),
            reserved: self.reserved.max(other.reserved),
            driver: self.driver.max(other.driver),
        }
    }
}

/// Reads what a card holds now. Asked at the ends of phases; a read waits for the orders that the card's runtime has not looked at yet, not
/// for the card.
pub trait Gauge: fmt::Debug + Send {
    /// In use and reserved by its allocator, and taken of the card by anybody. Zero where a scope cannot be read.
    fn read(&self) -> PhasePeak;

    /// What its maker calls the card; none if it does not say.
    fn card(&self) -> Option<String> {
        None
    }
}
