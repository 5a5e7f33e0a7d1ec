//! One worker process: its session, which makes one call after another, and its trainer, which waits.
//!
//! The session is modelled on the real one: it repeats a call until it is answered, keeps step reports until they are committed, and
//! says them, and that it is ready, again on every new line. What a directive means is decided by the real [`Standing`].

use std::{collections::VecDeque, time::Duration};

use coxswain_coordinator::core::{
    action::{Directive, Reply},
    event::{Ask, Beat, DataSet, Ended, Origin, Readiness, StreamId, WorkerClaim},
    refusal::Refusal,
    report::{StepReport, WorkerPhase},
};
use coxswain_proto::{
    ids::{Bytes, Generation, Rank, Seat, Step, WorkerId},
    limits::HEARTBEAT_INTERVAL,
};
use coxswain_worker::{
    link::{Assignment, CacheTurn, LinkError},
    session::standing::{Lease, Standing, Told},
    zero::Versions,
};

use super::world::{Caller, Happening, ToNode, ToProcess, World};

const RETRY: Duration = Duration::from_millis(250);
const BACKOFF: Duration = Duration::from_millis(20);
/// How long a worker tries to say good-bye.
const GOOD_BYE: Duration = Duration::from_secs(2);
/// Exit codes as the launcher knows them.
const WORKER_FAILED: i32 = 4;
const NOT_LET_IN: i32 = 6;
/// Tries to have the last steps committed before the last word.
const SETTLE_TRIES: u32 = 100;

/// One process.
#[derive(Debug)]
pub struct Process {
    pub pid: usize,
    pub seat: Seat,
    pub node: usize,
    pub alive: bool,
    pub frozen: bool,
    /// Its launcher was asked for another in its place.
    pub replaced: bool,
    pub deferred: Vec<ToProcess>,
    /// Its trainer stands still for ever.
    pub hung: bool,
    pub slow: (Duration, f64),
    pub beat_factor: f64,
    pub unreachable_until: Duration,

    pub id: Option<WorkerId>,
    pub line: Option<StreamId>,
    pub standing: Standing,
    calls: VecDeque<Call>,
    waiting: Option<u64>,
    last: u64,
    following: Option<u64>,
    unsettled: Vec<StepReport>,
    ready: Option<Readiness>,
    exit_code: i32,
    settling: u32,

    pub at: At,
    /// Names the newest thing the trainer waits for by itself.
    pub waits: u64,
    pub assignment: Option<Assignment>,
    /// The collective it waits in, or will enter next.
    pub collective: u64,
    pub entered: u64,
    /// Generation, ranks and rank of the partition that its state follows.
    pub held: Option<(Generation, u32, Rank)>,
    pub own: Versions,
    pub mirror: Option<Versions>,
    /// The newest checkpoint it has taken part in.
    pub saved: u64,
}

/// What the trainer does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum At {
    Loading,
    Waiting,
    Exchanging,
    Moving,
    Settling,
    Leasing,
    Computing,
    Voting,
    Shifting,
    Gathering,
    Saving,
    Publishing,
    Leaving,
}

/// One call of the session's queue.
#[derive(Clone, Debug)]
pub enum Call {
    Register,
    /// What is not settled is said again.
    Repeat,
    Steps(Vec<StepReport>),
    Ready(Readiness),
    Other(Ask),
    Leave(i32),
}

impl Process {
    pub fn new(pid: usize, seat: Seat, node: usize) -> Self {
        let none = Versions { newest: 0, older: false };
        Self {
            pid,
            seat,
            node,
            alive: true,
            frozen: false,
            replaced: false,
            deferred: Vec::new(),
            hung: false,
            slow: (Duration::ZERO, 1.0),
            beat_factor: 1.0,
            unreachable_until: Duration::ZERO,
            id: None,
            line: None,
            standing: Standing::default(),
            calls: VecDeque::new(),
            waiting: None,
            last: 0,
            following: None,
            unsettled: Vec::new(),
            ready: None,
            exit_code: 0,
            settling: 0,
            at: At::Loading,
            waits: 0,
            assignment: None,
            collective: 0,
            entered: 0,
            held: None,
            own: none,
            mirror: None,
            saved: 0,
        }
    }

