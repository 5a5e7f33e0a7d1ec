//! The trainer on its own OS thread, so that the session answers while it computes.

use std::{
    any::Any,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::Arc,
};

use coxswain_nn::pulse::Pulse;
use coxswain_proto::{ids::Step, run_spec::RunSpec};
use tokio::sync::oneshot;

use super::{SessionError, channel::ChannelLink};
use crate::{
    device::Device,
    link::{Link, Phase},
    memory,
    trainer::{DataSetFacts, FailureKind, Trainer, TrainerFailure, TrainerOutcome},
};

/// What the trainer has found, and what it computes on.
pub(super) type TrainerSetup = Result<(DataSetFacts, Device), TrainerFailure>;

/// Opens the data set at once, and trains when it is given its link.
pub(super) struct TrainerThread {
    opened: oneshot::Receiver<TrainerSetup>,
    link: oneshot::Sender<Box<dyn Link + Send>>,
    outcome: oneshot::Receiver<TrainerOutcome>,
}

impl TrainerThread {
    pub fn start(spec: RunSpec, mut trainer: impl Trainer, pulse: Arc<Pulse>) -> Result<Self, SessionError> {
        let (tell_opened, opened) = oneshot::channel();
        let (link, get_link) = oneshot::channel::<Box<dyn Link + Send>>();
        let (tell_outcome, outcome) = oneshot::channel();
        let body = move || {
            pulse.install();
            let opened = catch_unwind(AssertUnwindSafe(|| Ok((trainer.open(&spec)?, trainer.device()))));
            let _ = tell_opened.send(opened.unwrap_or_else(|panic| Err(panicked(panic.as_ref()))));
            // No link comes when the session has ended already.
            let Ok(link) = get_link.blocking_recv() else { return };
            let trained = catch_unwind(AssertUnwindSafe(|| trainer.train(&spec, link)));
            let _ = tell_outcome
                .send(trained.unwrap_or_else(|panic| TrainerOutcome::Failed(panicked(panic.as_ref()))));
        };
        let thread = std::thread::Builder::new().name("trainer".into()).spawn(body);
        thread.map_err(|error| SessionError::Failed {
            kind: FailureKind::Internal,
            message: format!("cannot start the trainer thread: {error}"),
        })?;
        Ok(Self { opened, link, outcome })
    }

    /// Waits for the data set to be opened.
    pub async fn opened(mut self) -> (Self, TrainerSetup) {
        let opened =
            (&mut self.opened).await.unwrap_or_else(|_| Err(panicked(&"the trainer thread is gone")));
        (self, opened)
    }

    /// Trains to the end.
    pub async fn train(self, link: ChannelLink) -> TrainerOutcome {
        if self.link.send(Box::new(link)).is_err() {
            return TrainerOutcome::Failed(panicked(&"the trainer thread is gone"));
        }
        self.outcome.await.unwrap_or_else(|_| TrainerOutcome::Failed(panicked(&"the trainer thread is gone")))
    }
}

/// A panic as a failure: memory that a device refused, or a defect of ours, told as far as it is known.
fn panicked(panic: &(dyn Any + Send)) -> TrainerFailure {
    let text = panic.downcast_ref::<&str>().map(ToString::to_string);
    let text = text.or_else(|| panic.downcast_ref::<String>().cloned());
    let panicked = format!("the trainer panicked: {}", text.unwrap_or_else(|| "no message".into()));
    // Work that is not guarded says nothing of memory that its device refused: what it was for is not there.
    let (kind, message) = match memory::refused() {
        Some(refusal) => (FailureKind::OutOfMemory, format!("out of memory: {refusal} ({panicked})")),
        None => (FailureKind::Internal, panicked),
    };
    TrainerFailure::new(kind, Phase::Loading, Step(0), message)
}
