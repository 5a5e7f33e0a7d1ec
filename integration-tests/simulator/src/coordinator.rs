//! The coordinator: the real core, what it has recorded, and the lines that are open to it.

mod recording;

use std::{
    collections::{BTreeMap, HashMap},
    sync::{Arc, atomic::AtomicU64},
    time::Duration,
};

use coxswain_coordinator::{
    Budgets, Outcome, Patience, World as Nodes,
    core::{
        action::{Action, Directive},
        checkpoints::CheckpointEntry,
        event::{Ask, Event, StreamId, Ticket},
        machine::{Config, Machine},
        past::Past,
        reason::RunPhase,
        time::Timestamp,
    },
    journal::Life,
};
use coxswain_proto::{
    ids::{Bytes, Step, WorkerId},
    report::CheckpointState,
    run_spec::{Cache, CacheMode, Faults, Recompute, Span, Train},
};

use recording::Recording;

use crate::{
    ring::Ring,
    rivals::STARTS,
    script::{CachePhases, Script},
    storage::Storage,
    versions::name,
    world::{Caller, Happening, ToNode, ToProcess, World},
};

/// The run, in every call that names it.
pub const RUN: &str = "simulated";

/// Complete checkpoints that stay on disk.
pub const KEPT_CHECKPOINTS: usize = 2;

/// The coordinator.
pub struct SimulatedCoordinator {
    pub config: Config,
    machine: Option<Machine>,
    past: Past,
    pub life: u32,
    /// The number of its claim to the role, and the node whose launcher keeps it.
    pub claim: u64,
    pub host: usize,
    /// Machine stands still until then.
    pub frozen_until: Duration,
    tickets: HashMap<Ticket, Caller>,
    last: u64,
    streams: BTreeMap<StreamId, Caller>,
    /// The launchers that opened lines, by the name they had then.
    launchers: HashMap<StreamId, String>,
    /// When the last directive of a line arrives: a line keeps their order.
    arrivals: HashMap<StreamId, Duration>,
    ticks: Option<Duration>,
    events: u64,
    /// The next coordinator is a new launch's, not one that its launcher starts again.
    pub new_launch: bool,
    /// Journal, where that lies on a disk that fails; else records are kept as they are.
    pub storage: Option<Storage>,
    /// What waits for the disk.
    recording: Option<Recording>,
    /// When it is recorded.
    due: Duration,
    /// What has come in meanwhile.
    inbox: Vec<Event>,
    /// Since when it cannot hear; and for how long it could not before, which is held against nobody.
    deaf_since: Option<Duration>,
    pub stood_still: Duration,
    /// Processes by the name that the coordinator gave them.
    pub workers: HashMap<WorkerId, usize>,
}

impl SimulatedCoordinator {
    /// The first one of a run.
    pub fn first(script: &Script, claims: &Arc<AtomicU64>) -> Self {
        let config = config(script);
        let mut storage = Storage::of(script, claims);
        if let Some(storage) = &mut storage {
            storage.open(Duration::ZERO, Life::Again).expect("nothing is wrong with the disk yet");
        }
        Self {
            machine: Some(Machine::new(Timestamp::default(), config.clone())),
            ..Self::idle(config, storage)
        }
    }

    /// The next one, on another node, in place of this one and its launcher; it has read nothing yet.
    pub fn successor(&self, claim: u64, host: usize, launcher: String, now: Duration) -> Self {
        let config = Config { in_place_of: Some(launcher), ..self.config.clone() };
        let storage = self.storage.as_ref().map(|storage| storage.inherited(claim));
        let untold = self.recording.as_ref().map(|untold| untold.records.clone());
        Self {
            past: self.past.clone(),
            recording: untold.map(|records| Recording { records, actions: Vec::new() }),
            // Numbers that the two do not share.
            life: self.life + 1000,
            last: self.last + 1_000_000,
            claim,
            host,
            stood_still: now,
            workers: self.workers.clone(),
            ..Self::idle(config, storage)
        }
    }

