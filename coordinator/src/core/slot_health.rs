//! What is recorded and shown of one slot's hardware; `health` counts it.

use serde::{Deserialize, Serialize};

/// What is known of one slot's hardware.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SlotHealth {
    /// Faults so far.
    pub faults: u32,
    /// The newest, in words.
    pub newest: String,
    /// It is not used any more.
    pub cordoned: bool,
}
