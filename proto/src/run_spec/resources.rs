//! What it may use: the sections `memory`, `faults` and `launch`.

use serde::{Deserialize, Serialize};

/// Peak-memory accounting.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Memory {
    /// Bytes a rank may allocate on the CPU device before an allocation counts as out of memory; absent means no bound.
    pub capacity: Option<u64>,
}

/// What is kept in store for a lost worker.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Faults {
    /// Whether every rank keeps a mirror of its neighbour's optimizer shard, so that losing one worker loses no step. Costs 12
    /// bytes on each rank for each trainable of a shard; without it a lost worker takes the run back to its last checkpoint.
    pub mirror: bool,
}

impl Default for Faults {
    fn default() -> Self {
        Self { mirror: true }
    }
}

/// Processes and threads; the command line wins over it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Launch {
    /// Worker processes on each node.
    pub nproc_per_node: Option<usize>,
    /// Compute threads of each worker; cores divided by workers when absent.
    pub threads_per_worker: Option<usize>,
    /// Where the coordinator listens; a free loopback port when absent.
    pub listen: Option<String>,
}
