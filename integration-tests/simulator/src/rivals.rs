//! Two coordinators at the same time: the machine of one stands still, or is cut off from the others and from
//! the run's directory, a launcher elsewhere takes its role, and then it goes on.
//!
//! A number says which one has the role, as claims do in the run's directory. Each records through the real
//! fence. Callers stay with the coordinator that answers them; if it does not, they look up who has the role.

use std::{sync::atomic::Ordering::SeqCst, time::Duration};

use coxswain_coordinator::core::event::StreamId;

use crate::{
    coordinator::SimulatedCoordinator,
    script::Fault,
    world::{Caller, Happening, World},
};

/// Without a sign of a launcher's life before its role may be taken, and what may be added to that.
const SILENT: Duration = Duration::from_secs(2);
/// From a claim until its coordinator serves.
pub const STARTS: Duration = Duration::from_millis(200);
/// Until a launcher finds that it has lost the role.
const FINDS_OUT: Duration = Duration::from_millis(500);
/// Until a connection ends that carries nothing.
const KEEPALIVE: Duration = Duration::from_secs(2);

impl World {
    /// Does something as the coordinator of which this is true, if there is one.
    pub fn at(&mut self, is: impl Fn(&SimulatedCoordinator) -> bool, then: impl FnOnce(&mut Self)) {
        if is(&self.coordinator) {
            return then(self);
        }
        let Some(rival) = self.rival.take_if(|rival| is(rival)) else { return };
        let newest = std::mem::replace(&mut self.coordinator, rival);
        then(self);
        let rival = std::mem::replace(&mut self.coordinator, newest);
        self.rival = rival.lives().then_some(rival);
    }

    /// Whether somebody else has the role of the coordinator that acts.
    pub fn is_superseded(&self) -> bool {
        self.claims.load(SeqCst) > self.coordinator.claim
    }

    /// A machine stands still, with all that runs there.
    pub fn stop_machine(&mut self, node: usize, fault: &Fault) {
        let until = self.now + fault.lasts();
        for pid in
            self.slots_of(node).iter().filter_map(|slot| self.slots[slot.0 as usize]).collect::<Vec<_>>()
        {
            self.processes[pid].frozen = true;
            self.after(fault.lasts(), Happening::Thaw(pid));
        }
        self.freeze_launcher(node, until);
        if self.coordinator.host == node {
            self.coordinator.stands_still_until(self.now, until);
            self.after(fault.lasts(), Happening::Recorded(self.coordinator.life));
            self.may_be_taken();
        }
    }

    /// Nothing passes between a machine and the others, nor to the directory of the run.
    pub fn cut_machine(&mut self, node: usize, fault: &Fault) {
        self.cuts[node] = self.cuts[node].max(self.now + fault.lasts());
        let split: Vec<_> = self
            .rings
            .iter()
            .filter(|(_, ring)| {
                let away = ring.members.iter().filter(|pid| self.processes[**pid].node != node).count();
                !ring.broken && away > 0 && away < ring.members.len()
            })
            .map(|(generation, _)| *generation)
            .collect();
        split.into_iter().for_each(|generation| self.break_ring(generation, None));
        let host = self.coordinator.host;
        self.lines_end(|world, caller| {
            let of = world.node_of(caller);
            of != host && (of == node || host == node)
        });
        if host == node {
            self.may_be_taken();
        }
    }

    /// Launchers elsewhere see no sign of the coordinator's launcher from now on.
    pub fn may_be_taken(&mut self) {
        if self.script.standby {
            let after = SILENT.mul_f64(1.0 + 0.5 * self.random.unit());
            self.after(after, Happening::TakeOver(self.coordinator.claim));
        }
    }

    /// Somebody looks at the role that has shown no sign of life.
    pub fn take_over(&mut self, claim: u64) {
        let host = self.coordinator.host;
        let stands_still = self.coordinator.frozen_until > self.now;
        let gone = stands_still || self.cuts[host] > self.now || !self.nodes[host].lives(self.now);
        if !gone || self.coordinator.claim != claim || self.successor(host).is_none() {
            return;
        }
        if stands_still && self.random.chance(0.3) {
            // Its claim comes while the other one, which has woken up, writes a record.
            let operations = self.random.below(8);
            if let Some(storage) = &self.coordinator.storage {
                storage.disk.breaks(|of| of.taken_after = Some(operations));
            }
            return;
        }
        self.claims.store(claim + 1, SeqCst);
        self.after(STARTS, Happening::Succeed(claim));
    }

    /// A launcher that can take the role.
    fn successor(&self, host: usize) -> Option<usize> {
        (0..self.nodes.len())
            .find(|node| *node != host && self.nodes[*node].lives(self.now) && self.cuts[*node] <= self.now)
    }

    /// The coordinator of the newest claim comes, in place of the one before.
    pub fn succeed(&mut self, claim: u64) {
        let host = self.coordinator.host;
        if self.coordinator.claim != claim {
            return;
        }
        let Some(node) = self.successor(host) else {
            // The launcher that has the claim is gone with it: another one looks.
            return self.after(SILENT, Happening::Succeed(claim));
        };
        let wakes = self.coordinator.frozen_until.max(self.cuts[host]);
        self.lines_end(|world, caller| world.node_of(caller) != host);
        let launcher = self.nodes[host].id.clone();
        let successor = self.coordinator.successor(self.claims.load(SeqCst), node, launcher, self.now);
        let old = std::mem::replace(&mut self.coordinator, successor);
        self.checker.says(self.now, format!("node {node} takes the coordinator over"));
        self.rival = old.lives().then_some(old);
        if self.nodes[host].is_there() {
            self.after(wakes.saturating_sub(self.now) + FINDS_OUT, Happening::RoleLost(host, claim));
        }
        self.recall();
    }

    /// A launcher finds that it has lost the role, and ends with its workers.
    pub fn role_lost(&mut self, host: usize, claim: u64) {
        if self.rival.as_ref().is_some_and(|rival| rival.claim <= claim) {
            self.rival = None;
        }
        self.kill_launcher(host, Duration::from_secs(1));
    }

    /// Connections that carry nothing end for both sides.
    fn lines_end(&mut self, of: impl Fn(&Self, Caller) -> bool) {
        let life = self.coordinator.life;
        let lines: Vec<(StreamId, Caller)> = self
            .coordinator
            .lines()
            .filter(|(_, caller)| !matches!(caller, Caller::Person) && of(self, *caller))
            .collect();
        for (line, caller) in lines {
            self.after(KEEPALIVE, Happening::Closed(life, caller, line));
            self.lose_line(caller, line, KEEPALIVE);
        }
    }

    pub fn node_of(&self, caller: Caller) -> usize {
        match caller {
            Caller::Process(pid, _) => self.processes[pid].node,
            Caller::Node(node, _) => node,
            Caller::Person => self.coordinator.host,
        }
    }

    /// Whether nothing passes between a machine and the coordinator's.
    pub fn is_apart(&self, node: usize) -> bool {
        let host = self.coordinator.host;
        node != host && self.cuts[node].max(self.cuts[host]) > self.now
    }
}
