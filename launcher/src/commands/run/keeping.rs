//! A launch and the bucket that its run is kept in: what it begins with, and what it waits for at its end.

use std::{
    path::Path,
    pin::pin,
    time::{Duration, Instant},
};

use coxswain_proto::run_spec::RunSpec;

use crate::{
    bucket::{BucketError, BucketPlace, Record, Uploader},
    clock,
    commands::spec_args::{launched_before, pin_as},
    exit::{CliError, Exit, Outcome},
    launch::plan::{Hosting, Plan},
    supervise::{
        console::{Console, Terminal},
        signals,
    },
};

/// Finds the run's pretrained model, after a launch elsewhere that is to be gone on with as it was; returns
/// what its bucket has, if it may be this launcher's to bring that.
pub fn pin(spec: &mut RunSpec, plan: &Plan) -> Result<Option<BucketPlace>, CliError> {
    let place = match plan.hosting {
        Hosting::No => None,
        Hosting::Yes | Hosting::IfFree => BucketPlace::look(spec)?,
    };
    let before = place.as_ref().filter(|_| spec.train.resume).and_then(BucketPlace::launched);
    let before = before.or_else(|| launched_before(spec));
    pin_as(spec, before)?;
    Ok(place)
}

/// The end of a launch whose run is kept.
pub struct KeptEnd<'a> {
    /// The run.
    pub spec: &'a RunSpec,
    /// Where its end is shown.
    pub terminal: &'a Terminal,
    /// How long it may take after a signal.
    pub patience: Duration,
    /// When the first signal came, if one did, and which.
    pub signalled: Option<(Instant, i32)>,
}

impl KeptEnd<'_> {
    /// Waits until the last checkpoint and the results are in the bucket; from a signal on, only as long as
    /// workers may take to leave. A second signal ends the wait.
    pub async fn keep(&self, uploader: &Uploader) -> Outcome {
        let mut until = self.signalled.map(|(at, _)| at + self.patience);
        let first = self.signalled.map(|(_, first)| first);
        let mut signals = signals::catch().map_err(|error| CliError::new(Exit::Internal, error))?;
        let mut finishing = pin!(uploader.finish());
        let internal = |why: String| CliError::new(Exit::Internal, why);
        let failed = loop {
            tokio::select! {
                kept = &mut finishing => match kept {
                    Ok(()) => return Ok(()),
                    Err(error @ BucketError::Superseded { .. }) => break error.into(),
                    Err(error) => break internal(error.to_string()),
                },
                () = sleep(until) => break internal("--shutdown-timeout has passed".to_owned()),
                signal = signals.insistence(first) => match until {
                    None => until = Some(clock::now() + self.patience),
                    Some(_) => break internal(format!("a second signal, {}", signals::name(signal))),
                },
            }
        };
        let why = failed.message.unwrap_or_default();
        let output = &self.spec.run.output_dir;
        let step = Record::load(Path::new(output)).and_then(|record| record.step);
        let there = step.map_or("no checkpoint".to_owned(), |step| format!("the checkpoint of step {step}"));
        self.terminal.line(&format!(
            "the run's last state is in {output}, but not in its bucket ({why}); the bucket has {there}"
        ));
        Err(CliError::silent(failed.exit))
    }
}

async fn sleep(until: Option<Instant>) {
    match until {
        Some(at) => tokio::time::sleep_until(at.into()).await,
        None => std::future::pending().await,
    }
}
