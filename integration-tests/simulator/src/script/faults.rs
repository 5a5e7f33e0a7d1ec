//! What can happen to a run.

use std::{fmt, time::Duration};

use coxswain_coordinator::core::report::WorkerPhase;
use serde::Deserialize;

/// One thing that happens.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Fault {
    /// Seconds after the start.
    pub at_s: f64,
    /// What.
    pub what: Kind,
    /// To which worker, by its place; for those that happen to a worker.
    #[serde(default)]
    pub rank: u32,
    /// To which node; for those that happen to a launcher.
    #[serde(default)]
    pub node: u32,
    /// For how many seconds, for those that end.
    #[serde(default = "for_s")]
    pub for_s: f64,
    /// How much slower, for those that slow down; how many connections, for a flood.
    #[serde(default = "factor")]
    pub factor: f64,
    /// In which phase, for a trainer that is to stand still; at once if absent.
    #[serde(default)]
    pub phase: Option<Place>,
}

impl Fault {
    /// How long it lasts.
    pub fn lasts(&self) -> Duration {
        Duration::from_secs_f64(self.for_s)
    }
}

/// What can happen.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Kind {
    /// `kill -9` of a worker.
    Kill,
    /// SIGSTOP of a worker, and SIGCONT after `for_s`.
    Freeze,
    /// A worker's trainer stands still for ever, though its process lives, in `phase` once it comes there.
    Hang,
    /// A worker computes `factor` times as long for `for_s`.
    Slow,
    /// A worker heartbeats `factor` times as seldom for ever, as if its clock were slow.
    Skew,
    /// A worker finds that its machine has computed something wrong, and goes on.
    Slip,
    /// A worker finds that its machine computes wrong results, and ends.
    Broken,
    /// Nothing passes between a worker and the coordinator for `for_s`.
    Partition,
    /// A worker's line to the coordinator breaks, and can be opened again at once.
    CutLine,
    /// A connection between a worker and its neighbour breaks.
    CutRing,
    /// `kill -9` of the coordinator; another one takes its place after `for_s`.
    KillCoordinator,
    /// `kill -9` of a launcher and with it of its workers; another one comes after `for_s`.
    KillLauncher,
    /// SIGSTOP of a launcher, and SIGCONT after `for_s`: the server closes its line at once, and its workers
    /// go on.
    FreezeLauncher,
    /// `cox rebuild-cache`, which is refused where no cached step is left.
    RebuildCache,
    /// `cox drain --node`: the node's workers leave at a boundary, its launcher with them, and another one
    /// comes after `for_s`. Nothing happens where the run cannot do without the node.
    Drain,
    /// A machine stands still for `for_s`, with launcher, workers and, if it is there, coordinator.
    StopMachine,
    /// Nothing passes between a machine and the others, nor to the run's directory, for `for_s`.
    CutMachine,
    /// `factor` connections of those who only read for `for_s`: each makes calls without an end, and a fifth
    /// of them never take their answers.
    Flood,
    /// A launcher is killed with its workers, and one of another version comes after `for_s`; at the
    /// coordinator's node the next coordinator is of that version, too. A caller that is refused for its
    /// version is launched again as the coordinator's.
    UpgradeLauncher,
    /// A worker is killed; those that come at its rank within `for_s` are of another version.
    UpgradeWorker,
    /// The coordinator's machine loses power, and is launched on again after `for_s`: of what was not synced,
    /// some is gone.
    PowerLoss,
    /// `kill -9` of the coordinator within a transaction: in the write of its journal that is `factor` from
    /// now.
    KillWriting,
    /// There is no room for journal and checkpoints for `for_s`.
    FullDisk,
    /// Journal and checkpoints cannot be written for `for_s`.
    ReadOnlyDisk,
    /// Each sync of the journal takes up to two seconds for `for_s`.
    SlowDisk,
    /// The next sync of the journal fails; what it was to write is written by the next one.
    FailedSync,
    /// The disk says for `for_s` that it has synced, and has not.
    LyingSync,
    /// The next write of the journal is lost, though it is synced.
    LostWrite,
    /// The next write of the journal lands elsewhere in the file.
    MisdirectedWrite,
    /// The newest checkpoint cannot be read any more.
    DamagedCheckpoint,
}

impl Kind {
    /// Whether it concerns the disk under journal and checkpoints.
    pub fn is_of_storage(self) -> bool {
        matches!(
            self,
            Self::PowerLoss
                | Self::KillWriting
                | Self::FullDisk
                | Self::ReadOnlyDisk
                | Self::SlowDisk
                | Self::FailedSync
                | Self::DamagedCheckpoint
        ) || self.is_of_a_lying_disk()
    }