    fn incarnation(&self) -> String {
        format!("process-{}", self.pid)
    }

    /// Whether it waits in a collective.
    pub fn in_ring(&self) -> bool {
        matches!(
            self.at,
            At::Exchanging | At::Settling | At::Voting | At::Shifting | At::Gathering | At::Publishing
        )
    }

    fn phase(&self) -> WorkerPhase {
        match self.at {
            At::Loading => WorkerPhase::Loading,
            At::Waiting => WorkerPhase::Joining,
            At::Exchanging | At::Moving | At::Settling => WorkerPhase::Connecting,
            At::Leasing => WorkerPhase::Data,
            At::Computing => WorkerPhase::Forward,
            At::Voting | At::Shifting | At::Gathering | At::Publishing => WorkerPhase::Communication,
            At::Saving => WorkerPhase::Checkpoint,
            At::Leaving => WorkerPhase::Done,
        }
    }
}

impl World {
    pub fn boot(&mut self, pid: usize) {
        let load = Duration::from_secs_f64(self.script.load_ms / 1e3);
        let load = load.mul_f64(0.8 + 0.4 * self.random.unit());
        self.after(load, Happening::Process(pid, ToProcess::Booted));
    }

    pub fn deliver_to_process(&mut self, pid: usize, message: ToProcess) {
        let process = &mut self.processes[pid];
        if !process.alive {
            return;
        }
        if process.frozen {
            return process.deferred.push(message);
        }
        match message {
            ToProcess::Booted => self.say(pid, Call::Register),
            ToProcess::Answer(number, reply) => self.answered(pid, number, reply),
            ToProcess::Opened(number, stream) => {
                if process.following == Some(number) {
                    process.following = None;
                    process.line = process.line.max(Some(stream));
                    self.line_opened(pid);
                }
            }
            ToProcess::Retry(number) => {
                if process.waiting == Some(number) {
                    self.next_call(pid);
                } else if process.following == Some(number) {
                    self.follow(pid);
                }
            }
            ToProcess::Beat => self.beat(pid),
            ToProcess::Reopen => self.follow(pid),
            ToProcess::Told(stream, directive) => {
                process.line = process.line.max(Some(stream));
                self.told(pid, directive);
            }
            ToProcess::LineLost(stream) => {
                if process.line == Some(stream) {
                    process.line = None;
                    self.after(BACKOFF, Happening::Process(pid, ToProcess::Reopen));
                }
            }
            ToProcess::Done(wait) if wait == process.waits && !process.hung => self.waited(pid),
            ToProcess::Collected(generation, collective) if !process.hung => {
                self.collected(pid, generation, collective);
            }
            ToProcess::PeerLost(generation) if !process.hung => self.peer_lost(pid, generation),
            ToProcess::Done(_) | ToProcess::Collected(..) | ToProcess::PeerLost(_) => {}
            ToProcess::GiveUp => self.end_process(pid, Ended::Code(WORKER_FAILED)),
        }
    }

    /// The process is gone, with everything it held open.
    pub fn end_process(&mut self, pid: usize, ended: Ended) {
        let process = &mut self.processes[pid];
        if !std::mem::take(&mut process.alive) {
            return;
        }
        let (seat, node, generation) = (process.seat, process.node, process.standing.generation());
        self.close_streams(|caller| matches!(caller, Caller::Process(of, _) if of == pid));
        self.break_ring(generation, Some(pid));
        // Of a process that its launcher replaces the launcher says nothing: it was asked to.
        if !self.processes[pid].replaced {
            let delay = self.delay();
            self.after(delay, Happening::Node(node, ToNode::Exited(seat, pid, ended)));
        }
    }

    /// Queues a call.
    pub fn say(&mut self, pid: usize, call: Call) {
        self.processes[pid].calls.push_back(call);
        if self.processes[pid].waiting.is_none() {
            self.next_call(pid);
        }
    }

