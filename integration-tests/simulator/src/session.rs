//! A worker's session: it makes one call after another, and heartbeats.
//!
//! It is modelled on the real one: it repeats a call until it is answered, keeps step reports until they are
//! committed, and says them, and that it is ready, again on every new line.

use std::{collections::VecDeque, time::Duration};

use coxswain_coordinator::core::{
    action::Reply,
    event::{Ask, Beat, DataSet, ProcessExit, Readiness, StreamId, WorkerClaim},
    refusal::Refusal,
    report::StepReport,
};
use coxswain_proto::{
    ids::{Bytes, Step},
    limits::HEARTBEAT_INTERVAL,
};

use crate::{
    versions::origin,
    world::{Caller, Happening, ToProcess, World},
};

const RETRY: Duration = Duration::from_millis(250);
/// Exit codes as the launcher knows them.
const WORKER_FAILED: i32 = 4;
const NOT_LET_IN: i32 = 6;
/// Tries to have the last steps committed before the last word.
const SETTLE_TRIES: u32 = 100;

/// What a worker's session keeps.
#[derive(Debug, Default)]
pub struct Session {
    calls: VecDeque<Call>,
    /// The number of the call that waits for its answer.
    waiting: Option<u64>,
    last: u64,
    pub following: Option<u64>,
    unsettled: Vec<StepReport>,
    ready: Option<Readiness>,
    pub exit_code: i32,
    settling: u32,
}

