//! Takes reports off the queue, in order, and sends each until the coordinator has taken it.
//!
//! Steps are batched: whatever has gathered while a call was under way goes with the next one, so a slow coordinator sees fewer and
//! larger calls, and a fast one sees each step at once.

use std::sync::Arc;

use coxswain_proto::{ids::Rank, v1};
use tokio::sync::mpsc;

use super::{
    SessionError, SessionOptions,
    channel::Shared,
    client::{Client, persist},
    convert,
};
use crate::link::Report;

/// Steps in one call.
const BATCH: usize = 64;

pub(super) struct Reporter {
    pub client: Client,
    pub options: SessionOptions,
    pub worker_id: u64,
    pub shared: Arc<Shared>,
}

impl Reporter {
    /// Runs until the trainer has dropped its end and everything is sent.
    pub async fn run(self, mut queue: mpsc::Receiver<Report>) -> Result<(), SessionError> {
        let mut waiting = Vec::with_capacity(BATCH);
        let mut notes = 0;
        while queue.recv_many(&mut waiting, BATCH).await > 0 {
            let mut steps = Vec::new();
            for report in waiting.drain(..) {
                match report {
                    Report::Step(done) => {
                        steps.push(convert::step(done, self.shared.position().generation, self.rank()));
                        continue;
                    }
                    other => {
                        // What follows a step in time must not overtake it.
                        self.send_steps(std::mem::take(&mut steps)).await?;
                        self.send(other, &mut notes).await?;
                    }
                }
            }
            self.send_steps(steps).await?;
        }
        Ok(())
    }

    fn rank(&self) -> Rank {
        self.options.rank
    }

    async fn send_steps(&self, steps: Vec<v1::StepReport>) -> Result<(), SessionError> {
        if steps.is_empty() {
            return Ok(());
        }
        let request = v1::ReportStepsRequest { worker_id: self.worker_id, steps };
        persist(&self.options, || {
            let (mut client, request) = (self.client.clone(), request.clone());
            async move { client.report_steps(request).await }
        })
        .await?;
        Ok(())
    }

    async fn send(&self, report: Report, notes: &mut u64) -> Result<(), SessionError> {
        let (worker_id, rank) = (self.worker_id, self.rank().0);
        match report {
            Report::Step(_) => {}
            Report::Memory(peaks) => {
                let request = v1::ReportMemoryRequest { worker_id, rank, phases: convert::memory(peaks) };
                persist(&self.options, || {
                    let (mut client, request) = (self.client.clone(), request.clone());
                    async move { client.report_memory(request).await }
                })
                .await?;
            }
            Report::Checkpoint { step, path, bytes, news } => {
                let (state, why) = convert::checkpoint(news);
                let request = v1::ReportCheckpointRequest {
                    worker_id,
                    rank,
                    step: step.0,
                    state: state.into(),
                    path,
                    bytes: bytes.0,
                };
                persist(&self.options, || {
                    let (mut client, request) = (self.client.clone(), request.clone());
                    async move { client.report_checkpoint(request).await }
                })
                .await?;
                if let Some(why) = why {
                    self.note(why, notes).await?;
                }
            }
            Report::Note(text) => self.note(text, notes).await?,
        }
        Ok(())
    }

    async fn note(&self, text: String, notes: &mut u64) -> Result<(), SessionError> {
        *notes += 1;
        let request = v1::ReportNoteRequest { worker_id: self.worker_id, sequence: *notes, text };
        persist(&self.options, || {
            let (mut client, request) = (self.client.clone(), request.clone());
            async move { client.report_note(request).await }
        })
        .await?;
        Ok(())
    }
}