    /// The trainer is ready for a generation after the one it left.
    pub fn say_ready(&mut self, pid: usize, reason: String) {
        let process = &mut self.processes[pid];
        let (incarnation, left) = (process.incarnation(), process.standing.generation());
        let worker = process.id.unwrap_or_default();
        self.say(pid, Call::Ready(Readiness { worker, incarnation, left, reason }));
    }

    fn next_call(&mut self, pid: usize) {
        let process = &mut self.processes[pid];
        process.waiting = None;
        while let Some(Call::Repeat) = process.calls.front() {
            process.calls.pop_front();
            let ready = process.ready.take().filter(|ready| !process.standing.has_place_after(ready.left));
            if let Some(ready) = ready {
                process.calls.push_front(Call::Ready(ready));
            }
            let unsettled = std::mem::take(&mut process.unsettled);
            if !unsettled.is_empty() {
                process.calls.push_front(Call::Steps(unsettled));
            }
        }
        // Steps that have gathered go together.
        while let [Call::Steps(_), Call::Steps(_), ..] = process.calls.make_contiguous() {
            let (Some(Call::Steps(mut first)), Some(Call::Steps(second))) =
                (process.calls.pop_front(), process.calls.pop_front())
            else {
                unreachable!("both were looked at")
            };
            first.extend(second);
            process.calls.push_front(Call::Steps(first));
        }
        let leaves = matches!(process.calls.front(), Some(Call::Leave(0)));
        if leaves && !process.unsettled.is_empty() && process.settling < SETTLE_TRIES {
            // The last word comes after the last step is committed.
            process.settling += 1;
            let unsettled = std::mem::take(&mut process.unsettled);
            process.calls.push_front(Call::Steps(unsettled));
        }
        let Some(call) = process.calls.front().cloned() else { return };
        let worker = process.id.unwrap_or_default();
        let ask = match call {
            Call::Repeat => return,
            Call::Register => Ask::Register(self.claim(pid)),
            Call::Steps(reports) => Ask::Steps(worker, reports),
            Call::Ready(ready) => Ask::Ready(ready),
            Call::Other(ask) => ask,
            Call::Leave(exit_code) => Ask::Leave { worker, exit_code, reason: "its end".into() },
        };
        let process = &mut self.processes[pid];
        process.last += 1;
        let number = process.last;
        process.waiting = Some(number);
        let delay = self.delay();
        self.after(delay, Happening::Call(Caller::Process(pid, number), ask));
        self.after(RETRY + delay * 4, Happening::Process(pid, ToProcess::Retry(number)));
    }

    fn claim(&self, pid: usize) -> WorkerClaim {
        let process = &self.processes[pid];
        WorkerClaim {
            origin: Origin { version: String::new(), run_id: String::new() },
            incarnation: process.incarnation(),
            seat: process.seat,
            local_rank: process.seat.0 % self.script.workers_per_node,
            node_rank: process.node as u32,
            host: format!("host-{}", process.node),
            pid: pid as u32,
            data_address: format!("host-{}:{pid}", process.node),
            device: "none".into(),
            dataset: DataSet { training_samples: self.script.samples, fingerprint: "simulated".into() },
        }
    }

    fn answered(&mut self, pid: usize, number: u64, reply: Result<Reply, Refusal>) {
        let process = &mut self.processes[pid];
        if process.following == Some(number) {
            process.following = None;
            return self.fenced(pid);
        }
        if let Ok(Reply::Known(known)) = reply {
            return if known {
            } else {
                self.fenced(pid)
            };
        }
        if process.waiting != Some(number) {
            return;
        }
        process.waiting = None;
        let Some(call) = process.calls.pop_front() else { return };
        match (call, reply) {
            (Call::Register, Ok(Reply::Registered(id))) => {
                process.id = Some(id);
                self.follow(pid);
                self.beat(pid);
                self.processes[pid].at = At::Waiting;
                self.say_ready(pid, String::new());
            }
            (Call::Register, _) => return self.end_process(pid, Ended::Code(NOT_LET_IN)),
            (Call::Steps(reports), Ok(Reply::Committed(committed))) => {
                process.unsettled.extend(reports);
                process.unsettled.retain(|report| report.step >= committed);
            }
            (Call::Ready(ready), Ok(_)) => process.ready = Some(ready),
            (Call::Other(Ask::Start(start)), Ok(_)) => {
                process.unsettled.retain(|report| report.generation >= start.generation);
            }
            (Call::Other(_) | Call::Repeat, _) => {}
            (Call::Leave(_), _) => {
                let code = process.exit_code;
                return self.end_process(pid, Ended::Code(code));
            }
            (Call::Steps(_) | Call::Ready(_), _) => return self.fenced(pid),
        }
        self.next_call(pid);
    }

