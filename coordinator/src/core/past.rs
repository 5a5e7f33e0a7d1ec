//! What a coordinator remembers of its earlier lives: the sum of its records.
//!
//! The journal keeps the records' effects in tables; [`Past`] is the same as a value. [`Past::add_record`]
//! adds one record, so that a test or a simulation can restart a machine from what it has recorded, without
//! a disk.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use coxswain_proto::{
    cache_plan::CacheDecision,
    ids::{Generation, Slot, Step, WorkerId},
    limits::{MAX_CACHE_PHASES, MAX_GENERATIONS_KEPT},
};
use serde::{Deserialize, Serialize};

use super::{
    action::{Orders, Record},
    cache::{GENERATIONS_KEPT, GenerationEntry, HighWaterMark},
    event::{DataSet, WorkerClaim},
    failure::{End, Failure, SpentBudgets},
    quarantine::Quarantine,
    report::StateSource,
    roster::Respawn,
    slot_health::SlotHealth,
};

/// The sum of all records.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Past {
    /// The data set all ranks agreed on.
    pub dataset: Option<DataSet>,
    /// What people wanted.
    pub orders: Orders,
    /// What was used of the budgets.
    pub spent: SpentBudgets,
    /// Launchers by place.
    pub nodes: BTreeMap<u32, PastNode>,
    /// Workers, or what became of them, by slot.
    pub slots: BTreeMap<Slot, PastSlot>,
    /// Memberships, the newest so many. Members are kept of the newest one and of the newest that has
    /// started.
    pub generations: BTreeMap<Generation, PastGeneration>,
    /// Steps below this one are committed; absent if none ever was, nor any generation started.
    pub committed: Option<Step>,
    /// Committed steps that were left out.
    pub skipped: BTreeSet<Step>,
    /// How far the run was before it was rolled back.
    pub reached: HighWaterMark,
    /// Samples that failed.
    pub quarantine: Quarantine,
    /// Slots whose hardware has shown faults.
    pub health: BTreeMap<Slot, SlotHealth>,
    /// From which steps on which generation of the feature cache serves.
    pub cache_phases: BTreeMap<Step, CacheDecision>,
    /// Generations of the feature cache, by number.
    pub caches: BTreeMap<u64, GenerationEntry>,
    /// The newest fault.
    pub fault: Option<Arc<Failure>>,
    /// How the run ended, if it did.
    pub end: Option<End>,
}

/// A launcher.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PastNode {
    /// Stable over retries of one launcher.
    pub node_id: String,
    /// Machine.
    pub host: String,
    /// Version. Absent from journals of versions that did not look at it here.
    #[serde(default)]
    pub version: String,
}

/// A slot.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PastSlot {
    /// Who had it.
    pub worker: Option<(WorkerId, WorkerClaim)>,
    /// What its launcher was asked to do last. It has been done if a worker has the slot; its number counts
    /// on, so that a launcher can tell the next one from a repeat.
    pub respawn: Option<Respawn>,
    /// The exit code that its worker announced when it left in order.
    #[serde(default)]
    pub left: Option<i32>,
}

impl PastSlot {
    /// A new process has it.
    pub fn taken(&mut self, id: WorkerId, claim: &WorkerClaim) {
        self.worker = Some((id, claim.clone()));
        self.left = None;
    }
}

/// A membership.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PastGeneration {
    /// How many were in it.
    pub workers: u32,
    /// By rank; forgotten when it does not matter any more.
    pub members: Vec<(Slot, WorkerId)>,
    /// Where it started, and where its state came from.
    pub started: Option<(Step, StateSource)>,
    /// It has ended.
    pub over: bool,
}

impl PastGeneration {
    /// It has just been formed.
    pub fn formed(members: &[(Slot, WorkerId)]) -> Self {
        Self { workers: members.len() as u32, members: members.to_vec(), ..Self::default() }
    }

    /// Members, and those of all before it, do not matter any more.
    pub fn is_forgotten(&self) -> bool {
        self.started.is_some() && self.members.is_empty()
    }
}