    fn idle(config: Config, storage: Option<Storage>) -> Self {
        Self {
            config,
            machine: None,
            past: Past::default(),
            life: 1,
            claim: 1,
            host: 0,
            frozen_until: Duration::ZERO,
            tickets: HashMap::new(),
            last: 0,
            streams: BTreeMap::new(),
            launchers: HashMap::new(),
            arrivals: HashMap::new(),
            ticks: None,
            events: 0,
            new_launch: false,
            storage,
            recording: None,
            due: Duration::ZERO,
            inbox: Vec::new(),
            deaf_since: None,
            stood_still: Duration::ZERO,
            workers: HashMap::new(),
        }
    }

    pub fn lives(&self) -> bool {
        self.machine.is_some()
    }

    /// Machine stands still from now on; nothing of that time is held against anybody.
    pub fn stands_still_until(&mut self, now: Duration, until: Duration) {
        self.deaf_since.get_or_insert(now);
        self.frozen_until = self.frozen_until.max(until);
    }

    fn hears_again(&mut self, now: Duration) {
        let since = self.deaf_since.take().unwrap_or(now);
        self.stood_still += now - since;
    }

    /// Lines that are open to it.
    pub fn lines(&self) -> impl Iterator<Item = (StreamId, Caller)> {
        self.streams.iter().map(|(line, caller)| (*line, *caller))
    }

    /// Nothing counts that is not recorded.
    pub fn outcome(&self) -> Option<Outcome> {
        self.machine.as_ref().filter(|_| self.recording.is_none())?.outcome()
    }

    /// The core's time.
    fn time(&self, now: Duration) -> Timestamp {
        Timestamp::at(now - self.stood_still)
    }

    /// Whether it has decided that the run is over.
    pub fn is_over(&self) -> bool {
        let phase = self.machine.as_ref().map(Machine::run_phase);
        matches!(phase, Some(RunPhase::Finished | RunPhase::Failed))
    }

    /// Somebody looks at the machine, unless it waits for its disk or stands still.
    pub fn shows(&mut self, now: Duration, look: impl FnOnce(&mut Machine, Timestamp)) -> bool {
        let (time, is_deaf) = (self.time(now), self.recording.is_some() || self.frozen_until > now);
        let Some(machine) = self.machine.as_mut().filter(|_| !is_deaf) else { return false };
        look(machine, time);
        true
    }

    /// Where the run is, in a line.
    pub fn state(&self) -> String {
        match &self.machine {
            Some(machine) => format!("{} after {} steps", machine.run_phase(), machine.committed()),
            None => "the coordinator is dead".into(),
        }
    }
}

fn on_disk(step: u64) -> CheckpointEntry {
    let path = format!("checkpoints/step-{step}");
    CheckpointEntry { step: Step(step), path, bytes: Bytes(0), state: CheckpointState::Complete }
}

fn cache(cache_phases: CachePhases) -> Cache {
    let steps = |steps| Span { epochs: None, steps: Some(steps) };
    let (interval, live) = (steps(cache_phases.interval), steps(cache_phases.live));
    Cache { mode: CacheMode::Periodic, interval, live, ..Cache::default() }
}

fn config(script: &Script) -> Config {
    Config {
        run_id: RUN.into(),
        version: name(1),
        train: Train {
            steps: Some(script.steps),
            epochs: None,
            global_batch: usize::try_from(script.global_batch).unwrap_or(usize::MAX),
            micro_batch: 1,
            auto_micro_batch: false,
            recompute: Recompute::None,
            checkpoint_every: 0,
            keep_checkpoints: KEPT_CHECKPOINTS,
            log_every: 1,
            max_skipped: 10,
            max_left_out: 0.05,
            spike: Default::default(),
            spike_factor: 20.0,
            skip_steps: Vec::new(),
            resume: true,
            init_from: None,
            init_digest: None,
            base_digest: None,
        },
        cache: script.cache.map_or_else(Cache::default, cache),
        faults: Faults {
            replica: script.replica,
            cordon_after: 2,
            replace_slow: script.replace_slow,
            ..Faults::default()
        },
        world: Nodes {
            min_nodes: script.min_nodes.unwrap_or(script.nodes),
            max_nodes: script.nodes,
            nproc_per_node: script.workers_per_node,
            spares: script.spares,
        },
        patience: Patience::default(),
        budgets: Budgets { restarts: script.max_restarts, rescales: None },
        seed: 0,
        life: 1,
        restarted: true,
        in_place_of: None,
        past: Past::default(),
        checkpoints: Vec::new(),
        skipped: Default::default(),
    }
}

