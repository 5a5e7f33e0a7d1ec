//! One worker process: what it is, and what reaches it. Its calls are `session`'s, its steps `trainer`'s;
//! what a directive means is decided by the real [`Standing`].

use std::{collections::BTreeMap, time::Duration};

use coxswain_coordinator::{
    CauseKind,
    core::{
        action::{CacheKey, Directive, LeaseCachePhase},
        event::{Ask, ProcessExit, StreamId},
        failure::Failure,
        report::WorkerPhase,
    },
};
use coxswain_proto::ids::{Slot, WorkerId};
use coxswain_worker::{
    link::{Assignment, CacheNamespace, CachePhase, LinkError},
    session::standing::{Lease, Notice, Standing},
    train::recovery::Holding,
    zero::Versions,
};

use crate::{
    coordinator::RUN,
    node::Node,
    session::{Call, Session},
    world::{Caller, Happening, ToNode, ToProcess, World},
};

const BACKOFF: Duration = Duration::from_millis(20);
/// How long a worker tries to say good-bye.
const GOOD_BYE: Duration = Duration::from_secs(2);
/// Exit code as the launcher knows it.
const WORKER_FAILED: i32 = 4;

/// The part of loading that comes before a worker makes itself known.
pub const OPENING: f64 = 0.3;

/// One process.
#[derive(Debug)]
pub struct Process {
    pub pid: usize,
    pub slot: Slot,
    pub node: usize,
    pub version: u32,
    pub alive: bool,
    pub frozen: bool,
    /// Launcher was asked for another in its place.
    pub replaced: bool,
    pub deferred: Vec<ToProcess>,
    /// Trainer stands still for ever.
    pub hung: bool,
    /// It will, once it comes to this phase.
    pub hangs_in: Option<WorkerPhase>,
    pub signs: Signs,
    pub slow: (Duration, f64),
    /// Faults of its machine that it has told.
    pub slips: u64,
    /// How long it computed in its newest step.
    pub computed: Duration,
    pub beat_factor: f64,
    pub unreachable_until: Duration,

    /// The claim of the coordinator that it calls.
    pub calls: u64,
    pub id: Option<WorkerId>,
    pub line: Option<StreamId>,
    pub standing: Standing,
    pub session: Session,

    pub at: TrainerStage,
    /// Names the newest thing the trainer waits for by itself.
    pub waits: u64,
    pub assignment: Option<Assignment>,
    /// The collective it waits in, or will enter next.
    pub collective: u64,
    pub entered: u64,
    /// The state that it began its generation with; which versions it has by now is beside it.
    pub held: Option<Holding>,
    pub own: Versions,
    pub replica: Option<Versions>,
    /// The state that it was taking over when it was disturbed in the last moment: some may have it by now,
    /// and nothing else.
    pub coming: Option<Holding>,
    /// The generation of the cache that its step takes its features from; 0 for none.
    pub cache_phase: u64,
    /// The newest checkpoint it has taken part in.
    pub saved: u64,
}

/// What the trainer does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TrainerStage {
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
    Evaluating,
    /// Nobody leaves before the results are on disk.
    Exporting,
    Leaving,
}

/// Signs that a trainer moves, as the real one has them: here whatever changes what it does.
#[derive(Debug, Default)]
pub struct Signs {
    doing: Option<(TrainerStage, u64, u64)>,
    phase: Option<WorkerPhase>,
    pub since: Duration,
    pub phase_since: Duration,
    /// The longest time without one in this visit of the phase, and in each phase that was left.
    most: Duration,
    pub longest: BTreeMap<WorkerPhase, Duration>,
}

impl Signs {
    fn look(&mut self, now: Duration, phase: WorkerPhase, doing: (TrainerStage, u64, u64)) {
        if self.doing.replace(doing) == Some(doing) {
            return;
        }
        self.most = self.most.max(now - self.since);
        self.since = now;
        if let Some(left) = self.phase.replace(phase).filter(|left| *left != phase) {
            let longest = self.longest.entry(left).or_default();
            *longest = (*longest).max(self.most);
            (self.phase_since, self.most) = (now, Duration::ZERO);
        }
    }
}