impl Past {
    /// Adds one record.
    pub fn add_record(&mut self, record: &Record) {
        match record {
            Record::DataSet(dataset) => self.dataset = Some(dataset.clone()),
            Record::Orders(orders) => self.orders = orders.clone(),
            Record::Spent(spent) => self.spent = spent.clone(),
            Record::Over(end) => self.end = Some(end.clone()),
            Record::Node { place, node_id, host, version } => {
                let (node_id, host, version) = (node_id.clone(), host.clone(), version.clone());
                self.nodes.insert(*place, PastNode { node_id, host, version });
            }
            Record::NodeGone { place } => drop(self.nodes.remove(place)),
            Record::Worker(id, claim) => {
                self.slots.entry(claim.slot).or_default().taken(*id, claim);
            }
            Record::Lost { slot, respawn } => {
                let respawn = respawn.clone();
                self.slots.insert(*slot, PastSlot { respawn, ..PastSlot::default() });
            }
            Record::Left { slot, exit_code } => {
                self.slots.entry(*slot).or_default().left = Some(*exit_code);
            }
            Record::Generation { generation, members } => {
                self.forget_members(*generation, |past| past.started.is_none());
                self.generations.insert(*generation, PastGeneration::formed(members));
                keep_newest(&mut self.generations, MAX_GENERATIONS_KEPT);
            }
            Record::Started { generation, first_step, source } => {
                self.forget_members(*generation, |_| true);
                self.generations.entry(*generation).or_default().started = Some((*first_step, *source));
                self.committed = Some(*first_step);
                self.skipped.split_off(first_step);
            }
            Record::RolledBack(reached) => self.reached = *reached,
            Record::Broken { generation } => self.generations.entry(*generation).or_default().over = true,
            Record::Step(step) => {
                self.committed = Some(Step(step.step.0 + 1));
                self.skipped.extend(step.skipped.as_ref().map(|_| step.step));
            }
            Record::Quarantine(quarantine) => self.quarantine = quarantine.clone(),
            Record::Health(health) => self.health = health.clone(),
            Record::Failure(failure) => self.fault = Some(failure.clone()),
            Record::CachePhase(decided) => {
                self.cache_phases.split_off(&decided.first);
                self.cache_phases.insert(decided.first, *decided);
                keep_newest(&mut self.cache_phases, MAX_CACHE_PHASES);
            }
            Record::CacheGeneration(entry) => {
                self.caches.insert(entry.number, (**entry).clone());
                keep_newest(&mut self.caches, GENERATIONS_KEPT);
            }
        }
    }

    fn forget_members(&mut self, before: Generation, of: impl Fn(&PastGeneration) -> bool) {
        let older = self.generations.range_mut(..before).map(|(_, past)| past).rev();
        for past in older.take_while(|past| !past.is_forgotten()).filter(|past| of(past)) {
            past.members.clear();
        }
    }

    /// The newest membership.
    pub fn newest(&self) -> Option<(Generation, &PastGeneration)> {
        self.generations.last_key_value().map(|(generation, past)| (*generation, past))
    }

    /// The newest membership that has started.
    pub fn started(&self) -> Option<(Generation, &PastGeneration)> {
        let mut started = self.generations.iter().rev().filter(|(_, past)| past.started.is_some());
        started.next().map(|(generation, past)| (*generation, past))
    }

    /// Whether the newest membership that has started committed a step.
    pub fn has_trained(&self) -> bool {
        let first = self.started().and_then(|(_, past)| past.started);
        first.is_some_and(|(first_step, _)| self.committed > Some(first_step))
    }

    /// Leaves out launchers and workers of other versions than this one: with them the world would have two.
    /// They are not known any more, and refused by name when they ask for their places. Where there were
    /// such workers, this is a launch of its own. What is to be recorded of that.
    pub fn leave_out_other_versions(&mut self, version: &str) -> Vec<Record> {
        let nodes = self.nodes.iter().filter(|(_, node)| node.version != version);
        let mut records: Vec<_> = nodes.map(|(place, _)| Record::NodeGone { place: *place }).collect();
        let is_other =
            |past: &PastSlot| past.worker.as_ref().is_some_and(|(_, claim)| claim.origin.version != version);
        let others = self.slots.iter().filter(|(_, past)| is_other(past));
        let lost: Vec<_> = others.map(|(slot, _)| Record::Lost { slot: *slot, respawn: None }).collect();
        if !lost.is_empty() {
            records.extend(lost);
            records.extend([Record::Spent(SpentBudgets::default()), Record::Orders(Orders::default())]);
        }
        records.iter().for_each(|record| self.add_record(record));
        records
    }

    /// What remains when the run is begun again after its end: what was learned, not its workers or their
    /// failures.
    pub fn settled(self) -> Self {
        let generations = self
            .generations
            .into_iter()
            .map(|(generation, past)| (generation, PastGeneration { over: true, ..past }));
        Self {
            dataset: self.dataset,
            generations: generations.collect(),
            committed: self.committed,
            skipped: self.skipped,
            reached: self.reached,
            quarantine: self.quarantine,
            cache_phases: self.cache_phases,
            caches: self.caches,
            ..Self::default()
        }
    }

    /// What remains when the run is begun anew: the numbers that must not be used twice.
    pub fn forgotten(self) -> Self {
        let numbers = self
            .generations
            .into_keys()
            .map(|generation| (generation, PastGeneration { over: true, ..PastGeneration::default() }));
        Self { generations: numbers.collect(), ..Self::default() }
    }
}

/// Forgets the oldest of more than `most`.
fn keep_newest<K: Ord, V>(map: &mut BTreeMap<K, V>, most: usize) {
    while map.len() > most {
        map.pop_first();
    }
}