impl World {
    /// A call arrives; nobody hears it if the coordinator is dead.
    pub fn call(&mut self, caller: Caller, mut ask: Ask) {
        if self.coordinator.machine.is_none() || !self.reachable(caller) {
            return;
        }
        self.coordinator.last += 1;
        let (ticket, line) = (Ticket(self.coordinator.last), StreamId(self.coordinator.last));
        if let Ask::FollowNode { node_id, .. } = &ask {
            self.coordinator.launchers.insert(line, node_id.clone());
        }
        match &mut ask {
            Ask::Follow { stream, .. } | Ask::FollowNode { stream, .. } => {
                *stream = line;
                self.coordinator.streams.insert(line, caller);
            }
            _ => {}
        }
        self.coordinator.tickets.insert(ticket, caller);
        self.deliver(Event::Asked(ticket, ask));
        // The connection of somebody who died while its call was under way ends as well.
        if self.coordinator.streams.contains_key(&line) && !self.lives(caller) {
            let (life, delay) = (self.coordinator.life, self.delay());
            self.after(delay, Happening::Closed(life, caller, line));
        }
    }

    /// A line was closed by the other side.
    pub fn closed(&mut self, life: u32, caller: Caller, stream: StreamId) {
        if life != self.coordinator.life || self.coordinator.streams.remove(&stream).is_none() {
            return;
        }
        match caller {
            Caller::Process(pid, _) => {
                if let Some(worker) = self.processes[pid].id {
                    self.deliver(Event::LineClosed(worker, stream));
                }
            }
            Caller::Person => {}
            Caller::Node(node, _) => {
                if let Some(launcher) = self.coordinator.launchers.remove(&stream) {
                    self.deliver(Event::NodeLineClosed(launcher, stream));
                }
                if self.nodes[node].is_there() {
                    let delay = self.in_order(stream);
                    self.lose_line(caller, stream, delay);
                }
            }
        }
    }

    pub fn tick(&mut self, life: u32) {
        if life == self.coordinator.life && self.coordinator.ticks == Some(self.now) {
            self.coordinator.ticks = None;
            self.deliver(Event::Tick);
        }
    }

    /// The end of a process is the end of its connections.
    pub fn close_streams(&mut self, of: impl Fn(Caller) -> bool) {
        let life = self.coordinator.life;
        let streams: Vec<_> = self.coordinator.streams.iter().filter(|(_, caller)| of(**caller)).collect();
        let streams: Vec<_> = streams.into_iter().map(|(stream, caller)| (*stream, *caller)).collect();
        for (stream, caller) in streams {
            let delay = self.delay();
            self.after(delay, Happening::Closed(life, caller, stream));
        }
    }

    /// A line breaks without anybody's death.
    pub fn cut_line(&mut self, pid: usize) {
        if let Some(stream) = self.processes[pid].line {
            self.close_streams(|caller| matches!(caller, Caller::Process(of, _) if of == pid));
            let delay = self.in_order(stream);
            self.after(delay, Happening::Process(pid, ToProcess::LineLost(stream)));
        }
    }

    pub fn kill_coordinator(&mut self, for_time: Duration) {
        if self.coordinator.machine.take().is_none() {
            return;
        }
        self.coordinator.life += 1;
        self.coordinator.ticks = None;
        self.coordinator.tickets.clear();
        self.coordinator.inbox.clear();
        (self.coordinator.due, self.coordinator.deaf_since) = (Duration::ZERO, None);
        if let Some(storage) = &mut self.coordinator.storage {
            storage.drop_journal();
        }
        for (stream, caller) in std::mem::take(&mut self.coordinator.streams) {
            let delay = self.in_order(stream);
            self.lose_line(caller, stream, delay);
        }
        if !self.is_superseded() {
            self.after(for_time, Happening::Recall);
        } else if self.coordinator.storage.as_ref().is_some_and(|storage| storage.disk.has_been_taken()) {
            // A launcher claimed its role while it wrote, whether it noticed that or not.
            self.after(STARTS, Happening::Succeed(self.coordinator.claim));
        }
    }