impl Process {
    pub fn new(pid: usize, slot: Slot, launcher: &Node, version: u32) -> Self {
        let none = Versions { newest: 0, older: false };
        Self {
            pid,
            slot,
            node: launcher.place as usize,
            version,
            alive: true,
            frozen: false,
            replaced: false,
            deferred: Vec::new(),
            hung: false,
            hangs_in: None,
            signs: Signs::default(),
            slow: (Duration::ZERO, 1.0),
            slips: 0,
            computed: Duration::ZERO,
            beat_factor: 1.0,
            unreachable_until: Duration::ZERO,
            calls: launcher.claim,
            id: None,
            line: None,
            standing: Standing::default(),
            session: Session::default(),
            at: TrainerStage::Loading,
            waits: 0,
            assignment: None,
            collective: 0,
            entered: 0,
            held: None,
            own: none,
            replica: None,
            coming: None,
            cache_phase: 0,
            saved: 0,
        }
    }

    pub fn incarnation(&self) -> String {
        format!("process-{}", self.pid)
    }

    /// Whether its last word was that all is well.
    pub fn left_in_order(&self) -> bool {
        self.at == TrainerStage::Leaving && self.session.exit_code == 0
    }

    /// This is its state from now on.
    pub fn hold(&mut self, state: Holding) {
        self.held = Some(state);
        (self.own, self.replica) = (state.own, state.replica);
    }

    /// Whether it waits in a collective.
    pub fn in_ring(&self) -> bool {
        matches!(
            self.at,
            TrainerStage::Exchanging
                | TrainerStage::Settling
                | TrainerStage::Voting
                | TrainerStage::Shifting
                | TrainerStage::Gathering
                | TrainerStage::Publishing
                | TrainerStage::Exporting
        )
    }

    /// Whether its trainer waits for the coordinator. One that hangs does not, though it may have begun to.
    pub fn waits_for_coordinator(&self) -> bool {
        !self.hung && matches!(self.at, TrainerStage::Waiting | TrainerStage::Leasing)
    }

    pub fn phase(&self) -> WorkerPhase {
        match self.at {
            TrainerStage::Loading => WorkerPhase::Loading,
            TrainerStage::Waiting => WorkerPhase::Joining,
            TrainerStage::Exchanging | TrainerStage::Moving | TrainerStage::Settling => {
                WorkerPhase::Connecting
            }
            TrainerStage::Leasing => WorkerPhase::Data,
            TrainerStage::Computing => WorkerPhase::Forward,
            TrainerStage::Voting
            | TrainerStage::Shifting
            | TrainerStage::Gathering
            | TrainerStage::Publishing => WorkerPhase::Communication,
            TrainerStage::Saving => WorkerPhase::Checkpoint,
            TrainerStage::Evaluating => WorkerPhase::Evaluation,
            TrainerStage::Exporting => WorkerPhase::Checkpoint,
            TrainerStage::Leaving => WorkerPhase::Done,
        }
    }
}

/// A cache phase as a worker has it.
fn cache_phase(leased: LeaseCachePhase) -> CachePhase {
    let namespace = |key: CacheKey| CacheNamespace { generation: key.generation, namespace: key.namespace };
    match leased {
        LeaseCachePhase::Live { kept } => CachePhase::Live { kept: kept.map(namespace) },
        LeaseCachePhase::Cached(key) => CachePhase::Cached(namespace(key)),
    }
}

impl World {
    pub fn boot(&mut self, pid: usize) {
        let opened = Duration::from_secs_f64(self.script.load_ms * OPENING / 1e3);
        let opened = opened.mul_f64(0.8 + 0.4 * self.random.unit());
        self.after(opened, Happening::Process(pid, ToProcess::Booted));
    }

    /// Something reaches a process, and perhaps moves its trainer.
    pub fn deliver_to_process(&mut self, pid: usize, message: ToProcess) {
        let process = &mut self.processes[pid];
        if !process.alive {
            return;
        }
        if process.frozen {
            return process.deferred.push(message);
        }
        self.take_message(pid, message);
        let process = &mut self.processes[pid];
        let doing = (process.at, process.entered, process.own.newest);
        process.signs.look(self.now, process.phase(), doing);
        if process.hangs_in == Some(process.phase()) {
            (process.hung, process.hangs_in) = (true, None);
        }
    }

    fn take_message(&mut self, pid: usize, message: ToProcess) {
        let process = &mut self.processes[pid];
        match message {
            ToProcess::Booted if self.stuck.remove(&process.slot) => process.hung = true,
            ToProcess::Booted => self.say(pid, Call::Register),
            ToProcess::Answer(number, reply) => self.answered(pid, number, reply),
            ToProcess::Opened(number, stream) => {
                if process.session.following == Some(number) {
                    process.session.following = None;
                    process.line = process.line.max(Some(stream));
                    self.line_opened(pid);
                }
            }
            ToProcess::Retry(number) => {
                self.look_up(pid);
                let process = &mut self.processes[pid];
                if process.session.waits_for(number) {
                    self.next_call(pid);
                } else if process.session.following == Some(number) {
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
                    self.look_up(pid);
                    self.after(BACKOFF, Happening::Process(pid, ToProcess::Reopen));
                }
            }
            ToProcess::Done(wait) if wait == process.waits && !process.hung => self.waited(pid),
            ToProcess::Collected(generation, collective) if !process.hung => {
                self.collected(pid, generation, collective);
            }
            ToProcess::PeerLost(generation) if !process.hung => self.peer_lost(pid, generation),
            ToProcess::Done(_) | ToProcess::Collected(..) | ToProcess::PeerLost(_) => {}
            ToProcess::GiveUp => self.end_process(pid, ProcessExit::Code(WORKER_FAILED)),
        }
    }

