//! Takes what the trainer says off the queue, in order, and sends each until the coordinator has taken it.
//!
//! Steps are batched: what gathers while a call is under way goes with the next one, so a slow coordinator
//! sees fewer and larger calls, and a fast one sees each step at once.
//!
//! A coordinator that was restarted knows what it had journaled: committed steps, not the reports of single
//! ranks, and generations, not who was ready or had said where it starts. So steps are kept until they are
//! committed, and go with every call: whichever coordinator takes it finds no gap before the newest one. All
//! of it is said again on every new line.

use std::{collections::VecDeque, sync::Arc, time::Duration};

use coxswain_proto::{ids::Generation, v1};
use tokio::sync::{mpsc, watch};
use tonic::Code;

use super::{
    SessionError, SessionOptions,
    channel::{Message, SharedChannel},
    client::{Client, answer_or_refusal, persist, refused},
    convert,
};
use crate::link::Report;

/// Steps in one call.
const BATCH: usize = 64;
/// Between two tries to have the last steps committed: the other ranks' reports are milliseconds behind.
const SETTLE_PAUSE: Duration = Duration::from_millis(10);
const SETTLE_TRIES: u32 = 100;

/// One worker's calls to its coordinator.
pub(super) struct Voice {
    pub client: Client,
    pub options: SessionOptions,
    pub run_id: String,
    pub worker_id: u64,
    pub incarnation: String,
}

pub(super) struct Reporter {
    voice: Voice,
    shared: Arc<SharedChannel>,
    /// Reported steps that are not known to be committed.
    unsettled: VecDeque<v1::StepReport>,
    /// The last time the trainer was ready.
    ready: Option<v1::ReadyRequest>,
    /// Where it started last.
    started: Option<v1::ReportStartRequest>,
    notes: u64,
}

impl Reporter {
    pub fn new(voice: Voice, shared: Arc<SharedChannel>) -> Self {
        Self { voice, shared, unsettled: VecDeque::new(), ready: None, started: None, notes: 0 }
    }

    /// Runs until the trainer has dropped its end and everything is sent.
    pub async fn run(
        mut self,
        mut queue: mpsc::Receiver<Message>,
        mut lines: watch::Receiver<u64>,
    ) -> Result<(), SessionError> {
        let mut waiting = Vec::with_capacity(BATCH);
        loop {
            tokio::select! {
                count = queue.recv_many(&mut waiting, BATCH) => match count {
                    0 => return self.settle().await,
                    _ => self.send_all(&mut waiting).await?,
                },
                Ok(()) = lines.changed() => self.repeat().await?,
            }
        }
    }

    async fn send_all(&mut self, waiting: &mut Vec<Message>) -> Result<(), SessionError> {
        let mut steps = Vec::new();
        for message in waiting.drain(..) {
            match message {
                Message::Report(_, Report::Step(report)) => steps.push((&report).into()),
                other => {
                    // What follows a step in time must not overtake it.
                    self.send_steps(std::mem::take(&mut steps)).await?;
                    self.send(other).await?;
                }
            }
        }
        self.send_steps(steps).await
    }

    /// Says the last steps again until they are committed: a coordinator that is lost before that would have
    /// nobody to ask. A run that is over, or ranks that do not get as far, end it.
    async fn settle(&mut self) -> Result<(), SessionError> {
        for _ in 0..SETTLE_TRIES {
            if self.unsettled.is_empty() || !self.shared.is_alive() {
                break;
            }
            tokio::time::sleep(SETTLE_PAUSE).await;
            let unsettled = self.unsettled.drain(..).collect();
            self.send_steps(unsettled).await?;
        }
        Ok(())
    }

    /// Says again what a coordinator may have forgotten.
    async fn repeat(&mut self) -> Result<(), SessionError> {
        self.send_unsettled().await?;
        if let Some(started) = self.started {
            self.send_start(started).await?;
        }
        if let Some(ready) = self.ready.take()
            && !self.shared.has_place_after(Generation(ready.left_generation))
        {
            self.send_ready(ready).await?;
        }
        Ok(())
    }

    async fn send_steps(&mut self, steps: Vec<v1::StepReport>) -> Result<(), SessionError> {
        if steps.is_empty() {
            return Ok(());
        }
        self.unsettled.extend(steps);
        self.send_unsettled().await
    }

