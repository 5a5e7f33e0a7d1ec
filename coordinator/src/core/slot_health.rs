//! What is recorded and shown of one slot's hardware; `health` counts it.

use coxswain_proto::ids::WorkerId;
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
    /// The worker whose note was counted last, and the note's number: to another coordinator it says the same
    /// again. Absent from journals of versions that counted it again.
    #[serde(default)]
    pub noted: Option<(WorkerId, u64)>,
}
