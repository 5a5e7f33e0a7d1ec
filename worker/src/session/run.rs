//! One worker's life on the control plane, from `GetRun` to `Leave`.

use std::{
    cell::Cell,
    collections::hash_map::RandomState,
    hash::{BuildHasher, Hasher},
    path::PathBuf,
    sync::Arc,
    time::Duration,
};

use coxswain_proto::{
    VERSION, calls,
    ids::{Generation, Step},
    limits,
    run_spec::RunSpec,
    v1,
};
use tokio::sync::{mpsc, watch};

use super::{
    SessionError, SessionOptions,
    channel::{ChannelLink, Message, SharedChannel},
    client::{Backoff, Client, client, persist},
    convert, hold,
    reporter::{Reporter, Voice},
    thread::TrainerThread,
};
use crate::{
    clock,
    device::Device,
    health::{self, Site},
    link::{LinkError, Phase, Report},
    trainer::{DataSetFacts, FailureKind, Trainer, TrainerFailure, TrainerOutcome},
};
use coxswain_nn::pulse::Longest;

/// How long a worker that has failed looks for a coordinator to tell: one that has died is back by then, one
/// whose run is over is not coming back.
const LAST_WORD: Duration = Duration::from_secs(3);

/// Joins the run at `options.endpoint`, trains until it is over, and leaves in order.
pub async fn run(options: SessionOptions, trainer: impl Trainer) -> Result<(), SessionError> {
    // Where a test stops a process that nobody has heard of yet.
    hold::at(Phase::Joining, Step(0));
    let incarnation = fresh_incarnation();
    let client = client(&options)?;
    let run = get_run(&options, &client).await?;
    let spec = read_spec(&options, &run)?;
    let shared = Arc::<SharedChannel>::default();
    let output_dir = PathBuf::from(&spec.run.output_dir);
    let thread = TrainerThread::start(spec, trainer, shared.pulse.clone())?;
    let (thread, opened) = thread.opened().await;
    let mut session = Session {
        options,
        client,
        run_id: run.run_id,
        incarnation,
        worker_id: None,
        device: Device::Cpu,
        worth_knowing: Vec::new(),
        shared,
        lines: watch::Sender::new(0),
    };
    let (facts, device) = match opened {
        Ok(opened) => opened,
        Err(failure) => return Err(session.fail(failure).await),
    };
    session.device = device;
    session.check(output_dir).await?;
    session.register(facts).await?;
    session.train(thread).await
}

/// Who this worker is to the coordinator.
struct Session {
    options: SessionOptions,
    client: Client,
    run_id: String,
    incarnation: String,
    /// None before `Register`.
    worker_id: Option<u64>,
    /// What computes; the CPU before that is known.
    device: Device,
    /// What people may want to know of its machine.
    worth_knowing: Vec<String>,
    shared: Arc<SharedChannel>,
    /// Counts the lines opened: each may be to a coordinator that has forgotten what was not durable.
    lines: watch::Sender<u64>,
}

async fn get_run(options: &SessionOptions, client: &Client) -> Result<v1::GetRunResponse, SessionError> {
    let request = v1::GetRunRequest { version: VERSION.to_owned(), run_id: options.run_id.clone() };
    let run = persist(options, || {
        let (mut client, request) = (client.clone(), request.clone());
        async move { client.get_run(request).await }
    })
    .await?;
    if run.world_size != options.world_size {
        let reason =
            format!("the run has {} workers, but WORLD_SIZE is {}", run.world_size, options.world_size);
        return Err(SessionError::Refused { endpoint: options.endpoint.to_string(), reason });
    }
    Ok(run)
}

fn read_spec(options: &SessionOptions, run: &v1::GetRunResponse) -> Result<RunSpec, SessionError> {
    let protocol = |reason: String| SessionError::Protocol { endpoint: options.endpoint.to_string(), reason };
    let document = run.spec.as_ref().ok_or_else(|| protocol("get_run.spec: missing".into()))?;
    RunSpec::try_from(document).map_err(|error| protocol(format!("get_run.spec: {error}")))
}

impl Session {
    /// Looks at the machine. One that is not to be used is told, and ends this worker before it has a slot.
    async fn check(&mut self, output_dir: PathBuf) -> Result<(), SessionError> {
        let (driver, device) = (self.options.driver.clone(), self.device);
        let looked = tokio::task::spawn_blocking(move || {
            let site = Site { output_dir: &output_dir, device, driver: driver.as_deref() };
            health::check(&site)
        });
        match looked.await {
            Ok(Ok(worth_knowing)) => {
                self.worth_knowing = worth_knowing;
                Ok(())
            }
            Ok(Err(message)) => Err(self
                .fail(TrainerFailure::new(FailureKind::Hardware, Phase::Joining, Step(0), message))
                .await),
            // A defect of ours says nothing of the machine.
            Err(error) => {
                tracing::warn!(%error, "the health checks of this machine failed to run");
                Ok(())
            }
        }
    }

