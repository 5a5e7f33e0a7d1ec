//! The event queue, and what happens to the run from outside.

use std::{
    cmp::Reverse,
    collections::{BTreeMap, BTreeSet, BinaryHeap},
    sync::{Arc, atomic::AtomicU64},
    time::Duration,
};

use coxswain_coordinator::core::{
    action::{Directive, Reply},
    event::{Ask, ProcessExit, StreamId},
    refusal::Refusal,
    roster::Respawn,
};
use coxswain_proto::ids::{Generation, Slot};

use crate::{
    checker::Checker,
    coordinator::SimulatedCoordinator,
    flood::Flood,
    node::Node,
    process::Process,
    random::Random,
    report::Report,
    ring::Ring,
    script::{Fault, Kind, Place, Script},
};

/// A simulation that has not ended after so much virtual time has hung.
const LIMIT: Duration = Duration::from_secs(4 * 3600);

/// Everything.
pub struct World {
    pub script: Script,
    pub now: Duration,
    pub random: Random,
    queue: BinaryHeap<Reverse<(Duration, u64)>>,
    happenings: BTreeMap<u64, Happening>,
    scheduled: u64,
    /// The newest one; or the one that acts now.
    pub coordinator: SimulatedCoordinator,
    /// One that has lost the role and lives.
    pub rival: Option<SimulatedCoordinator>,
    /// The number of the newest claim to the role.
    pub claims: Arc<AtomicU64>,
    /// Clients that only read, while there are many.
    pub flood: Option<Flood>,
    /// Until when each machine is cut off.
    pub cuts: Vec<Duration>,
    pub processes: Vec<Process>,
    /// The newest process of each slot.
    pub slots: Vec<Option<usize>>,
    pub nodes: Vec<Node>,
    /// Whose next process stands still before it has made itself known.
    pub stuck: BTreeSet<Slot>,
    pub rings: BTreeMap<Generation, Ring>,
    /// Until when processes that come at a slot are of another version than their launcher.
    pub upgraded: BTreeMap<Slot, Duration>,
    /// Steps of complete checkpoints; those that cannot be read, and those that a loss of power may damage.
    pub disk: BTreeSet<u64>,
    pub damaged: BTreeSet<u64>,
    pub flimsy: BTreeSet<u64>,
    /// Why the run cannot go on, though its coordinator does not live to say so.
    pub refused: Option<String>,
    pub checker: Checker,
}

/// One thing that happens at a moment.
#[derive(Clone, Debug)]
pub enum Happening {
    /// The coordinator's deadline, in one of its lives.
    Tick(u32),
    /// The coordinator is there again.
    Recall,
    /// What a coordinator waited for is on its disk, in one of its lives.
    Recorded(u32),
    /// One of the script's faults.
    Fault(usize),
    /// A call reaches the coordinator with this claim, and then its driver.
    Call(u64, Caller, Ask),
    Heard(u64, Caller, Ask),
    /// A connection of those who only read has sent something; the driver looks for all of them.
    Read(usize),
    LookForReaders,
    /// A worker's line ends, as the coordinator sees it, in one of its lives.
    Closed(u32, Caller, StreamId),
    /// Something reaches a process.
    Process(usize, ToProcess),
    /// A process goes on after a freeze.
    Thaw(usize),
    /// Something reaches a launcher.
    Node(usize, ToNode),
    /// A launcher goes on after a freeze.
    ThawLauncher(usize),
    /// Another launcher comes.
    Launch(usize),
    /// The launcher of the coordinator with this claim has shown no sign of life for a while.
    TakeOver(u64),
    /// A coordinator comes in place of the one with this claim.
    Succeed(u64),
    /// A launcher finds that the claim of its coordinator is not the newest.
    RoleLost(usize, u64),
}

/// Whose call it is: a process or a launcher, and its number there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Caller {
    Process(usize, u64),
    Node(usize, u64),
    /// Somebody at a terminal, who does not wait for the answer.
    Person,
}