    /// Whether the disk does not do what it says, so that no program can know what it has.
    pub fn is_of_a_lying_disk(self) -> bool {
        matches!(self, Self::LyingSync | Self::LostWrite | Self::MisdirectedWrite)
    }
}

/// Where a trainer may stand still.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Place {
    /// Before a process has made itself known: the next one that comes at the rank.
    Start,
    /// Reading the model.
    Load,
    /// Forming the ring, and moving state.
    Connect,
    /// Computing a step.
    Forward,
    /// In a collective.
    Communication,
    /// Writing a checkpoint.
    Checkpoint,
    /// After the last step.
    Evaluation,
}

impl Place {
    /// Places where a process is known already.
    pub const KNOWN: [Self; 6] =
        [Self::Load, Self::Connect, Self::Forward, Self::Communication, Self::Checkpoint, Self::Evaluation];

    /// As heartbeats have it.
    pub fn phase(self) -> WorkerPhase {
        match self {
            Self::Start => WorkerPhase::Starting,
            Self::Load => WorkerPhase::Loading,
            Self::Connect => WorkerPhase::Connecting,
            Self::Forward => WorkerPhase::Forward,
            Self::Communication => WorkerPhase::Communication,
            Self::Checkpoint => WorkerPhase::Checkpoint,
            Self::Evaluation => WorkerPhase::Evaluation,
        }
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { rank, node, for_s, factor, .. } = self;
        match self.what {
            Kind::Kill => write!(f, "rank {rank} is killed"),
            Kind::Freeze => write!(f, "rank {rank} is frozen for {for_s:.1} s"),
            Kind::Hang => match self.phase {
                Some(place) => write!(f, "rank {rank} will hang in {}", place.phase()),
                None => write!(f, "rank {rank} hangs"),
            },
            Kind::Drain => write!(f, "node {node} is drained; it comes back after {for_s:.1} s"),
            Kind::FreezeLauncher => write!(f, "the launcher of node {node} is frozen for {for_s:.1} s"),
            Kind::Slow => write!(f, "rank {rank} is {factor:.1} times as slow for {for_s:.1} s"),
            Kind::Skew => write!(f, "rank {rank} heartbeats every {factor:.1} s"),
            Kind::Slip => write!(f, "rank {rank} has computed something wrong"),
            Kind::Broken => write!(f, "rank {rank} computes wrong results, and ends"),
            Kind::Partition => write!(f, "rank {rank} cannot reach the coordinator for {for_s:.1} s"),
            Kind::RebuildCache => write!(f, "a new version of the cached features is requested"),
            Kind::CutLine => write!(f, "rank {rank}'s stream to the coordinator breaks"),
            Kind::CutRing => write!(f, "rank {rank}'s connection to its neighbour breaks"),
            Kind::StopMachine => write!(f, "the machine of node {node} is frozen for {for_s:.1} s"),
            Kind::CutMachine => write!(f, "the machine of node {node} is cut off for {for_s:.1} s"),
            Kind::Flood => write!(f, "{factor:.0} connections only read for {for_s:.1} s"),
            Kind::UpgradeLauncher => {
                write!(f, "the launcher of node {node} is killed; another version comes after {for_s:.1} s")
            }
            Kind::UpgradeWorker => {
                write!(f, "rank {rank} is killed; another version comes in its place for {for_s:.1} s")
            }
            Kind::PowerLoss => write!(f, "the coordinator's machine loses power for {for_s:.1} s"),
            Kind::KillWriting => write!(f, "the coordinator will be killed {factor:.0} writes from now"),
            Kind::FullDisk => write!(f, "the disk is full for {for_s:.1} s"),
            Kind::ReadOnlyDisk => write!(f, "the disk cannot be written for {for_s:.1} s"),
            Kind::SlowDisk => write!(f, "the disk is slow for {for_s:.1} s"),
            Kind::FailedSync => write!(f, "the disk fails to sync, once"),
            Kind::LyingSync => write!(f, "the disk confirms writes for {for_s:.1} s without keeping them"),
            Kind::LostWrite => write!(f, "the disk loses a write"),
            Kind::MisdirectedWrite => write!(f, "the disk writes to another place, once"),
            Kind::DamagedCheckpoint => write!(f, "the newest checkpoint is damaged"),
            Kind::KillCoordinator => {
                write!(f, "the coordinator is killed; a new one starts after {for_s:.1} s")
            }
            Kind::KillLauncher => {
                write!(f, "the launcher of node {node} is killed; a new one starts after {for_s:.1} s")
            }
        }
    }
}

pub(crate) fn for_s() -> f64 {
    1.0
}
pub(crate) fn factor() -> f64 {
    2.0
}