    async fn register(&mut self, facts: DataSetFacts) -> Result<(), SessionError> {
        let options = &self.options;
        let request = v1::RegisterRequest {
            version: VERSION.to_owned(),
            run_id: self.run_id.clone(),
            incarnation: self.incarnation.clone(),
            host: options.host.clone(),
            pid: std::process::id(),
            rank: options.rank.0,
            local_rank: options.local_rank,
            node_rank: options.node_rank,
            data_address: options.data_address.clone(),
            device: self.device.to_string(),
            training_samples: facts.training_samples,
            dataset_fingerprint: facts.fingerprint,
            order_key: facts.order_key,
            sets: facts.sets.iter().map(Into::into).collect(),
        };
        let asked = Cell::new((clock::now(), clock::since_epoch()));
        let registered = persist(options, || {
            let (mut client, request) = (self.client.clone(), request.clone());
            asked.set((clock::now(), clock::since_epoch()));
            async move { client.register(request).await }
        })
        .await?;
        self.worker_id = Some(registered.worker_id);
        let (since, ours) = asked.get();
        // A coordinator that does not say has no clock to compare with.
        let theirs = Some(registered.unix_ms).filter(|ms| *ms > 0).map(Duration::from_millis);
        let differ = theirs.and_then(|theirs| health::clocks_differ(ours, theirs, since.elapsed()));
        self.worth_knowing.extend(differ);
        Ok(())
    }

    /// Follows directives, sends heartbeats and reports until the trainer is done, then says goodbye.
    async fn train(self, thread: TrainerThread) -> Result<(), SessionError> {
        let worker_id = self.worker_id.unwrap_or_default();
        let (reports, queue) = mpsc::channel(limits::REPORT_QUEUE);
        for line in self.worth_knowing.iter().cloned() {
            // There is room: nobody else has the queue yet.
            let _ = reports.try_send(Message::Report(Generation(0), Report::Note(line)));
        }
        if let (Device::Cuda(gpu), Some(driver)) = (self.device, self.options.driver.clone()) {
            let told = reports.downgrade();
            health::watch::follow(driver, gpu, move |news| {
                let Some(told) = told.upgrade() else { return false };
                // A queue that is full is one of a worker that is about to be lost.
                let say = |report| drop(told.try_send(Message::Report(Generation(0), report)));
                news.into_iter().for_each(say);
                true
            });
        }
        let link = ChannelLink::new(self.shared.clone(), reports, self.run_id.clone());
        let voice = Voice {
            client: self.client.clone(),
            options: self.options.clone(),
            run_id: self.run_id.clone(),
            worker_id,
            incarnation: self.incarnation.clone(),
        };
        let reporter = Reporter::new(voice, self.shared.clone());
        let mut reporter = tokio::spawn(reporter.run(queue, self.lines.subscribe()));
        let outcome = thread.train(link);
        tokio::pin!(outcome);
        let (outcome, reported) = {
            let following = self.follow(worker_id);
            let beating = self.beat(worker_id);
            tokio::pin!(following, beating);
            let (mut lost, mut reported) = (None, None);
            let outcome = loop {
                tokio::select! {
                    outcome = &mut outcome => break outcome,
                    error = &mut following, if lost.is_none() => lost = Some(self.cut(error)),
                    error = &mut beating, if lost.is_none() => lost = Some(self.cut(error)),
                    // It ends in order when the trainer has dropped its end of the queue, which may be just
                    // before the outcome.
                    ended = &mut reporter, if reported.is_none() => {
                        reported = Some(flatten(ended).map_err(|error| self.cut(error)));
                    }
                }
            };
            match (lost, reported) {
                (Some(error), _) => (outcome, Err(error)),
                (None, Some(reported)) => (outcome, reported),
                (None, None) => (outcome, flatten(reporter.await)),
            }
        };
        self.part(outcome, reported).await
    }

    /// The control plane is gone for this worker: the trainer must end.
    fn cut(&self, error: SessionError) -> SessionError {
        self.shared.cut(match &error {
            SessionError::Aborted(reason) => LinkError::Over(reason.clone()),
            other => LinkError::Lost(other.to_string()),
        });
        error
    }

    /// Says how it ended. The trainer's own failure outweighs a lost coordinator.
    async fn part(
        mut self,
        outcome: TrainerOutcome,
        reported: Result<(), SessionError>,
    ) -> Result<(), SessionError> {
        match outcome {
            TrainerOutcome::Failed(failure) if failure.kind != FailureKind::Internal || reported.is_ok() => {
                Err(self.fail(failure).await)
            }
            TrainerOutcome::Failed(_) => reported,
            TrainerOutcome::Aborted(reason) => {
                self.leave(1, &reason).await;
                Err(SessionError::Aborted(reason))
            }
            TrainerOutcome::Done => {
                reported?;
                self.leave(0, "done").await;
                Ok(())
            }
        }
    }

