//! Transcripts of the core: events in, expected actions out. No clock but the one in `At`.

mod cache;
mod closing;
mod control;
mod draining;
mod elastic;
mod ends;
mod failures;
mod health;
mod hostile;
mod launchers;
mod launching;
mod mortal;
mod node;
mod random;
mod recall;
mod recovery;
mod relaunch;
mod rendezvous;
mod samples;
mod seen;
mod spares;
mod standstill;
mod training;

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use coxswain_proto::{
    ids::{Bytes, Generation, Rank, Slot, Step, WorkerId},
    plan::Plan,
    run_spec::{Cache, Faults, Recompute, Train},
};

use seen::{news, phases, respawns, told};

use super::{
    action::{Action, Directive, Reply},
    event::{
        Ask, Beat, DataSet, Event, NodeClaim, Origin, Readiness, StartReport, StreamId, Ticket, WorkerClaim,
    },
    machine::{Config, Machine},
    memory::MemoryReport,
    news::News,
    past::Past,
    reason::RunPhase,
    refusal::Refusal,
    report::{CacheUse, StateSource, StepReport, StepTimes, Totals, WorkerPhase},
    time::Timestamp,
};
use crate::options::{Budgets, Patience, World};

const RUN: &str = "row-1";
const NODE: &str = "n";
const VERSION: &str = "1.2.3";

fn train() -> Train {
    Train {
        steps: Some(100),
        epochs: None,
        global_batch: 8,
        micro_batch: 2,
        auto_micro_batch: false,
        recompute: Recompute::None,
        checkpoint_every: 0,
        keep_checkpoints: 2,
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
    }
}

fn dataset() -> DataSet {
    DataSet { training_samples: 30, fingerprint: "f00d".into(), order_key: 5, sets: Vec::new() }
}

pub(crate) fn config(world: u32) -> Config {
    Config {
        run_id: RUN.into(),
        version: VERSION.into(),
        train: train(),
        cache: Cache::default(),
        faults: Faults { replica: true, cordon_after: 2, ..Faults::default() },
        world: World::fixed(1, world),
        patience: Patience {
            rendezvous: Duration::from_secs(60),
            last_call: Duration::from_secs(30),
            silence: Duration::from_millis(700),
            hang: Duration::from_secs(3),
            node: Duration::from_secs(3),
            reunion: Duration::from_secs(10),
            respawn: Duration::from_secs(5),
            standstill: Duration::from_secs(7),
            disk: Duration::from_secs(20),
            drift: Duration::from_secs(20),
            farewell: Duration::from_secs(20),
        },
        budgets: Budgets { restarts: 3, rescales: None },
        seed: 7,
        life: 1,
        restarted: false,
        in_place_of: None,
        past: Past::default(),
        checkpoints: Vec::new(),
        skipped: BTreeMap::new(),
    }
}

fn origin() -> Origin {
    Origin { version: VERSION.into(), run_id: RUN.into() }
}

pub(crate) fn claim(rank: u32) -> WorkerClaim {
    WorkerClaim {
        origin: origin(),
        incarnation: format!("life-{rank}"),
        slot: Slot(rank),
        local_rank: rank,
        node_rank: 0,
        host: "node-a".into(),
        pid: 100 + rank,
        data_address: format!("10.0.0.1:{}", 9000 + rank),
        device: "cpu".into(),
        dataset: dataset(),
    }
}

/// The claim of the process that came in the place of an earlier one.
fn successor(rank: u32, life: u32) -> WorkerClaim {
    let mut claim = claim(rank);
    claim.incarnation = format!("life-{rank}-{life}");
    claim.pid += 1000 * life;
    claim
}

/// A machine with a clock of its own, driven like a driver would.
struct Run {
    machine: Machine,
    now: Duration,
    ticket: u64,
    plan: Plan,
    /// What each rank's heartbeats have shown.
    shown: BTreeMap<u32, PulseReading>,
}

/// What a rank's heartbeats have shown, as its pulse would have it.
#[derive(Clone, Copy, Debug)]
struct PulseReading {
    doing: (WorkerPhase, (u64, u64)),
    phase_since: Duration,
    still_since: Duration,
}

impl Run {
    fn new(config: Config) -> Self {
        let plan = Plan::new(&config.train, dataset().training_samples).unwrap();
        Self {
            machine: Machine::new(Timestamp::default(), config),
            now: Duration::ZERO,
            ticket: 0,
            plan,
            shown: BTreeMap::new(),
        }
    }

    /// A world of `world` workers that train from step 0 on.
    fn started(world: u32) -> Self {
        Self::started_with(config(world))
    }

    fn started_with(config: Config) -> Self {
        let (world, first) = (config.world.size(), config.past.committed.unwrap_or_default());
        let mut run = Self::new(config);
        run.gather(world);
        for rank in 0..world {
            run.get_ready(rank, 0, "");
        }
        run.start_all(world, first.0, StateSource::Fresh);
        run
    }

