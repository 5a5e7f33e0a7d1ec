//! What is read of memory, in three scopes; of a GPU by the crate that knows it (`coxswain-cuda`).

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

/// Reads what a GPU holds now, and what it held within passes that are watched. Asked at the ends of phases;
/// a read waits for the orders that the GPU's runtime has not looked at yet, not for the GPU.
pub trait Gauge: fmt::Debug + Send {
    /// In use and reserved by its allocator, and taken of the GPU by all processes. Zero where it cannot be
    /// read.
    fn read(&self) -> PhasePeak;

    /// Looks within passes from now on, or does not any more.
    fn watch(&self, _on: bool) {}

    /// The most in use that was seen within passes since the last call.
    fn take_most(&self) -> u64 {
        0
    }

    /// Bytes that this process can still have: free on the GPU, and reserved by its allocator without being
    /// in use. None where it cannot be read.
    fn room(&self) -> Option<u64> {
        None
    }

    /// Has the allocator give back what it reserves and does not use.
    fn release(&self) {}

    /// What its maker calls the GPU; none if it does not say.
    fn gpu(&self) -> Option<String> {
        None
    }
}
