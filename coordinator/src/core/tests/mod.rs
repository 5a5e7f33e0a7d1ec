//! Transcripts of the core: events in, expected actions out. No clock but the one in `At`.

mod control;
mod failures;
mod random;
mod rendezvous;
mod training;

use std::time::Duration;

use coxswain_proto::{
    ids::{Bytes, Generation, Rank, Step, WorkerId},
    plan::Plan,
    run_spec::{Recompute, Train},
};

use super::{
    action::{Action, Directive, News, Reply},
    event::{Ask, Beat, DataSet, Event, NodeClaim, Origin, StreamId, Ticket, WorkerClaim},
    machine::{Config, Machine},
    reason::RunPhase,
    refusal::Refusal,
    report::{StepReport, StepTimes, Totals, WorkerPhase},
    time::Timestamp,
};
use crate::options::{Patience, World};

const RUN: &str = "row-1";
const NODE: &str = "n";
const VERSION: &str = "1.2.3";

fn train() -> Train {
    Train {
        steps: Some(100),
        epochs: None,
        global_batch: 8,
        micro_batch: 2,
        recompute: Recompute::None,
        checkpoint_every: 0,
        keep_checkpoints: 2,
        log_every: 1,
        resume: true,
    }
}

fn dataset() -> DataSet {
    DataSet { training_samples: 30, fingerprint: "f00d".into() }
}

fn config(world: u32) -> Config {
    Config {
        run_id: RUN.into(),
        version: VERSION.into(),
        train: train(),
        world: World { nnodes: 1, nproc_per_node: world },
        patience: Patience {
            rendezvous: Duration::from_secs(60),
            silence: Duration::from_secs(3),
            hang: Duration::from_secs(15),
            farewell: Duration::from_secs(20),
        },
        life: 1,
        last_generation: Generation(0),
        first_step: Step(0),
        dataset: None,
        checkpoints: Vec::new(),
    }
}

fn origin() -> Origin {
    Origin { version: VERSION.into(), run_id: RUN.into() }
}

fn claim(rank: u32) -> WorkerClaim {
    WorkerClaim {
        origin: origin(),
        incarnation: format!("life-{rank}"),
        rank: Rank(rank),
        local_rank: rank,
        node_rank: 0,
        host: "node-a".into(),
        pid: 100 + rank,
        data_address: format!("10.0.0.1:{}", 9000 + rank),
        device: "cpu".into(),
        dataset: dataset(),
    }
}

/// A machine with a clock of its own, driven like a driver would.
struct Run {
    machine: Machine,
    now: Duration,
    ticket: u64,
    plan: Plan,
}

impl Run {
    fn new(config: Config) -> Self {
        let plan = Plan::new(&config.train, dataset().training_samples).unwrap();
        Self { machine: Machine::new(Timestamp::default(), config), now: Duration::ZERO, ticket: 0, plan }
    }

    /// A world of `world` workers that have registered and opened their lines.
    fn started(world: u32) -> Self {
        let mut run = Self::new(config(world));
        run.gather(world);
        run
    }

    fn gather(&mut self, world: u32) {
        self.tell(Ask::JoinNode(NodeClaim {
            origin: origin(),
            node_id: NODE.into(),
            host: "node-a".into(),
            local_world: world,
            node_rank: None,
        }));
        for rank in 0..world {
            let (reply, _) = self.ask(Ask::Register(claim(rank)));
            assert_eq!(reply, Ok(Reply::Registered(id(rank))));
        }
        for rank in 0..world {
            let (reply, _) = self.follow(rank, u64::from(rank));
            assert_eq!(reply, Ok(Reply::Done));
        }
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

    /// As `ask`, where the answer does not matter.
    fn tell(&mut self, ask: Ask) -> Vec<Action> {
        self.ask(ask).1
    }

    fn follow(&mut self, rank: u32, stream: u64) -> (Result<Reply, Refusal>, Vec<Action>) {
        let incarnation = claim(rank).incarnation;
        self.ask(Ask::Follow { worker: id(rank), incarnation, stream: StreamId(stream) })
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
        let (reply, actions) = self.ask(Ask::Heartbeat(Beat {
            worker: id(rank),
            incarnation: claim(rank).incarnation,
            generation: Generation(1),
            phase,
            step: Step(0),
            collective: (3, 2),
            memory_in_use: Bytes(1 << 20),
        }));
        assert_eq!(reply, Ok(Reply::Known(true)));
        actions
    }

    fn report(&self, rank: u32, step: u64) -> StepReport {
        let batch = self.plan.batch(Step(step));
        StepReport {
            generation: Generation(1),
            step: Step(step),
            epoch: batch.epoch,
            positions: vec![batch.of_rank(Rank(rank), self.machine.config.world.size())],
            totals: Totals { loss_sum: 4.0, valid_count: 8.0, grad_norm: 1.0 },
            learning_rate: 1e-4,
            times: StepTimes { total: Duration::from_millis(100), ..StepTimes::default() },
            tokens: 10,
            memory_peak: Bytes(u64::from(rank) << 20),
        }
    }

    /// Rank `rank` reports the steps of a range.
    fn steps(&mut self, rank: u32, steps: std::ops::Range<u64>) -> Vec<Action> {
        let reports = steps.map(|step| self.report(rank, step)).collect();
        self.ask(Ask::Steps(id(rank), reports)).1
    }

    fn phase(&self) -> RunPhase {
        self.machine.run_phase()
    }
}

fn id(rank: u32) -> WorkerId {
    WorkerId((1 << 32) + 1 + u64::from(rank))
}

fn told(actions: &[Action], stream: u64) -> Vec<&Directive> {
    let told = actions.iter().filter_map(|action| match action {
        Action::Tell(to, directive) if *to == StreamId(stream) => Some(directive),
        _ => None,
    });
    told.collect()
}

fn news(actions: &[Action]) -> Vec<&News> {
    let news = actions.iter().filter_map(|action| match action {
        Action::Publish(news) => Some(news),
        _ => None,
    });
    news.collect()
}

/// The phases that were published, in order.
fn phases(actions: &[Action]) -> Vec<RunPhase> {
    let phases = news(actions).into_iter().filter_map(|news| match news {
        News::Phase(phase, _) => Some(*phase),
        _ => None,
    });
    phases.collect()
}