/// What reaches a process.
#[derive(Clone, Debug)]
pub enum ToProcess {
    Booted,
    Answer(u64, Result<Reply, Refusal>),
    /// Call opened this line.
    Opened(u64, StreamId),
    Retry(u64),
    Beat,
    Reopen,
    Told(StreamId, Directive),
    LineLost(StreamId),
    /// What the trainer waited for by itself is over.
    Done(u64),
    Collected(Generation, u64),
    PeerLost(Generation),
    /// A worker that was told that the run is over waits no longer for its good-bye to be heard.
    GiveUp,
}

/// What reaches a launcher.
#[derive(Clone, Debug)]
pub enum ToNode {
    Answer(u64, Result<Reply, Refusal>),
    /// Call opened this line.
    Opened(u64, StreamId),
    Retry(u64),
    Told(StreamId, Respawn),
    LineLost(StreamId),
    Exited(Slot, usize, ProcessExit),
    /// The process that it was asked for by the respawn of this number.
    Spawn(Slot, u32),
}

impl World {
    pub fn new(script: Script) -> Self {
        let slots = script.slots() as usize;
        let claims = Arc::new(AtomicU64::new(1));
        let mut world = Self {
            now: Duration::ZERO,
            random: Random::new(script.seed),
            queue: BinaryHeap::new(),
            happenings: BTreeMap::new(),
            scheduled: 0,
            coordinator: SimulatedCoordinator::first(&script, &claims),
            rival: None,
            claims,
            flood: None,
            cuts: vec![Duration::ZERO; script.nodes as usize],
            processes: Vec::new(),
            slots: vec![None; slots],
            nodes: (0..script.nodes).map(Node::new).collect(),
            stuck: BTreeSet::new(),
            upgraded: BTreeMap::new(),
            rings: BTreeMap::new(),
            disk: BTreeSet::new(),
            damaged: BTreeSet::new(),
            flimsy: BTreeSet::new(),
            refused: None,
            checker: Checker::new(&script),
            script,
        };
        for node in 0..world.nodes.len() {
            let delay = world.delay();
            world.after(delay, Happening::Launch(node));
        }
        for fault in 0..world.script.faults.len() {
            let at = Duration::from_secs_f64(world.script.faults[fault].at_s);
            world.after(at, Happening::Fault(fault));
        }
        world
    }

    /// Runs until the coordinator has seen the end, or nothing can happen any more.
    pub fn play(mut self) -> Report {
        while let Some(Reverse((at, number))) = self.queue.pop() {
            let Some(happening) = self.happenings.remove(&number) else { continue };
            self.now = at;
            self.happen(happening);
            if let Some(outcome) = self.coordinator.outcome() {
                return self.checker.close(self.now, outcome, &self.script);
            }
            if let Some(why) = self.refused.take() {
                return self.checker.refuses(self.now, why, &self.script);
            }
            if self.now > LIMIT || !self.checker.violations.is_empty() {
                break;
            }
        }
        let state = self.coordinator.state();
        self.checker.hung(self.now, &state, &self.script)
    }

    /// Makes something happen later.
    pub fn after(&mut self, delay: Duration, happening: Happening) {
        self.scheduled += 1;
        self.happenings.insert(self.scheduled, happening);
        self.queue.push(Reverse((self.now + delay, self.scheduled)));
    }

    /// A message's time on the network.
    pub fn delay(&mut self) -> Duration {
        let network = self.script.network;
        let ms = network.delay_ms + network.jitter_ms * self.random.unit();
        Duration::from_secs_f64(ms / 1e3)
    }