    /// A step that was reported before has no further effect; few are, unless another rank is far behind.
    async fn send_unsettled(&mut self) -> Result<(), SessionError> {
        if self.unsettled.is_empty() {
            return Ok(());
        }
        let steps = self.unsettled.iter().cloned().collect();
        let request = v1::ReportStepsRequest { worker_id: self.voice.worker_id, steps };
        let answer = persist(&self.voice.options, || {
            let (mut client, request) = (self.voice.client.clone(), request.clone());
            async move { client.report_steps(request).await }
        })
        .await?;
        self.unsettled.retain(|report| report.step >= answer.committed_steps);
        Ok(())
    }

    async fn send(&mut self, message: Message) -> Result<(), SessionError> {
        match message {
            Message::Ready { left, why } => {
                let ready = v1::ReadyRequest {
                    worker_id: self.voice.worker_id,
                    incarnation: self.voice.incarnation.clone(),
                    left_generation: left.0,
                    reason: why,
                };
                self.send_ready(ready).await
            }
            Message::Report(generation, Report::Started(start)) => {
                self.send_start(convert::start(&start, self.voice.worker_id, generation)).await
            }
            Message::Report(generation, report) => self.voice.send(generation, report, &mut self.notes).await,
        }
    }

    /// A run that is over refuses; that is how a worker that was waiting for the next generation learns it.
    async fn send_ready(&mut self, ready: v1::ReadyRequest) -> Result<(), SessionError> {
        let options = &self.voice.options;
        let answer = answer_or_refusal(options, || {
            let (mut client, request) = (self.voice.client.clone(), ready.clone());
            async move { client.ready(request).await }
        })
        .await?;
        match answer {
            Ok(_) => {
                self.ready = Some(ready);
                Ok(())
            }
            Err(status) if status.code() == Code::FailedPrecondition => {
                Err(SessionError::Aborted(status.message().to_owned()))
            }
            Err(status) => Err(refused(options, &status)),
        }
    }

    async fn send_start(&mut self, request: v1::ReportStartRequest) -> Result<(), SessionError> {
        let options = &self.voice.options;
        let answer = answer_or_refusal(options, || {
            let (mut client, request) = (self.voice.client.clone(), request);
            async move { client.report_start(request).await }
        })
        .await?;
        match answer {
            Ok(_) => {
                // What older generations did from there on is lost; what they did before it is kept until it
                // is known to be committed.
                let (generation, first) = (request.generation, request.first_step);
                self.unsettled.retain(|report| report.generation >= generation || report.step < first);
                self.started = Some(request);
                Ok(())
            }
            // The generation has ended meanwhile; the abort is on its way.
            Err(status) if status.code() == Code::FailedPrecondition => {
                self.started = None;
                Ok(())
            }
            Err(status) => Err(refused(options, &status)),
        }
    }
}

impl Voice {
    /// Reports that are no part of the ledger.
    async fn send(
        &self,
        generation: Generation,
        report: Report,
        notes: &mut u64,
    ) -> Result<(), SessionError> {
        let worker_id = self.worker_id;
        match report {
            Report::Step(_) | Report::Started(_) => {}
            Report::Memory(peaks, comparison) => {
                let phases = peaks.iter().map(Into::into).collect();
                let comparison = comparison.as_ref().map(Into::into);
                let request = v1::ReportMemoryRequest { worker_id, phases, comparison };
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
                    self.note(why, false, notes).await?;
                }
            }
            Report::BadSample(bad) => {
                let request = v1::ReportFailureRequest {
                    worker_id: Some(worker_id),
                    failure: Some(convert::bad_sample(&bad, generation, &self.options)),
                    run_id: self.run_id.clone(),
                    bad_sample: Some(convert::wire_sample(&bad)),
                };
                persist(&self.options, || {
                    let (mut client, request) = (self.client.clone(), request.clone());
                    async move { client.report_failure(request).await }
                })
                .await?;
            }
            Report::Cache(report) => {
                let request = v1::ReportCacheRequest { worker_id, report: Some(convert::cache(report)) };
                persist(&self.options, || {
                    let (mut client, request) = (self.client.clone(), request.clone());
                    async move { client.report_cache(request).await }
                })
                .await?;
            }
            Report::Note(text) => self.note(text, false, notes).await?,
            Report::HardwareFault(text) => self.note(text, true, notes).await?,
        }
        Ok(())
    }

    async fn note(&self, text: String, hardware_fault: bool, notes: &mut u64) -> Result<(), SessionError> {
        *notes += 1;
        let (worker_id, sequence) = (self.worker_id, *notes);
        let request = v1::ReportNoteRequest { worker_id, sequence, text, hardware_fault };
        persist(&self.options, || {
            let (mut client, request) = (self.client.clone(), request.clone());
            async move { client.report_note(request).await }
        })
        .await?;
        Ok(())
    }
}
