//! Launchers: they join, start processes, report their ends until they are heard, and start others when
//! asked.

use std::{
    collections::{BTreeMap, VecDeque},
    time::Duration,
};

use coxswain_coordinator::core::{
    action::Reply,
    event::{Ask, NodeClaim, NodeName, ProcessExit, StreamId},
    refusal::Refusal,
};
use coxswain_proto::{ids::Slot, limits};

use crate::{
    process::Process,
    versions::origin,
    world::{Caller, Happening, ToNode, World},
};

/// A call that nobody has answered is made again.
const RETRY: Duration = Duration::from_millis(250);
/// Starting a process.
const SPAWN: Duration = Duration::from_millis(5);

/// One launcher.
#[derive(Clone, Debug)]
pub struct Node {
    pub place: u32,
    pub version: u32,
    alive: bool,
    launched: Duration,
    lives: u32,
    /// How it joined.
    join: Option<NodeClaim>,
    /// It has started its workers.
    placed: bool,
    /// Name in every call.
    pub id: String,
    calls: VecDeque<Ask>,
    /// The number of the call that waits for its answer.
    waiting: Option<u64>,
    last: u64,
    /// The claim of the coordinator that it calls.
    pub claim: u64,
    /// The number before its first call in this life.
    before: u64,
    line: Option<StreamId>,
    /// It is stopped until then.
    frozen_until: Duration,
    /// What has reached it meanwhile.
    deferred: Vec<ToNode>,
    /// The newest respawn of each slot.
    attempts: BTreeMap<Slot, u32>,
    /// It was asked to drain, and another launcher comes so long after it has gone.
    drained: Option<Duration>,
}

impl Node {
    pub fn new(place: u32) -> Self {
        Self {
            place,
            version: 1,
            alive: false,
            launched: Duration::ZERO,
            lives: 0,
            join: None,
            placed: false,
            id: String::new(),
            calls: VecDeque::new(),
            waiting: None,
            last: 0,
            claim: 1,
            before: 0,
            line: None,
            frozen_until: Duration::ZERO,
            deferred: Vec::new(),
            attempts: BTreeMap::new(),
            drained: None,
        }
    }
}

impl Node {
    /// Whether its process lives.
    pub fn is_there(&self) -> bool {
        self.alive
    }

    /// Whether it does anything.
    pub fn lives(&self, now: Duration) -> bool {
        self.alive && self.frozen_until <= now
    }

    /// Whether a call is of the launcher that lives.
    pub fn made(&self, number: u64) -> bool {
        self.alive && number > self.before
    }
}

impl World {
    /// A launcher starts.
    pub fn launch(&mut self, node: usize) {
        let (workers, now) = (self.script.workers_per_node, self.now);
        let launcher = &mut self.nodes[node];
        if launcher.alive {
            return;
        }
        let (place, lives, last) = (launcher.place, launcher.lives + 1, launcher.last);
        let claim = self.coordinator.claim;
        *launcher = Node {
            claim,
            version: launcher.version,
            alive: true,
            launched: now,
            lives,
            last,
            before: last,
            id: format!("node-{place}-{lives}"),
            ..Node::new(place)
        };
        let claim = NodeClaim {
            origin: origin(launcher.version),
            node_id: launcher.id.clone(),
            // Every second time it is launched on another machine.
            host: format!("host-{place}-{}", lives / 2),
            local_world: workers,
            node_rank: Some(place),
            returns: false,
        };
        launcher.join = Some(claim.clone());
        launcher.calls.push_back(Ask::JoinNode(claim));
        self.next_node_call(node);
    }

    /// Somebody asks for a node to be drained.
    pub fn drain(&mut self, place: u32, back_after: Duration) {
        self.nodes[place as usize].drained = Some(back_after);
        let ask = Ask::Drain { node: NodeName::Place(place), reason: "asked to".into() };
        self.call(Caller::Person, ask);
    }

    /// A launcher whose workers have all left in order while the run goes on is not needed: it ends as soon
    /// as it has said so.
    fn end_drained(&mut self, node: usize) {
        if self.coordinator.is_over() {
            return;
        }
        let slots = self.slots_of(node);
        let left = |pid: &usize| !self.processes[*pid].alive && self.processes[*pid].left_in_order();
        let all_left = slots.iter().all(|slot| self.slots[slot.0 as usize].as_ref().is_some_and(left));
        if let Some(back_after) =
            self.nodes[node].drained.filter(|_| all_left && self.nodes[node].calls.is_empty())
        {
            self.kill_launcher(node, back_after);
        }
    }