    fn happen(&mut self, happening: Happening) {
        match happening {
            Happening::Tick(life) => self.at(|of| of.life == life, |world| world.tick(life)),
            Happening::Recall => self.recall(),
            Happening::Recorded(life) => self.at(|of| of.life == life, |world| world.written(life)),
            Happening::TakeOver(claim) => self.take_over(claim),
            Happening::Succeed(claim) => self.succeed(claim),
            Happening::RoleLost(node, claim) => self.role_lost(node, claim),
            Happening::Fault(fault) => self.fault(&self.script.faults[fault].clone()),
            Happening::Call(claim, caller, ask) => {
                let (waits, heard) = (self.wait(), Happening::Heard(claim, caller, ask));
                if waits.is_zero() { self.happen(heard) } else { self.after(waits, heard) }
            }
            Happening::Heard(claim, caller, ask) => {
                self.at(|of| of.claim == claim, |world| world.call(caller, ask));
            }
            Happening::Read(connection) => self.read(connection),
            Happening::LookForReaders => self.look_for_readers(),
            Happening::Closed(life, caller, stream) => {
                self.at(|of| of.life == life, |world| world.closed(life, caller, stream));
            }
            Happening::Process(pid, message) => self.deliver_to_process(pid, message),
            Happening::Thaw(pid) => self.thaw(pid),
            Happening::Node(node, message) => self.deliver_to_node(node, message),
            Happening::ThawLauncher(node) => self.thaw_launcher(node),
            Happening::Launch(node) => self.launch(node),
        }
    }

    fn fault(&mut self, fault: &Fault) {
        let until = self.now + fault.lasts();
        let victim = self.slots[fault.rank as usize].filter(|pid| self.processes[*pid].alive);
        match (fault.what, victim) {
            (Kind::KillCoordinator, _) => self.kill_coordinator(fault.lasts()),
            (Kind::KillLauncher, _) => self.kill_launcher(fault.node as usize, fault.lasts()),
            (Kind::FreezeLauncher, _) => self.freeze_launcher(fault.node as usize, until),
            (Kind::RebuildCache, _) => self.call(Caller::Person, Ask::RebuildCache),
            (Kind::Flood, _) => self.flood(fault.factor as usize, fault.lasts()),
            (Kind::UpgradeLauncher, _) => self.upgrade_launcher(fault.node as usize, fault.lasts()),
            (Kind::UpgradeWorker, _) => self.upgrade_worker(Slot(fault.rank), until, victim),
            (Kind::Drain, _) => self.drain(fault.node, fault.lasts()),
            (Kind::StopMachine, _) => self.stop_machine(fault.node as usize, fault),
            (Kind::CutMachine, _) => self.cut_machine(fault.node as usize, fault),
            (kind, _) if kind.is_of_storage() => self.storage_fault(fault),
            (Kind::Hang, _) if fault.phase == Some(Place::Start) => {
                self.stuck.insert(Slot(fault.rank));
            }
            (_, None) => return,
            (Kind::Kill, Some(pid)) => self.end_process(pid, ProcessExit::Signal(9)),
            (Kind::Freeze, Some(pid)) => {
                self.processes[pid].frozen = true;
                self.after(fault.lasts(), Happening::Thaw(pid));
            }
            (Kind::Hang, Some(pid)) => match fault.phase {
                Some(place) => self.processes[pid].hangs_in = Some(place.phase()),
                None => self.processes[pid].hung = true,
            },
            (Kind::Slow, Some(pid)) => self.processes[pid].slow = (until, fault.factor),
            (Kind::Skew, Some(pid)) => self.processes[pid].beat_factor = fault.factor,
            (Kind::Slip, Some(pid)) => self.slips(pid),
            (Kind::Broken, Some(pid)) => self.is_broken(pid),
            (Kind::Partition, Some(pid)) => self.processes[pid].unreachable_until = until,
            (Kind::CutLine, Some(pid)) => self.cut_line(pid),
            (Kind::CutRing, Some(pid)) => {
                let generation = self.processes[pid].standing.generation();
                self.break_ring(generation, None);
            }
            // Met above.
            _ => {}
        }
        self.checker.fault(self.now, fault);
    }

    fn thaw(&mut self, pid: usize) {
        self.processes[pid].frozen = false;
        for message in std::mem::take(&mut self.processes[pid].deferred) {
            self.deliver_to_process(pid, message);
        }
    }
}