    /// Reports a failure, and returns it as this session's error.
    async fn fail(&mut self, failure: TrainerFailure) -> SessionError {
        let options = &self.options;
        let request = v1::ReportFailureRequest {
            worker_id: self.worker_id,
            failure: Some(convert::failure(&failure, self.shared.position(), options)),
            run_id: self.run_id.clone(),
            bad_sample: None,
        };
        let told = persist(options, || {
            let (mut client, request) = (self.client.clone(), request.clone());
            async move { client.report_failure(request).await }
        });
        match tokio::time::timeout(LAST_WORD, told).await {
            Ok(Ok(_)) => {}
            Ok(Err(error)) => tracing::warn!(%error, "could not report the failure to the coordinator"),
            Err(_) => tracing::warn!("could not report the failure: the coordinator does not answer"),
        }
        self.leave(1, &failure.message).await;
        SessionError::Failed { kind: failure.kind, message: failure.message }
    }

    /// The last word. Whether it is heard changes nothing here.
    async fn leave(&mut self, exit_code: i32, reason: &str) {
        let Some(worker_id) = self.worker_id else { return };
        let request = v1::LeaveRequest { worker_id, exit_code, reason: reason.to_owned() };
        let message = tokio::time::timeout(Duration::from_secs(2), self.client.leave(request)).await;
        if !matches!(message, Ok(Ok(_))) {
            tracing::debug!("could not tell the coordinator that this worker leaves");
        }
    }

    /// Follows directives for ever; returns why that is over.
    async fn follow(&self, worker_id: u64) -> SessionError {
        let mut backoff = Backoff::new(self.options.patience);
        loop {
            let request = v1::FollowRequest { worker_id, incarnation: self.incarnation.clone() };
            let reason = match self.client.clone().follow(request).await {
                Ok(stream) => {
                    backoff = Backoff::new(self.options.patience);
                    self.lines.send_modify(|lines| *lines += 1);
                    match self.obey_all(stream.into_inner()).await {
                        Ok(reason) => reason,
                        Err(error) => return error,
                    }
                }
                Err(status) if calls::may_answer_later(status.code()) => status.message().to_owned(),
                Err(status) => {
                    let (endpoint, reason) = (self.options.endpoint.to_string(), status.message().to_owned());
                    return SessionError::Refused { endpoint, reason };
                }
            };
            tracing::debug!(reason, "lost the stream from the coordinator; reconnecting");
            if !backoff.pause().await {
                let endpoint = self.options.endpoint.to_string();
                return SessionError::Lost { endpoint, waited: backoff.waited(), reason };
            }
        }
    }

    /// Obeys directives until the stream ends; returns why it did.
    async fn obey_all(&self, mut stream: tonic::Streaming<v1::Directive>) -> Result<String, SessionError> {
        loop {
            match stream.message().await {
                Ok(Some(directive)) => match convert::told(directive) {
                    Ok(told) => self.shared.told(told),
                    Err(reason) => {
                        let endpoint = self.options.endpoint.to_string();
                        return Err(SessionError::Protocol { endpoint, reason });
                    }
                },
                Ok(None) => return Ok("the stream ended".into()),
                Err(status) => return Ok(status.message().to_owned()),
            }
        }
    }

    /// Heartbeats for ever; returns why that is over.
    async fn beat(&self, worker_id: u64) -> SessionError {
        let mut clock = tokio::time::interval(limits::HEARTBEAT_INTERVAL);
        clock.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        let (mut told, mut line) = (Longest::default(), 0);
        loop {
            clock.tick().await;
            let opened = *self.lines.borrow();
            if std::mem::replace(&mut line, opened) != opened {
                // Another coordinator may have forgotten it.
                told = Longest::default();
            }
            let (at, pulse) = (self.shared.position(), self.shared.pulse.reading());
            let request = v1::HeartbeatRequest {
                worker_id,
                incarnation: self.incarnation.clone(),
                generation: at.generation.0,
                phase: v1::WorkerPhase::from(at.phase).into(),
                step: at.step.0,
                collective_entered: at.entered,
                collective_finished: at.finished,
                memory_in_use: (self.options.memory_in_use)().0,
                still_ms: convert::whole_ms(pulse.still),
                in_phase_ms: convert::whole_ms(pulse.in_phase),
                paces: convert::paces(&told, &pulse.longest),
                waits_for_coordinator: pulse.waits,
            };
            // A coordinator that does not answer is the stream's affair; one that has given this worker up is
            // ours.
            let Ok(answer) = self.client.clone().heartbeat(request).await else { continue };
            if !answer.get_ref().known {
                let endpoint = self.options.endpoint.to_string();
                let reason = "it has declared this worker lost".to_owned();
                return SessionError::Refused { endpoint, reason };
            }
            told = pulse.longest;
        }
    }
}

fn flatten(ended: Result<Result<(), SessionError>, tokio::task::JoinError>) -> Result<(), SessionError> {
    ended.unwrap_or_else(|error| {
        Err(SessionError::Failed {
            kind: FailureKind::Internal,
            message: format!("internal error: the task that reports to the coordinator ended: {error}"),
        })
    })
}

/// Random, so that no two process lives share one. The standard library seeds its hashers from the operating
/// system.
fn fresh_incarnation() -> String {
    let word = || RandomState::new().build_hasher().finish();
    format!("{:016x}{:016x}", word(), word())
}
