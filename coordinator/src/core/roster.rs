//! Who is there: nodes, workers, their lines and their last sign of life.

use std::collections::BTreeMap;

use coxswain_proto::ids::{Bytes, Rank, Step, WorkerId};

use super::{
    event::{Beat, NodeClaim, StreamId, WorkerClaim},
    refusal::Refusal,
    report::{StepTimes, WorkerPhase},
    time::Timestamp,
};
use crate::options::{Patience, World};

/// All nodes and workers of a run.
#[derive(Clone, Debug)]
pub struct Roster {
    world: World,
    nodes: BTreeMap<u32, Node>,
    workers: Vec<Option<Worker>>,
    ranks: BTreeMap<WorkerId, Rank>,
    next_id: u64,
}

/// A launcher's place.
#[derive(Clone, Debug)]
struct Node {
    node_id: String,
    host: String,
}

/// One worker process.
#[derive(Clone, Debug)]
pub struct Worker {
    /// Its name in every call.
    pub id: WorkerId,
    /// What it said of itself.
    pub claim: WorkerClaim,
    /// What it was doing when last heard of.
    pub phase: WorkerPhase,
    /// In which step.
    pub step: Step,
    /// Where the time of its last reported step went.
    pub times: StepTimes,
    /// Last collective entered, last one finished.
    pub collective: (u64, u64),
    /// Bytes in use.
    pub memory_in_use: Bytes,
    /// Last sign of life.
    pub last_seen: Timestamp,
    /// Its open line, if there is one.
    pub line: Option<StreamId>,
    /// Lines opened so far.
    pub lines: u64,
    /// Sequence number of its last line for people.
    pub notes: u64,
    /// True once it has reported its failure.
    pub failed: bool,
    /// How it went, once it is gone.
    pub gone: Option<Gone>,
}

/// How a worker went.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Gone {
    /// It said good-bye, with this exit code to come.
    Left(i32),
    /// It fell silent, or its process ended without a word.
    Lost,
}

impl Worker {
    /// When it counts as lost unless it is heard of again.
    pub fn lost_at(&self, patience: &Patience) -> Timestamp {
        let limit = if self.line.is_some() { patience.hang } else { patience.silence };
        self.last_seen.after(limit)
    }
}

impl Roster {
    /// Nobody is there yet. `life` counts the coordinator's starts of this run: worker ids of different lives differ.
    pub fn new(world: World, life: u32) -> Self {
        Self {
            world,
            nodes: BTreeMap::new(),
            workers: vec![None; world.size() as usize],
            ranks: BTreeMap::new(),
            next_id: (u64::from(life) << 32) + 1,
        }
    }

    /// Gives a node its place; true when it is new.
    pub fn place(&mut self, claim: &NodeClaim) -> Result<(u32, bool), Refusal> {
        let World { nnodes, nproc_per_node } = self.world;
        if claim.local_world != nproc_per_node {
            return Err(Refusal::LocalWorld { theirs: claim.local_world, ours: nproc_per_node });
        }
        if let Some((&place, _)) = self.nodes.iter().find(|(_, node)| node.node_id == claim.node_id) {
            return Ok((place, false));
        }
        let place = match claim.node_rank {
            Some(node_rank) if node_rank >= nnodes => {
                return Err(Refusal::NodeRankOutside { node_rank, nnodes });
            }
            Some(node_rank) => match self.nodes.get(&node_rank) {
                Some(node) => return Err(Refusal::NodeRankTaken { node_rank, host: node.host.clone() }),
                None => node_rank,
            },
            None => (0..nnodes)
                .find(|place| !self.nodes.contains_key(place))
                .ok_or(Refusal::NodesComplete { nnodes })?,
        };
        self.nodes.insert(place, Node { node_id: claim.node_id.clone(), host: claim.host.clone() });
        Ok((place, true))
    }

    /// Whether this node has its place.
    pub fn joined(&self, node_id: &str) -> Result<(), Refusal> {
        match self.nodes.values().any(|node| node.node_id == node_id) {
            true => Ok(()),
            false => Err(Refusal::UnknownNode(node_id.to_owned())),
        }
    }

    /// Enters a worker; the same process gets the same id. True when it is new.
    pub fn enter(&mut self, now: Timestamp, claim: WorkerClaim) -> Result<(WorkerId, bool), Refusal> {
        let (rank, world) = (claim.rank, self.world.size());
        let Some(slot) = self.workers.get_mut(rank.0 as usize) else {
            return Err(Refusal::RankOutside { rank, world });
        };
        if let Some(worker) = slot {
            if worker.claim.incarnation == claim.incarnation {
                worker.last_seen = now;
                return Ok((worker.id, false));
            }
            let (host, pid) = (worker.claim.host.clone(), worker.claim.pid);
            return Err(Refusal::RankTaken { rank, host, pid });
        }
        let id = WorkerId(self.next_id);
        self.next_id += 1;
        self.ranks.insert(id, rank);
        *slot = Some(Worker {
            id,
            claim,
            phase: WorkerPhase::Joining,
            step: Step(0),
            times: StepTimes::default(),
            collective: (0, 0),
            memory_in_use: Bytes(0),
            last_seen: now,
            line: None,
            lines: 0,
            notes: 0,
            failed: false,
            gone: None,
        });
        Ok((id, true))
    }

    /// The worker of this id, if it is there.
    pub fn get_mut(&mut self, id: WorkerId) -> Result<&mut Worker, Refusal> {
        let rank = self.ranks.get(&id).ok_or(Refusal::UnknownWorker(id))?;
        self.workers[rank.0 as usize].as_mut().ok_or(Refusal::UnknownWorker(id))
    }

    /// Takes a sign of life; false when the worker is not known.
    pub fn heard(&mut self, now: Timestamp, beat: &Beat) -> bool {
        match self.get_mut(beat.worker) {
            Ok(worker) if worker.claim.incarnation == beat.incarnation && worker.gone != Some(Gone::Lost) => {
                worker.last_seen = now;
                worker.phase = beat.phase;
                worker.step = worker.step.max(beat.step);
                worker.collective = beat.collective;
                worker.memory_in_use = beat.memory_in_use;
                true
            }
            _ => false,
        }
    }

    /// Workers in rank order.
    pub fn workers(&self) -> impl Iterator<Item = &Worker> {
        self.workers.iter().flatten()
    }

    /// The worker of a rank.
    pub fn at(&self, rank: Rank) -> Option<&Worker> {
        self.workers.get(rank.0 as usize)?.as_ref()
    }

    /// Workers that are there and not gone.
    pub fn present(&self) -> u32 {
        self.workers().filter(|worker| worker.gone.is_none()).count() as u32
    }

    /// True when every rank has its worker.
    pub fn complete(&self) -> bool {
        self.workers.iter().all(Option::is_some)
    }

    /// True when every worker that came is gone.
    pub fn all_gone(&self) -> bool {
        self.workers().all(|worker| worker.gone.is_some())
    }

    /// The first worker that counts as lost now.
    pub fn lost(&self, now: Timestamp, patience: &Patience) -> Option<&Worker> {
        self.living().filter(|worker| worker.lost_at(patience) <= now).min_by_key(|worker| worker.last_seen)
    }

    /// The earliest moment at which a worker could count as lost.
    pub fn next_loss(&self, patience: &Patience) -> Option<Timestamp> {
        self.living().map(|worker| worker.lost_at(patience)).min()
    }

    fn living(&self) -> impl Iterator<Item = &Worker> {
        self.workers().filter(|worker| worker.gone.is_none())
    }
}
