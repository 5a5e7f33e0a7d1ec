//! What it may use: the sections `memory`, `faults` and `launch`.

use serde::{Deserialize, Serialize};

/// Peak-memory accounting, and what is kept elsewhere than where a rank computes.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Memory {
    /// Bytes a rank may allocate on the CPU device before an allocation counts as out of memory; absent means
    /// no bound.
    pub capacity: Option<u64>,
    /// What is not held where a rank computes.
    pub offload: Offload,
    /// What ranks share out among themselves beside the optimizer's state, which they always do.
    pub shard: Shard,
}

/// What ranks share out among themselves, each holding a part, beside the optimizer's state.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Shard {
    /// Nothing more: every rank holds all frozen weights.
    #[default]
    None,
    /// The frozen weights of all blocks: every rank holds a part of each block, and gathers a block from the
    /// others when it runs, two blocks in memory at a time. On CPUs.
    Frozen,
}

/// What is not held where a rank computes, but fetched when it is needed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Offload {
    /// Nothing: what trains, its gradients and its moments are where the model is.
    #[default]
    None,
    /// Moments and replica: with a GPU they are in host memory, and every step copies them to the GPU and
    /// back. On a CPU the same as `none`.
    Optimizer,
    /// The frozen weights of all blocks: read from their files whenever a block runs, two blocks in memory at
    /// a time.
    Layers,
    /// The table of token embeddings: with a GPU it is in host memory, and every step copies the rows that
    /// it looks up. On a CPU the same as `none`.
    Embedding,
}

/// What is kept in store for a lost worker, and how often ranks are compared.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Faults {
    /// Whether every rank keeps a replica of another's optimizer shard, on another node where there is one:
    /// losing one worker, or one node, loses no step. Costs 12 bytes on each rank for each trainable of a
    /// shard; without it a lost worker takes the run back to its last checkpoint.
    #[serde(rename = "mirror")]
    pub replica: bool,
    /// Steps between comparisons of what ranks hold: digests of the weights that train, and of every
    /// optimizer shard and its replica. A rank that differs is named and gets its state anew; where it
    /// cannot be told which one is wrong, the run goes back to its last checkpoint. Before every checkpoint
    /// they are compared, too. 0: never.
    pub verify_every: u64,
    /// Steps between those that run twice, each rank's slice by another rank, too: gradients that differ name
    /// a rank whose arithmetic is wrong, and the step runs again. A step whose numbers are not finite is run
    /// so in any case, before it is left out. 0: never.
    pub replay_every: u64,
    /// Hardware faults after which a slot is not used any more, until its node is launched again: wrong
    /// results, a check that was not passed, errors that a GPU's driver reports. A process that is killed or
    /// hangs is none. 0: slots are always used again.
    pub cordon_after: u32,
    /// Windows of 20 steps for which a rank may have been named slow before a spare (`--spares`) has its
    /// place; without a spare it keeps it. 0: slow ranks are named, and nothing follows.
    pub replace_slow: u64,
}

impl Default for Faults {
    fn default() -> Self {
        Self { replica: true, verify_every: 50, replay_every: 0, cordon_after: 2, replace_slow: 0 }
    }
}

/// Processes, threads, and what they compute with; the command line wins over it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Launch {
    /// Worker processes on each node.
    pub nproc_per_node: Option<usize>,
    /// What workers compute on.
    pub device: DeviceChoice,
    /// What carries gradients and weights between workers.
    pub collectives: Collectives,
    /// Compute threads of each worker; cores divided by workers when absent.
    pub threads_per_worker: Option<usize>,
    /// Whether a CPU with AVX512-BF16 multiplies frozen bfloat16 weights as they are: what they are
    /// multiplied with is rounded to bfloat16, sums are float32. Otherwise the weights are widened.
    #[serde(skip_serializing_if = "is_true")]
    pub bfloat16_matmul: bool,
    /// Where the coordinator listens; a free loopback port when absent.
    pub listen: Option<String>,
    /// Command or URL that is told of faults, standstills and the end. Read, and never written down: the URL
    /// of a webhook is a secret, and what is written of a run is shown to people.
    #[serde(skip_serializing)]
    pub notify: Option<String>,
}

impl Default for Launch {
    fn default() -> Self {
        Self {
            nproc_per_node: None,
            device: DeviceChoice::default(),
            collectives: Collectives::default(),
            threads_per_worker: None,
            bfloat16_matmul: true,
            listen: None,
            notify: None,
        }
    }
}

fn is_true(value: &bool) -> bool {
    *value
}

/// What workers compute on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, strum::Display)]
#[serde(rename_all = "lowercase")]
#[strum(serialize_all = "lowercase")]
pub enum DeviceChoice {
    /// NVIDIA GPUs where the driver and what it needs are there, else the CPU.
    #[default]
    Auto,
    /// The CPU.
    Cpu,
    /// NVIDIA GPUs; a machine that cannot is refused.
    Cuda,
}

impl std::str::FromStr for DeviceChoice {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let known = [Self::Auto, Self::Cpu, Self::Cuda];
        let found = known.into_iter().find(|choice| choice.to_string() == text.trim());
        found.ok_or_else(|| format!("`{text}` is not a device; expected auto, cpu or cuda"))
    }
}

/// What carries gradients and weights between workers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Collectives {
    /// NCCL if every worker has a GPU and the library, else the ring.
    #[default]
    Auto,
    /// The ring: TCP, and shared memory between workers of one machine.
    Ring,
    /// NCCL; a world that cannot is refused.
    Nccl,
}
