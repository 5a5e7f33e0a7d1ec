//! Tells the coordinator how workers ended, until it has heard it.
//!
//! A report names the process, so that one that arrives late is not taken for its successor's; one that is
//! still under way when its worker is started again is dropped.

use std::{collections::BTreeMap, time::Duration};

use coxswain_proto::{
    calls,
    order::DamagedRow,
    v1::{self, BadSample, KillingSample, ReportExitRequest, report_exit_request},
};
use coxswain_worker::feeder::note::Noted;
use tokio::task::AbortHandle;

use super::machine::Ended;
use crate::control::{Access, prompt};

/// Before a report that did not get through is sent again.
const RETRY: Duration = Duration::from_millis(100);

/// Reports under way, by rank.
#[derive(Debug)]
pub struct Exits {
    access: Access,
    node_id: String,
    under_way: BTreeMap<u32, AbortHandle>,
}

impl Exits {
    /// Reports of the launcher that is called `node_id`.
    pub fn new(access: Access, node_id: String) -> Self {
        Self { access, node_id, under_way: BTreeMap::new() }
    }

    /// Sends a report, and again while the coordinator is away. `read` is what the process was reading when a
    /// signal ended it.
    pub fn report(&mut self, rank: u32, pid: u32, how: Ended, read: Option<Noted>) {
        let ended = match how {
            Ended::Code(code) => report_exit_request::Ended::ExitCode(code),
            Ended::Signal(signal) => report_exit_request::Ended::Signal(signal),
        };
        let sample = read.map(killing_sample);
        let node_id = self.node_id.clone();
        let request = ReportExitRequest { node_id, rank, ended: Some(ended), pid, sample };
        let access = self.access.clone();
        let task = tokio::spawn(async move {
            while let Err(status) = access.coordinator().report_exit(prompt(request.clone())).await {
                if !calls::may_answer_later(status.code()) {
                    tracing::debug!(%status, "a worker's end was not taken");
                    return;
                }
                tokio::time::sleep(RETRY).await;
            }
        });
        self.under_way.insert(rank, task.abort_handle());
    }

    /// The worker is about to be started again.
    pub fn forget(&mut self, rank: u32) {
        if let Some(task) = self.under_way.remove(&rank) {
            task.abort();
        }
    }
}

fn killing_sample(noted: Noted) -> KillingSample {
    let Noted { generation, epoch, position, row: DamagedRow { row, begin, end } } = noted;
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
