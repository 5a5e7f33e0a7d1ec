//! Tells the coordinator how workers ended, until it has heard it.
//!
//! A report names the process, so that one that arrives late is not taken for its successor's; one that is
//! still under way when its worker is started again is dropped.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::{Duration, Instant},
};

use coxswain_proto::{
    calls,
    order::DamagedRow,
    v1::{self, BadSample, KillingSample, ReportExitRequest, report_exit_request},
};
use coxswain_worker::feeder::note::SampleNote;
use nix::libc::SIGKILL;
use tokio::task::AbortHandle;
use tonic::Code;

use super::{machine::ProcessExit, memory_kills::MemoryKills};
use crate::control::{Access, prompt};

/// Before a report that did not get through is sent again.
const RETRY: Duration = Duration::from_millis(100);

/// How a worker's process ended.
#[derive(Debug)]
pub struct WorkerExit {
    /// The process; 0 if it could not be started.
    pub pid: u32,
    /// Exit code or signal.
    pub how: ProcessExit,
    /// What it was reading when a signal ended it.
    pub read: Option<SampleNote>,
}

/// Reports under way, by rank.
#[derive(Debug)]
pub struct Exits {
    access: Access,
    node_id: String,
    under_way: BTreeMap<u32, AbortHandle>,
    memory_kills: MemoryKills,
    /// Ranks whose last process the kernel killed because memory ran out.
    starved: BTreeSet<u32>,
}

impl Exits {
    /// Reports of the launcher that is called `node_id`, from now on.
    pub fn new(access: Access, node_id: String, now: Instant) -> Self {
        let memory_kills = MemoryKills::of_this_process(now);
        Self { access, node_id, under_way: BTreeMap::new(), memory_kills, starved: BTreeSet::new() }
    }

    /// Time passes: kills that no worker's end has followed are other processes'.
    pub fn look(&mut self, now: Instant) {
        self.memory_kills.look(now);
    }

    /// Sends a report, and again while the coordinator is away.
    pub fn report(&mut self, rank: u32, exit: WorkerExit) {
        let ended = match exit.how {
            ProcessExit::Code(code) => report_exit_request::Ended::ExitCode(code),
            ProcessExit::Signal(signal) => report_exit_request::Ended::Signal(signal),
        };
        let out_of_memory = exit.how == ProcessExit::Signal(SIGKILL) && self.memory_kills.claim();
        if out_of_memory {
            self.starved.insert(rank);
        }
        let request = ReportExitRequest {
            node_id: self.node_id.clone(),
            rank,
            ended: Some(ended),
            pid: exit.pid,
            sample: exit.read.map(killing_sample),
            out_of_memory,
        };
        let access = self.access.clone();
        let task = tokio::spawn(async move {
            while let Err(status) = access.coordinator().report_exit(prompt(request.clone())).await {
                // A launcher that is not known asks for its place again, and has it then.
                if !calls::may_answer_later(status.code()) && status.code() != Code::NotFound {
                    tracing::debug!(%status, "the coordinator did not accept a worker's exit");
                    return;
                }
                tokio::time::sleep(RETRY).await;
            }
        });
        self.under_way.insert(rank, task.abort_handle());
    }

    /// The worker is about to be started again; whether the kernel killed its last process because memory ran
    /// out.
    pub fn forget(&mut self, rank: u32) -> bool {
        if let Some(task) = self.under_way.remove(&rank) {
            task.abort();
        }
        self.starved.remove(&rank)
    }
}

fn killing_sample(noted: SampleNote) -> KillingSample {
    let SampleNote { generation, epoch, position, row: DamagedRow { row, begin, end } } = noted;
    let row = Some(v1::DamagedRow { row, begin, end });
    KillingSample { generation: generation.0, sample: Some(BadSample { epoch, position, row }) }
}

impl Drop for Exits {
    fn drop(&mut self) {
        for task in self.under_way.values() {
            task.abort();
        }
    }
}