impl Session {
    /// Whether the call of this number waits for its answer.
    pub fn waits_for(&self, number: u64) -> bool {
        self.waiting == Some(number)
    }
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

impl World {
    /// Queues a call.
    pub fn say(&mut self, pid: usize, call: Call) {
        self.processes[pid].session.calls.push_back(call);
        if self.processes[pid].session.waiting.is_none() {
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

    pub fn next_call(&mut self, pid: usize) {
        let process = &mut self.processes[pid];
        process.session.waiting = None;
        while let Some(Call::Repeat) = process.session.calls.front() {
            process.session.calls.pop_front();
            let ready =
                process.session.ready.take().filter(|ready| !process.standing.has_place_after(ready.left));
            if let Some(ready) = ready {
                process.session.calls.push_front(Call::Ready(ready));
            }
            let unsettled = std::mem::take(&mut process.session.unsettled);
            if !unsettled.is_empty() {
                process.session.calls.push_front(Call::Steps(unsettled));
            }
        }
        // Steps that have gathered go together.
        while let [Call::Steps(_), Call::Steps(_), ..] = process.session.calls.make_contiguous() {
            let (Some(Call::Steps(mut first)), Some(Call::Steps(second))) =
                (process.session.calls.pop_front(), process.session.calls.pop_front())
            else {
                unreachable!("both were looked at")
            };
            first.extend(second);
            process.session.calls.push_front(Call::Steps(first));
        }
        let leaves = matches!(process.session.calls.front(), Some(Call::Leave(0)));
        if leaves && !process.session.unsettled.is_empty() && process.session.settling < SETTLE_TRIES {
            // The last word comes after the last step is committed.
            process.session.settling += 1;
            let unsettled = std::mem::take(&mut process.session.unsettled);
            process.session.calls.push_front(Call::Steps(unsettled));
        }
        let Some(call) = process.session.calls.front().cloned() else { return };
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
        process.session.last += 1;
        let number = process.session.last;
        process.session.waiting = Some(number);
        let delay = self.delay();
        let claim = self.processes[pid].calls;
        self.after(delay, Happening::Call(claim, Caller::Process(pid, number), ask));
        self.after(RETRY + delay * 4, Happening::Process(pid, ToProcess::Retry(number)));
    }

    fn claim(&self, pid: usize) -> WorkerClaim {
        let process = &self.processes[pid];
        WorkerClaim {
            origin: origin(process.version),
            incarnation: process.incarnation(),
            slot: process.slot,
            local_rank: process.slot.0 % self.script.workers_per_node,
            node_rank: process.node as u32,
            host: format!("host-{}", process.node),
            pid: pid as u32,
            data_address: format!("host-{}:{pid}", process.node),
            device: "none".into(),
            dataset: DataSet {
                training_samples: self.script.samples,
                fingerprint: "simulated".into(),
                order_key: 0,
                sets: Vec::new(),
            },
        }
    }

    pub fn answered(&mut self, pid: usize, number: u64, reply: Result<Reply, Refusal>) {
        let process = &mut self.processes[pid];
        if process.session.following == Some(number) {
            process.session.following = None;
            return self.fenced(pid);
        }
        if let Ok(Reply::Known(known)) = reply {
            return if known {
            } else {
                self.fenced(pid)
            };
        }
        if process.session.waiting != Some(number) {
            return;
        }
        process.session.waiting = None;
        let Some(call) = process.session.calls.pop_front() else { return };
        match (call, reply) {
            (Call::Register, Ok(Reply::Registered(id))) => {
                process.id = Some(id);
                self.follow(pid);
                self.beat(pid);
                self.load(pid);
            }
            (Call::Register, reply) => {
                if let Err(refusal @ Refusal::Version { .. }) = reply {
                    self.worker_is_refused(pid, &refusal);
                }
                return self.end_process(pid, ProcessExit::Code(NOT_LET_IN));
            }
            (Call::Steps(reports), Ok(Reply::Committed(committed))) => {
                process.session.unsettled.extend(reports);
                process.session.unsettled.retain(|report| report.step >= committed);
            }
            (Call::Ready(ready), Ok(_)) => process.session.ready = Some(ready),
            (Call::Other(Ask::Start(start)), Ok(_)) => {
                process.session.unsettled.retain(|report| report.generation >= start.generation);
            }
            (Call::Other(_) | Call::Repeat, _) => {}
            (Call::Leave(_), _) => {
                let code = process.session.exit_code;
                return self.end_process(pid, ProcessExit::Code(code));
            }
            (Call::Steps(_) | Call::Ready(_), _) => return self.fenced(pid),
        }
        self.next_call(pid);
    }

    /// The coordinator does not know this process any more.
    fn fenced(&mut self, pid: usize) {
        self.end_process(pid, ProcessExit::Code(WORKER_FAILED));
    }

    pub fn follow(&mut self, pid: usize) {
        let process = &mut self.processes[pid];
        let Some(worker) = process.id else { return };
        let incarnation = process.incarnation();
        process.session.last += 1;
        let number = process.session.last;
        process.session.following = Some(number);
        let delay = self.delay();
        let ask = Ask::Follow { worker, incarnation, stream: StreamId(0) };
        let claim = self.processes[pid].calls;
        self.after(delay, Happening::Call(claim, Caller::Process(pid, number), ask));
        self.after(RETRY + delay * 4, Happening::Process(pid, ToProcess::Retry(number)));
    }

    /// A coordinator may have forgotten what was not durable.
    pub fn line_opened(&mut self, pid: usize) {
        let process = &mut self.processes[pid];
        // After the call that is under way.
        let next = usize::from(process.session.waiting.is_some()).min(process.session.calls.len());
        process.session.calls.insert(next, Call::Repeat);
        if process.session.waiting.is_none() {
            self.next_call(pid);
        }
    }

    pub fn beat(&mut self, pid: usize) {
        let process = &mut self.processes[pid];
        let Some(worker) = process.id else { return };
        process.session.last += 1;
        let beat = Beat {
            worker,
            incarnation: process.incarnation().into(),
            age: Duration::ZERO,
            generation: process.standing.generation(),
            phase: process.phase(),
            step: Step(process.own.newest),
            collective: (process.entered, process.entered - u64::from(process.in_ring())),
            memory_in_use: Bytes(0),
            still: self.now - process.signs.since,
            in_phase: self.now - process.signs.phase_since,
            waits: process.waits_for_coordinator(),
            paces: process.signs.longest.iter().map(|(phase, longest)| (*phase, *longest)).collect(),
        };
        let (number, factor) = (process.session.last, process.beat_factor);
        let delay = self.delay();
        let claim = self.processes[pid].calls;
        self.after(delay, Happening::Call(claim, Caller::Process(pid, number), Ask::Heartbeat(beat)));
        self.after(HEARTBEAT_INTERVAL.mul_f64(factor), Happening::Process(pid, ToProcess::Beat));
    }
}