    pub fn kill_launcher(&mut self, node: usize, for_time: Duration) {
        if !self.nodes[node].alive {
            return;
        }
        self.nodes[node].alive = false;
        self.close_streams(|caller| matches!(caller, Caller::Node(of, _) if of == node));
        for slot in self.slots_of(node) {
            if let Some(pid) = self.slots[slot.0 as usize] {
                self.end_process(pid, ProcessExit::Signal(9));
            }
        }
        if node == self.coordinator.host {
            self.lose_coordinator(for_time);
            self.may_be_taken();
        }
        self.rival.take_if(|rival| rival.host == node);
        self.after(for_time, Happening::Launch(node));
    }

    /// A launcher is stopped. The server closes its lines, for they owe a sign of life; when it goes on it
    /// hears of each, and of whatever has come meanwhile.
    pub fn freeze_launcher(&mut self, node: usize, until: Duration) {
        let launcher = &mut self.nodes[node];
        if !launcher.alive {
            return;
        }
        launcher.frozen_until = launcher.frozen_until.max(until);
        self.close_streams(|caller| matches!(caller, Caller::Node(of, _) if of == node));
        self.after(until - self.now, Happening::ThawLauncher(node));
    }

    pub fn thaw_launcher(&mut self, node: usize) {
        // Another one may be in its place by now, or it was stopped again.
        if self.nodes[node].frozen_until <= self.now {
            for message in std::mem::take(&mut self.nodes[node].deferred) {
                self.deliver_to_node(node, message);
            }
        }
    }

    pub fn deliver_to_node(&mut self, node: usize, message: ToNode) {
        if !self.nodes[node].alive {
            return;
        }
        if self.nodes[node].frozen_until > self.now {
            return self.nodes[node].deferred.push(message);
        }
        match message {
            ToNode::Answer(number, reply) if self.nodes[node].waiting == Some(number) => {
                self.node_answer(node, reply);
            }
            ToNode::Opened(number, stream) if self.nodes[node].waiting == Some(number) => {
                self.nodes[node].line = self.nodes[node].line.max(Some(stream));
                self.node_answer(node, Ok(Reply::Done));
            }
            ToNode::Answer(..) | ToNode::Opened(..) => {}
            ToNode::Retry(number) => {
                self.node_looks_up(node);
                if self.nodes[node].waiting == Some(number) {
                    self.next_node_call(node);
                }
            }
            ToNode::LineLost(stream) => {
                if self.nodes[node].line == Some(stream) {
                    self.nodes[node].line = None;
                    self.node_looks_up(node);
                    self.open_node_line(node);
                }
            }
            ToNode::Told(stream, respawn) => {
                let launcher = &mut self.nodes[node];
                // The answer that opened the line may be a moment behind what comes down it.
                launcher.line = launcher.line.max(Some(stream));
                let newest = launcher.attempts.entry(respawn.slot).or_default();
                if respawn.attempt > *newest {
                    *newest = respawn.attempt;
                    if let Some(pid) = self.slots[respawn.slot.0 as usize] {
                        self.processes[pid].replaced = true;
                        self.end_process(pid, ProcessExit::Signal(9));
                    }
                    let spawn = ToNode::Spawn(respawn.slot, respawn.attempt);
                    self.after(SPAWN, Happening::Node(node, spawn));
                }
            }
            ToNode::Exited(slot, pid, ended) => {
                let node_id = self.nodes[node].id.clone();
                let pid = u32::try_from(pid).ok();
                self.nodes[node].calls.push_back(Ask::Exit { node_id, slot, pid, ended, sample: None });
                if self.nodes[node].waiting.is_none() {
                    self.next_node_call(node);
                }
            }
            // Two respawns in a row are one process: the launcher would not leave the first one behind.
            ToNode::Spawn(slot, attempt) => {
                if self.nodes[node].attempts.get(&slot) == Some(&attempt) {
                    self.spawn(slot);
                }
            }
        }
    }

    fn node_looks_up(&mut self, node: usize) {
        if self.cuts[node] <= self.now {
            self.nodes[node].claim = self.coordinator.claim;
        }
    }

