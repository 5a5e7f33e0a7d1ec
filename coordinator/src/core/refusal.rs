//! Why the coordinator says no: typed, with both sides of every contradiction and the remedy.

use std::collections::VecDeque;

use coxswain_proto::{
    ids::{Generation, Slot, Step, WorkerId},
    limits::MAX_REFUSALS_KEPT,
};

use super::{event::DataSet, reason::Reason};

/// Why a call was refused.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum Refusal {
    /// Two versions in one run.
    #[error(
        "this is cox {theirs}, but the coordinator is cox {ours}: install the same version on every node"
    )]
    Version {
        /// The caller's.
        theirs: String,
        /// The coordinator's.
        ours: String,
    },
    /// The caller belongs to another run.
    #[error("this coordinator serves run {ours}, not {theirs}; check --rdzv-id and --rdzv-endpoint")]
    OtherRun {
        /// The caller's.
        theirs: String,
        /// The coordinator's.
        ours: String,
    },
    /// Another launcher has this place.
    #[error("node rank {node_rank} is taken by {host}: give every node its own --node-rank")]
    NodeRankTaken {
        /// The place.
        node_rank: u32,
        /// Who has it.
        host: String,
    },
    /// Another launcher had this place a moment ago, and may come back. Asking again helps.
    #[error(
        "the place of node {node_rank} is reserved for the launcher on {host}, which has just disconnected"
    )]
    PlaceKept {
        /// The place.
        node_rank: u32,
        /// Whose it is.
        host: String,
    },
    /// More nodes than asked for.
    #[error(
        "all nodes ({nnodes}) have joined: raise --nnodes on the coordinator, or stop the surplus launcher"
    )]
    NodesComplete {
        /// As asked for.
        nnodes: u32,
    },
    /// A place outside the world.
    #[error("node rank {node_rank} is out of range: --nnodes is {nnodes}, and node ranks start at 0")]
    NodeRankOutside {
        /// The place.
        node_rank: u32,
        /// Nodes in all.
        nnodes: u32,
    },
    /// Nodes of different size.
    #[error(
        "--nproc-per-node is {theirs} on this node, but {ours} at the coordinator: use the same on every node"
    )]
    LocalWorld {
        /// The caller's.
        theirs: u32,
        /// The coordinator's.
        ours: u32,
    },
    /// A rank outside the world.
    #[error("rank {slot} is outside a world of size {world}")]
    RankOutside {
        /// As claimed.
        slot: Slot,
        /// Workers in all.
        world: u32,
    },
    /// A rank of another node.
    #[error("rank {slot} is not a worker of node {place}")]
    RankElsewhere {
        /// As claimed.
        slot: Slot,
        /// The caller's place.
        place: u32,
    },
    /// Two processes claim one rank.
    #[error("rank {slot} is taken by process {pid} on {host}: two workers claim one rank")]
    RankTaken {
        /// As claimed by both.
        slot: Slot,
        /// Who has it.
        host: String,
        /// Who has it.
        pid: u32,
    },
    /// Workers see different data.
    #[error(
        "rank {slot} sees {theirs}, but {witness} {ours}: data.path must hold the same data set on every node"
    )]
    OtherDataSet {
        /// The caller.
        slot: Slot,
        /// What it sees.
        theirs: Box<DataSet>,
        /// Who saw the other one.
        witness: Witness,
        /// What was seen first.
        ours: Box<DataSet>,
    },
    /// The run cannot be planned with these samples.
    #[error("{0}")]
    Plan(#[from] coxswain_proto::plan::PlanError),
    /// The caller was never registered, or is gone.
    #[error("worker {0} is not registered (any more): it must register again")]
    UnknownWorker(WorkerId),
    /// The caller was given up, and its place may be another's.
    #[error("rank {slot} was declared lost: this process must exit")]
    Fenced {
        /// Place.
        slot: Slot,
    },
    /// The caller's slot is not used any more.
    #[error(
        "rank {slot} is cordoned: it is not used until its node is restarted (hardware faults: {faults}; the last one: {newest})"
    )]
    Cordoned {
        /// Place.
        slot: Slot,
        /// So far.
        faults: u32,
        /// The newest, in words.
        newest: String,
    },
    /// The caller speaks of a membership that is over.
    #[error("generation {theirs} has ended: the current one is {ours}")]
    Stale {
        /// The caller's.
        theirs: Generation,
        /// The newest.
        ours: Generation,
    },
    /// The launcher never asked for a place.
    #[error("node {0} has not joined this run")]
    UnknownNode(String),
    /// A new generation of a cache that does not exist.
    #[error("there is no cache to rebuild: cache.mode is off")]
    NoCache,
    /// A new generation of a cache that needs none.
    #[error("cache.mode is exact: its features never go stale, so there is nothing to rebuild")]
    ExactCache,
    /// A new generation of a run whose steps are not known yet.
    #[error(
        "the cache cannot be rebuilt before the run has started, because the length of an epoch is not known \
         yet; the first version of the cached features is built without this command"
    )]
    NotPlanned,
    /// A new generation that would not be used.
    #[error(
        "a rebuilt cache would not be used: steps below {leased} are already assigned to ranks, and later \
         steps use no cache"
    )]
    NoCachedStep {
        /// Steps below this one are leased.
        leased: Step,
    },
    /// No launcher has this place, or none any more.
    #[error("node {0} is not in this run (any more)")]
    NoNodeThere(u32),
    /// A node that the run cannot go on without.
    #[error("node {node_rank} cannot leave: {why}; stop the whole run instead, which writes a checkpoint")]
    Needed {
        /// Place.
        node_rank: u32,
        /// Why not.
        why: String,
    },
    /// Nothing can be asked of a run that is over.
    #[error("the run has ended: {0}")]
    Over(Reason),
}

impl Refusal {
    /// Whether people should hear of it. Of what the order of things brings with it, and of callers that ask
    /// again, they need not.
    pub fn is_news(&self) -> bool {
        let usual = matches!(
            self,
            Self::UnknownWorker(_) | Self::Over(_) | Self::Stale { .. } | Self::PlaceKept { .. }
        );
        !usual
    }
}

/// What callers were refused that ask again and again: told once to each.
#[derive(Clone, Debug, Default)]
pub struct RefusalMemo(VecDeque<(String, Refusal)>);

impl RefusalMemo {
    /// Remembers a refusal; whether this caller has not been told the same before. A caller without a name
    /// is always told anew.
    pub fn is_news(&mut self, caller: Option<String>, refusal: &Refusal) -> bool {
        let Some(caller) = caller else { return true };
        let told = (caller, refusal.clone());
        if self.0.contains(&told) {
            return false;
        }
        if self.0.len() >= MAX_REFUSALS_KEPT {
            self.0.pop_front();
        }
        self.0.push_back(told);
        true
    }
}

/// Who saw the data set first.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Witness {
    /// A worker of this world.
    Slot(Slot, String),
    /// An earlier start of this run, by its journal.
    Journal,
}

impl std::fmt::Display for Witness {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Slot(slot, host) => write!(f, "rank {slot} on {host} sees"),
            Self::Journal => f.write_str("this run began with"),
        }
    }
}