    /// As `started`, but the first fault ends the run.
    fn fragile(world: u32) -> Self {
        let mut config = config(world);
        config.budgets.restarts = 0;
        Self::started_with(config)
    }

    /// A node of `world` workers that have registered and opened their lines.
    fn gather(&mut self, world: u32) {
        self.tell(Ask::JoinNode(NodeClaim {
            origin: origin(),
            node_id: NODE.into(),
            host: "node-a".into(),
            local_world: self.machine.run.config.world.nproc_per_node,
            node_rank: None,
            returns: false,
        }));
        self.tell(Ask::FollowNode { node_id: NODE.into(), stream: NODE_LINE });
        for rank in 0..world {
            let (reply, _) = self.ask(Ask::Register(claim(rank)));
            assert_eq!(reply, Ok(Reply::Registered(id(rank))));
        }
        for rank in 0..world {
            let (reply, _) = self.follow(rank, u64::from(rank));
            assert_eq!(reply, Ok(Reply::Done));
        }
    }

    /// The worker that has the slot now.
    fn worker(&self, rank: u32) -> WorkerId {
        self.machine.run.fleet.roster.at(Slot(rank)).map_or(WorkerId(0), |worker| worker.id)
    }

    fn incarnation(&self, rank: u32) -> String {
        let worker = self.machine.run.fleet.roster.at(Slot(rank));
        worker.map_or_else(|| claim(rank).incarnation, |worker| worker.claim.incarnation.clone())
    }

    fn get_ready(&mut self, rank: u32, left: u64, reason: &str) -> Vec<Action> {
        let (worker, incarnation) = (self.worker(rank), self.incarnation(rank));
        let ready = Readiness { worker, incarnation, left: Generation(left), reason: reason.into() };
        let (reply, actions) = self.ask(Ask::Ready(ready));
        assert_eq!(reply, Ok(Reply::Done));
        actions
    }

    /// A slot's worker says where the newest generation starts.
    fn start(&mut self, rank: u32, first: u64, source: StateSource) -> (Result<Reply, Refusal>, Vec<Action>) {
        self.ask(Ask::Start(StartReport {
            worker: self.worker(rank),
            generation: self.machine.run.generation,
            first_step: Step(first),
            source,
        }))
    }

    fn start_all(&mut self, world: u32, first: u64, source: StateSource) -> Vec<Action> {
        let starts = (0..world).flat_map(|rank| {
            let (reply, actions) = self.start(rank, first, source);
            assert_eq!(reply, Ok(Reply::Done));
            actions
        });
        starts.collect()
    }

    /// The launcher says that a slot's process was killed.
    fn kill(&mut self, rank: u32) -> Vec<Action> {
        let pid = self.machine.run.fleet.roster.at(Slot(rank)).map(|worker| worker.claim.pid);
        let ended = super::event::ProcessExit::Signal(9);
        self.tell(Ask::Exit { node_id: NODE.into(), slot: Slot(rank), pid, ended, sample: None })
    }

    /// A new process takes a slot, opens its line and is ready.
    fn replace(&mut self, rank: u32, life: u32) -> Vec<Action> {
        let (reply, mut actions) = self.ask(Ask::Register(successor(rank, life)));
        assert!(matches!(reply, Ok(Reply::Registered(_))), "{reply:?}");
        actions.extend(self.follow(rank, u64::from(100 * life + rank)).1);
        actions.extend(self.get_ready(rank, 0, ""));
        actions
    }

    fn at(&self) -> Timestamp {
        Timestamp::at(self.now)
    }

    fn ask(&mut self, ask: Ask) -> (Result<Reply, Refusal>, Vec<Action>) {
        self.ticket += 1;
        let ticket = Ticket(self.ticket);
        let mut actions = self.machine.handle(self.at(), Event::Asked(ticket, ask));
        let place = actions.iter().position(|action| matches!(action, Action::Reply(to, _) if *to == ticket));
        let Some(place) = place else { return (Ok(Reply::Done), actions) };
        let Action::Reply(_, reply) = actions.remove(place) else { unreachable!() };
        (reply, actions)
    }

    /// What people are shown.
    fn status(&mut self) -> crate::core::status::Status {
        self.machine.status(self.at())
    }

    /// As `ask`, where the answer does not matter.
    fn tell(&mut self, ask: Ask) -> Vec<Action> {
        self.ask(ask).1
    }

    fn follow(&mut self, rank: u32, stream: u64) -> (Result<Reply, Refusal>, Vec<Action>) {
        let (worker, incarnation) = (self.worker(rank), self.incarnation(rank));
        self.ask(Ask::Follow { worker, incarnation, stream: StreamId(stream) })
    }

