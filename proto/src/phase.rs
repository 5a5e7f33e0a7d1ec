//! What a worker is doing.

/// What a worker is doing, for heartbeats, memory peaks and failure reports.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(u8)]
pub enum Phase {
    /// Waiting for the world to be complete.
    Joining = 1,
    /// Reading the checkpoint and the data set's metadata.
    Loading,
    /// Forming the ring.
    Connecting,
    /// Forward pass.
    Forward,
    /// Backward pass.
    Backward,
    /// In a collective.
    Communication,
    /// Optimizer step.
    Optimizer,
    /// Writing or reading a checkpoint.
    Checkpoint,
    /// Building the vision-language cache.
    CacheBuild,
    /// Held-out evaluation.
    Evaluation,
    /// Waiting for `resume`.
    Paused,
    /// Waiting for data.
    Data,
    /// Nothing more to do.
    Done,
}

impl Phase {
    /// All of them, in the order of their numbers.
    pub const ALL: [Self; 13] = [
        Self::Joining,
        Self::Loading,
        Self::Connecting,
        Self::Forward,
        Self::Backward,
        Self::Communication,
        Self::Optimizer,
        Self::Checkpoint,
        Self::CacheBuild,
        Self::Evaluation,
        Self::Paused,
        Self::Data,
        Self::Done,
    ];

    /// In lower case, as tables and files have it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Joining => "joining",
            Self::Loading => "loading",
            Self::Connecting => "connecting",
            Self::Forward => "forward",
            Self::Backward => "backward",
            Self::Communication => "communication",
            Self::Optimizer => "optimizer",
            Self::Checkpoint => "checkpoint",
            Self::CacheBuild => "cache build",
            Self::Evaluation => "evaluation",
            Self::Paused => "paused",
            Self::Data => "data",
            Self::Done => "done",
        }
    }
}