    fn node_answer(&mut self, node: usize, reply: Result<Reply, Refusal>) {
        let launcher = &mut self.nodes[node];
        launcher.waiting = None;
        match (launcher.calls.pop_front(), reply) {
            (Some(Ask::JoinNode(_)), Ok(_)) => {
                if !std::mem::replace(&mut self.nodes[node].placed, true) {
                    for slot in self.slots_of(node) {
                        self.spawn(slot);
                    }
                }
                self.open_node_line(node);
            }
            // Its line was closed before it heard that there is one.
            (Some(Ask::FollowNode { .. }), Ok(_)) if launcher.line.is_none() => self.open_node_line(node),
            // It was given up: it asks for its place again.
            (Some(Ask::FollowNode { .. }), Err(Refusal::UnknownNode(_))) => {
                let join = self.nodes[node].join.clone().map(|join| NodeClaim { returns: true, ..join });
                self.nodes[node].calls.extend(join.map(Ask::JoinNode));
            }
            // It is told again once the launcher has its place back.
            (Some(exit @ Ask::Exit { .. }), Err(Refusal::UnknownNode(_))) => {
                launcher.calls.push_back(exit);
                launcher.last += 1;
                let number = launcher.last;
                launcher.waiting = Some(number);
                return self.after(RETRY, Happening::Node(node, ToNode::Retry(number)));
            }
            (Some(Ask::JoinNode(_)), Err(refusal @ Refusal::Version { .. })) => {
                return self.launcher_is_refused(node, &refusal);
            }
            // The place may become free, for as long as a launcher that died may be taken to live.
            (Some(call @ Ask::JoinNode(_)), Err(refusal)) => {
                self.nodes[node].calls.push_front(call);
                if !self.may_become_free(node, &refusal) {
                    // The coordinator's time stands while its disk takes seconds, and a launcher's does not.
                    if !self.coordinator.stood_still.is_zero() {
                        return self.launcher_is_refused(node, &refusal);
                    }
                    return self.checker.violated(self.now, format!("node {node} gives up: {refusal}"));
                }
                self.nodes[node].last += 1;
                let number = self.nodes[node].last;
                self.nodes[node].waiting = Some(number);
                return self.after(RETRY, Happening::Node(node, ToNode::Retry(number)));
            }
            _ => {}
        }
        self.next_node_call(node);
        self.end_drained(node);
    }

    /// As the launcher's rendezvous has it: a place that is kept is waited for, one that is taken for a
    /// while.
    fn may_become_free(&self, node: usize, refusal: &Refusal) -> bool {
        match refusal {
            Refusal::PlaceKept { .. } => true,
            Refusal::NodeRankTaken { .. } | Refusal::NodesComplete { .. } => {
                self.now <= self.nodes[node].launched + limits::PLACE_PATIENCE
            }
            // The run is over: a launcher that comes last finds nothing to do.
            _ => true,
        }
    }

    fn open_node_line(&mut self, node: usize) {
        let launcher = &mut self.nodes[node];
        let follow = Ask::FollowNode { node_id: launcher.id.clone(), stream: StreamId(0) };
        if launcher.calls.iter().any(|call| matches!(call, Ask::FollowNode { .. })) {
            return;
        }
        launcher.calls.push_back(follow);
        if launcher.waiting.is_none() {
            self.next_node_call(node);
        }
    }

    /// Makes the first call of the queue, or makes it again.
    fn next_node_call(&mut self, node: usize) {
        let launcher = &mut self.nodes[node];
        launcher.waiting = None;
        let Some(call) = launcher.calls.front().cloned() else { return };
        launcher.last += 1;
        let number = launcher.last;
        launcher.waiting = Some(number);
        let delay = self.delay();
        let claim = self.nodes[node].claim;
        self.after(delay, Happening::Call(claim, Caller::Node(node, number), call));
        self.after(RETRY + delay * 4, Happening::Node(node, ToNode::Retry(number)));
    }

    pub fn slots_of(&self, node: usize) -> Vec<Slot> {
        let workers = self.script.workers_per_node;
        let first = node as u32 * workers;
        (first..first + workers).map(Slot).collect()
    }

    fn spawn(&mut self, slot: Slot) {
        let pid = self.processes.len();
        let node = (slot.0 / self.script.workers_per_node) as usize;
        let version = self.version_at(slot, node);
        self.processes.push(Process::new(pid, slot, &self.nodes[node], version));
        self.slots[slot.0 as usize] = Some(pid);
        self.boot(pid);
    }
}