    /// The coordinator does not know this process any more.
    fn fenced(&mut self, pid: usize) {
        self.end_process(pid, Ended::Code(WORKER_FAILED));
    }

    fn follow(&mut self, pid: usize) {
        let process = &mut self.processes[pid];
        let Some(worker) = process.id else { return };
        let incarnation = process.incarnation();
        process.last += 1;
        let number = process.last;
        process.following = Some(number);
        let delay = self.delay();
        let ask = Ask::Follow { worker, incarnation, stream: StreamId(0) };
        self.after(delay, Happening::Call(Caller::Process(pid, number), ask));
        self.after(RETRY + delay * 4, Happening::Process(pid, ToProcess::Retry(number)));
    }

    /// A coordinator may have forgotten what was not durable.
    fn line_opened(&mut self, pid: usize) {
        let process = &mut self.processes[pid];
        // After the call that is under way.
        let next = usize::from(process.waiting.is_some()).min(process.calls.len());
        process.calls.insert(next, Call::Repeat);
        if process.waiting.is_none() {
            self.next_call(pid);
        }
    }

    fn beat(&mut self, pid: usize) {
        let process = &mut self.processes[pid];
        let Some(worker) = process.id else { return };
        process.last += 1;
        let beat = Beat {
            worker,
            incarnation: process.incarnation(),
            generation: process.standing.generation(),
            phase: process.phase(),
            step: Step(process.own.newest),
            collective: (process.entered, process.entered - u64::from(process.in_ring())),
            memory_in_use: Bytes(0),
        };
        let (number, factor) = (process.last, process.beat_factor);
        let delay = self.delay();
        self.after(delay, Happening::Call(Caller::Process(pid, number), Ask::Heartbeat(beat)));
        self.after(HEARTBEAT_INTERVAL.mul_f64(factor), Happening::Process(pid, ToProcess::Beat));
    }

    fn told(&mut self, pid: usize, directive: Directive) {
        let process = &mut self.processes[pid];
        let told = match directive {
            Directive::Assignment(assignment, rank) => Told::Assign(Assignment {
                generation: assignment.generation,
                rank,
                world: assignment.world(),
                next: String::new(),
                quarantined: Vec::new(),
                checkpoint_step: assignment.checkpoint,
            }),
            Directive::Lease(lease) => Told::Grant(Lease {
                generation: lease.generation,
                steps: lease.first.0..lease.end.0,
                slice: lease.slice,
                slices: lease.slices,
                turn: CacheTurn::LIVE,
            }),
            Directive::Pause => Told::Pause,
            Directive::Resume => Told::Resume,
            Directive::Checkpoint(count) => Told::Checkpoints(count),
            Directive::MemoryReport(count) => Told::MemoryReports(count),
            Directive::Stop(_) => Told::Stop,
            Directive::Abort { over: true, reason, .. } => {
                process.standing.cut(LinkError::Over(reason));
                return self.poke(pid);
            }
            Directive::Abort { generation, reason, over: false } => Told::Abort(generation, reason),
            Directive::Regroup { generation, checkpoint } => Told::Regroup { generation, checkpoint },
            Directive::Dismiss(reason) => Told::Dismiss(reason),
        };
        process.standing.told(told);
        if !process.hung {
            self.poke(pid);
        }
    }

    /// The last word, and then the end.
    pub fn leave(&mut self, pid: usize, exit_code: i32) {
        let process = &mut self.processes[pid];
        process.at = At::Leaving;
        process.exit_code = exit_code;
        self.say(pid, Call::Leave(exit_code));
        if exit_code != 0 {
            self.after(GOOD_BYE, Happening::Process(pid, ToProcess::GiveUp));
        }
    }
}