    fn event(&mut self, event: Event) -> Vec<Action> {
        self.machine.handle(self.at(), event)
    }

    /// Lets time pass, with ticks at every deadline on the way.
    fn wait(&mut self, time: Duration) -> Vec<Action> {
        let end = self.now + time;
        let mut out = Vec::new();
        while let Some(deadline) = self.machine.next_deadline().filter(|at| at.elapsed() <= end) {
            self.now = self.now.max(deadline.elapsed());
            out.extend(self.machine.handle(self.at(), Event::Tick));
            if self.machine.outcome().is_some() {
                break;
            }
        }
        self.now = end;
        out
    }

    fn beat(&mut self, rank: u32, phase: WorkerPhase) -> Vec<Action> {
        let waits = phase == WorkerPhase::Communication;
        self.beat_at(rank, phase, (2 + u64::from(waits), 2))
    }

    fn beat_at(&mut self, rank: u32, phase: WorkerPhase, collective: (u64, u64)) -> Vec<Action> {
        let now = self.now;
        let fresh = PulseReading { doing: (phase, collective), phase_since: now, still_since: now };
        let before = self.shown.get(&rank).copied().unwrap_or(fresh);
        let mut shown = before;
        if before.doing.0 != phase {
            shown = fresh;
        } else if before.doing != fresh.doing {
            (shown.doing, shown.still_since) = (fresh.doing, now);
        }
        self.shown.insert(rank, shown);
        let left = (before.doing.0 != phase).then(|| (before.doing.0, now - before.still_since));
        let beat = Beat {
            still: now - shown.still_since,
            in_phase: now - shown.phase_since,
            paces: left.into_iter().collect(),
            ..self.moving_beat(rank, phase, collective)
        };
        let (reply, actions) = self.ask(Ask::Heartbeat(beat));
        assert_eq!(reply, Ok(Reply::Known(true)));
        actions
    }

    /// A heartbeat of somebody who moves.
    fn moving_beat(&self, rank: u32, phase: WorkerPhase, collective: (u64, u64)) -> Beat {
        Beat {
            worker: self.worker(rank),
            incarnation: self.incarnation(rank).into(),
            age: Duration::ZERO,
            generation: self.machine.run.generation,
            phase,
            step: Step(0),
            collective,
            memory_in_use: Bytes(1 << 20),
            still: Duration::ZERO,
            in_phase: Duration::ZERO,
            waits: matches!(phase, WorkerPhase::Joining | WorkerPhase::Paused),
            paces: Vec::new(),
        }
    }

    /// What a slot's worker reports of a step of the generation that is reported now.
    fn report(&self, rank: u32, step: u64) -> StepReport {
        let batch = self.plan.batch(Step(step));
        let ledger = self.machine.run.progress.course().map(|course| &course.ledger);
        let position = ledger.and_then(|ledger| ledger.rank_of(self.worker(rank))).unwrap_or(Rank(rank));
        let world = ledger.map_or(1, |ledger| ledger.all_owed().count() as u32);
        StepReport {
            generation: ledger.map_or(Generation(1), super::ledger::StepLedger::generation),
            step: Step(step),
            epoch: batch.epoch,
            positions: vec![batch.of_rank(position, world.max(position.0 + 1))],
            totals: Totals { loss_sum: 4.0, valid_count: 8.0, grad_norm: 1.0 },
            times: StepTimes { total: Duration::from_millis(100), ..StepTimes::default() },
            metrics: Arc::default(),
            tokens: 10,
            memory_peak: Bytes(u64::from(rank) << 20),
            retries: 0,
            cache_generation: self
                .machine
                .run
                .progress
                .cache
                .book
                .cache_phases()
                .cache_phase(Step(step))
                .map_or(0, |cache_phase| cache_phase.number()),
            cache: CacheUse::default(),
            skipped: None,
        }
    }

    /// A slot's worker reports the steps of a range.
    fn steps(&mut self, rank: u32, steps: std::ops::Range<u64>) -> Vec<Action> {
        let reports = steps.map(|step| self.report(rank, step)).collect();
        self.ask(Ask::Steps(self.worker(rank), reports)).1
    }

    /// Committed steps.
    fn committed(&self) -> u64 {
        self.machine.committed().0
    }

    fn phase(&self) -> RunPhase {
        self.machine.run_phase()
    }
}

/// The launcher's line.
const NODE_LINE: StreamId = StreamId(5000);

fn id(rank: u32) -> WorkerId {
    WorkerId((1 << 32) + 1 + u64::from(rank))
}

/// A report of peaks, with nothing to compare them to.
fn peaks(peaks: Vec<super::report::PhaseMemory>) -> MemoryReport {
    MemoryReport { peaks, comparison: None }
}
