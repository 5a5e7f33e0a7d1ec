//! Two versions of the program in one run: a launcher comes back as another one, or its workers do. They are
//! refused by name; no generation has both.

use std::time::Duration;

use coxswain_coordinator::core::{
    action::Record,
    event::{Origin, ProcessExit},
    refusal::Refusal,
};
use coxswain_proto::ids::{Slot, WorkerId};

use crate::world::World;

/// Until a person has read why a launcher was refused, and has launched it again, as the coordinator's
/// version.
const PERSON: Duration = Duration::from_secs(5);

/// A version as the coordinator compares it.
pub fn name(version: u32) -> String {
    format!("0.{version}.0")
}

/// The origin of a caller that knows no run yet.
pub fn origin(version: u32) -> Origin {
    Origin { version: name(version), run_id: String::new() }
}

impl World {
    /// The launcher at a node is replaced by one of another version, and with it a coordinator there.
    pub fn upgrade_launcher(&mut self, node: usize, for_time: Duration) {
        if self.nodes[node].is_there() {
            self.nodes[node].version += 1;
            self.kill_launcher(node, for_time);
        }
    }

    /// Processes that come at a slot are of another version for a while.
    pub fn upgrade_worker(&mut self, slot: Slot, until: Duration, victim: Option<usize>) {
        self.upgraded.insert(slot, until);
        if let Some(pid) = victim {
            self.end_process(pid, ProcessExit::Signal(9));
        }
    }

    /// The version of the next process at a slot.
    pub fn version_at(&self, slot: Slot, node: usize) -> u32 {
        let is_another = self.upgraded.get(&slot).is_some_and(|until| self.now < *until);
        self.nodes[node].version + u32::from(is_another)
    }

    /// A launcher may not come in: it ends, and somebody launches the version that it was told.
    pub fn launcher_is_refused(&mut self, node: usize, refusal: &Refusal) {
        self.checker.says(self.now, format!("the launcher of node {node} ends: {refusal}"));
        self.nodes[node].version = self.nodes[self.coordinator.host].version;
        self.kill_launcher(node, PERSON);
    }

    /// A worker may not come in.
    pub fn worker_is_refused(&mut self, pid: usize, refusal: &Refusal) {
        let slot = self.processes[pid].slot;
        self.checker.says(self.now, format!("rank {slot} ends: {refusal}"));
    }

    /// Any rank that joins, and all that train together, are of the coordinator's version.
    pub fn look_at_versions(&mut self, record: &Record) {
        let ours = &self.coordinator.config.version;
        let version_of = |worker: &WorkerId| {
            let pid = self.coordinator.workers.get(worker);
            pid.map(|pid| name(self.processes[*pid].version))
        };
        let other = match record {
            Record::Worker(id, _) => version_of(id).filter(|version| version != ours),
            Record::Generation { members, .. } => {
                let mut versions = members.iter().filter_map(|(_, worker)| version_of(worker));
                versions.find(|version| version != ours)
            }
            _ => return,
        };
        if let Some(theirs) = other {
            let problem = format!("a worker of version {theirs} is let in by a coordinator of {ours}");
            self.checker.violated(self.now, problem);
        }
    }
}