    /// The launcher that keeps the coordinator has died, and another will be launched.
    pub fn lose_coordinator(&mut self, for_time: Duration) {
        self.coordinator.new_launch = true;
        self.kill_coordinator(for_time);
    }

    fn carry_out(&mut self, action: Action) {
        match action {
            Action::Record(_) => {}
            Action::Publish(news) => self.checker.news(self.now, &news),
            Action::Reply(ticket, reply) => {
                let Some(caller) = self.coordinator.tickets.remove(&ticket) else { return };
                if self.random.chance(self.script.network.lost_answers) || !self.reachable(caller) {
                    return;
                }
                // The line that a call opens has the number of its ticket.
                let line = StreamId(ticket.0);
                let opened = reply.is_ok() && self.coordinator.streams.contains_key(&line);
                let delay = if opened { self.in_order(line) } else { self.delay() };
                self.after(
                    delay,
                    match caller {
                        Caller::Process(pid, number) if opened => {
                            Happening::Process(pid, ToProcess::Opened(number, line))
                        }
                        Caller::Process(pid, number) => {
                            Happening::Process(pid, ToProcess::Answer(number, reply))
                        }
                        Caller::Node(node, number) if opened => {
                            Happening::Node(node, ToNode::Opened(number, line))
                        }
                        Caller::Node(node, number) => Happening::Node(node, ToNode::Answer(number, reply)),
                        Caller::Person => return,
                    },
                );
            }
            Action::Tell(stream, directive) => self.tell(stream, directive),
            Action::TellNode(stream, respawn) => {
                let caller = self.coordinator.streams.get(&stream).copied();
                if let Some(Caller::Node(node, _)) = caller.filter(|caller| self.reachable(*caller)) {
                    let delay = self.in_order(stream);
                    self.after(delay, Happening::Node(node, ToNode::Told(stream, respawn)));
                }
            }
            Action::Close(stream) => {
                if let Some(caller) = self.coordinator.streams.remove(&stream) {
                    let delay = self.in_order(stream);
                    self.lose_line(caller, stream, delay);
                }
            }
        }
    }

    fn tell(&mut self, stream: StreamId, directive: Directive) {
        let Some(caller @ Caller::Process(pid, _)) = self.coordinator.streams.get(&stream).copied() else {
            return;
        };
        if let Directive::Lease(lease) = &directive {
            self.checker.leased(self.now, lease);
        }
        if let Directive::Assignment(assignment, _) = &directive {
            if assignment.closing {
                self.checker.closes(assignment.generation);
            }
            let workers = &self.coordinator.workers;
            let members = assignment.members.iter().map(|member| workers[&member.worker]).collect();
            self.rings.entry(assignment.generation).or_insert_with(|| Ring::new(members));
        }
        if self.reachable(caller) {
            let delay = self.in_order(stream);
            self.after(delay, Happening::Process(pid, ToProcess::Told(stream, directive)));
        } else {
            // What cannot be sent breaks the connection in the end.
            self.cut_line(pid);
        }
    }

    /// A delay that does not overtake what was sent down the line before.
    fn in_order(&mut self, stream: StreamId) -> Duration {
        let at = self.now + self.delay();
        let arrival = self.coordinator.arrivals.entry(stream).or_default();
        *arrival = at.max(*arrival + Duration::from_nanos(1));
        *arrival - self.now
    }

    pub fn lose_line(&mut self, caller: Caller, stream: StreamId, delay: Duration) {
        self.after(
            delay,
            match caller {
                Caller::Process(pid, _) => Happening::Process(pid, ToProcess::LineLost(stream)),
                Caller::Node(node, _) => Happening::Node(node, ToNode::LineLost(stream)),
                Caller::Person => return,
            },
        );
    }

    fn lives(&self, caller: Caller) -> bool {
        match caller {
            Caller::Process(pid, _) => self.processes[pid].alive,
            Caller::Node(node, number) => self.nodes[node].made(number),
            Caller::Person => true,
        }
    }

    fn reachable(&self, caller: Caller) -> bool {
        match caller {
            Caller::Process(pid, _) => {
                let process = &self.processes[pid];
                process.unreachable_until <= self.now && !self.is_apart(process.node)
            }
            Caller::Node(node, _) => !self.is_apart(node),
            Caller::Person => true,
        }
    }
}