    /// Who is not answered looks who the coordinator is, unless it cannot see the directory.
    fn look_up(&mut self, pid: usize) {
        if self.cuts[self.processes[pid].node] <= self.now {
            self.processes[pid].calls = self.coordinator.claim;
        }
    }

    /// The process is gone, with everything it held open.
    pub fn end_process(&mut self, pid: usize, ended: ProcessExit) {
        let process = &mut self.processes[pid];
        if !std::mem::take(&mut process.alive) {
            return;
        }
        let (slot, node, generation) = (process.slot, process.node, process.standing.generation());
        self.close_streams(|caller| matches!(caller, Caller::Process(of, _) if of == pid));
        self.break_ring(generation, Some(pid));
        // Of a process that its launcher replaces the launcher says nothing: it was asked to.
        if !self.processes[pid].replaced {
            let delay = self.delay();
            self.after(delay, Happening::Node(node, ToNode::Exited(slot, pid, ended)));
        }
    }

    fn told(&mut self, pid: usize, directive: Directive) {
        let process = &mut self.processes[pid];
        let told = match directive {
            Directive::Assignment(assignment, rank) => Notice::Assign(Assignment {
                generation: assignment.generation,
                rank,
                world: assignment.world(),
                next: String::new(),
                quarantined: Vec::new(),
                checkpoint_step: assignment.checkpoint,
                closing: assignment.closing,
                replica_distance: assignment.replicas.distance,
            }),
            Directive::Lease(lease) => Notice::Grant(Lease {
                generation: lease.generation,
                steps: lease.first.0..lease.end.0,
                slice: lease.slice,
                slices: lease.slices,
                cache_phase: cache_phase(lease.cache_phase),
            }),
            Directive::Pause => Notice::Pause,
            Directive::Resume => Notice::Resume,
            Directive::Checkpoint(count) => Notice::Checkpoints(count),
            Directive::MemoryReport { request, reset } => Notice::MemoryReports { count: request, reset },
            Directive::Stop(_) => Notice::Stop,
            Directive::Abort { over: true, reason, .. } => {
                process.standing.cut(LinkError::Over(reason));
                return self.wake(pid);
            }
            Directive::Abort { generation, reason, over: false } => Notice::Abort(generation, reason),
            Directive::Regroup { generation, checkpoint } => Notice::Regroup { generation, checkpoint },
            Directive::Dismiss(reason) => Notice::Dismiss(reason),
        };
        process.standing.told(told);
        if !process.hung {
            self.wake(pid);
        }
    }

    /// Machine has computed something wrong, once.
    pub fn slips(&mut self, pid: usize) {
        let process = &mut self.processes[pid];
        let Some(worker) = process.id else { return };
        process.slips += 1;
        let (sequence, text) = (process.slips, "its gradients are wrong".to_owned());
        self.say(pid, Call::Other(Ask::Note { worker, sequence, text, hardware: true }));
    }

    /// Machine computes wrong results: it says so, and ends.
    pub fn is_broken(&mut self, pid: usize) {
        let Some(worker) = self.processes[pid].id else { return };
        let failure = Failure::of_run(CauseKind::Hardware, "its gradients are wrong again".into());
        let run_id = String::from(RUN);
        self.say(pid, Call::Other(Ask::Failure { run_id, worker: Some(worker), failure, sample: None }));
        let generation = self.processes[pid].standing.generation();
        self.break_ring(generation, Some(pid));
        self.leave(pid, WORKER_FAILED);
    }

    /// The last word, and then the end.
    pub fn leave(&mut self, pid: usize, exit_code: i32) {
        let process = &mut self.processes[pid];
        process.at = TrainerStage::Leaving;
        process.session.exit_code = exit_code;
        self.say(pid, Call::Leave(exit_code));
        if exit_code != 0 {
            self.after(GOOD_BYE, Happening::Process(pid, ToProcess::GiveUp));
        }
    }
}
