//! A world of one: no coordinator, the same trainer. Steps are logged here, and a signal ends training in
//! good order.

use std::{
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicI32, Ordering::Relaxed},
    },
};

use coxswain_proto::{cache_plan::CacheDecision, ids::Step, run_spec::RunSpec};
use coxswain_worker::{
    link::{CheckpointNews, Follower, LinkError, Report, SoloLink},
    train::checkpoint::Store,
    trainer::{Trainer, TrainerFailure, TrainerOutcome},
};

use crate::{
    exit::{CliError, Exit, Outcome},
    render::{say, summary},
    supervise::signals,
};

/// Trains to the end, or to the checkpoint after the first signal.
pub fn train(spec: &RunSpec, mut trainer: impl Trainer) -> Outcome {
    let failed = |failure: TrainerFailure| CliError::new(Exit::of_failure(failure.kind), failure.message);
    let signal = catch_signal()?;
    let facts = trainer.open(spec).map_err(failed)?;
    let plan =
        coxswain_proto::plan::Plan::new(&spec.train, facts.training_samples).map_err(CliError::usage)?;
    let (first_step, decided) = first_step(spec)?;
    let (log_every, total_steps) = (spec.train.log_every, plan.total_steps());
    let log = StepLog { log_every, total_steps, signal: Arc::clone(&signal) };
    let link = SoloLink::new(first_step).with_cache(&spec.cache, &plan, decided).followed_by(log);
    tracing::info!(run = spec.run.name, first_step = first_step.0, steps = total_steps, "training alone");
    match trainer.train(spec, Box::new(link)) {
        TrainerOutcome::Done => match signal.load(Relaxed) {
            0 => {
                say(summary::of_run(Path::new(&spec.run.output_dir), true).trim_end());
                Ok(())
            }
            number => Err(CliError::silent(Exit::Signal(number))),
        },
        TrainerOutcome::Aborted(reason) => Err(CliError::new(Exit::Internal, reason)),
        TrainerOutcome::Failed(failure) => Err(failed(failure)),
    }
}

/// Where the newest complete checkpoint says that training goes on, and what it remembers of kept features.
fn first_step(spec: &RunSpec) -> Result<(Step, Option<CacheDecision>), CliError> {
    let output = Path::new(&spec.run.output_dir);
    if !spec.train.resume {
        coxswain_coordinator::set_aside(output).map_err(|error| CliError::new(Exit::Internal, error))?;
        return Ok((Step(0), None));
    }
    let complete = Store::new(output).complete();
    let newest = complete.map_err(|error| CliError::new(Exit::BadInput, error))?.pop();
    Ok(newest.map_or((Step(0), None), |found| (Step(found.manifest.step), found.manifest.cache_phase)))
}

/// The first signal that arrives, 0 until then; the second ends the process.
fn catch_signal() -> Result<Arc<AtomicI32>, CliError> {
    let caught = Arc::new(AtomicI32::new(0));
    let seen = Arc::clone(&caught);
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(CliError::internal)?;
    let mut signals = {
        let _inside = runtime.enter();
        signals::catch().map_err(CliError::internal)?
    };
    std::thread::spawn(move || {
        runtime.block_on(async {
            loop {
                let number = signals.next().await;
                if seen.load(Relaxed) == 0 {
                    seen.store(number, Relaxed);
                    tracing::info!(
                        signal = signals::name(number),
                        "finishing the current step; send the signal again to exit immediately"
                    );
                } else if signals::insists_after(seen.load(Relaxed), number) {
                    // Nothing half-written is left behind: checkpoints appear by rename.
                    let _ = nix::sys::signal::raise(nix::sys::signal::Signal::SIGKILL);
                }
            }
        });
    });
    Ok(caught)
}

/// Logs steps and news; the first signal ends training in good order.
struct StepLog {
    log_every: u64,
    total_steps: u64,
    signal: Arc<AtomicI32>,
}

impl Follower for StepLog {
    fn report(&mut self, report: &Report) -> Result<(), LinkError> {
        match report {
            Report::Step(done)
                if done.step.0.is_multiple_of(self.log_every) || done.step.0 + 1 == self.total_steps =>
            {
                let loss = done.totals.loss_sum / done.totals.valid_count.max(1.0);
                let ms = done.times.total.as_millis();
                tracing::info!(
                    step = done.step.0 + 1,
                    of = self.total_steps,
                    epoch = done.epoch,
                    loss = format_args!("{loss:.5}"),
                    grad_norm = format_args!("{:.4}", done.totals.grad_norm),
                    ms,
                    "step"
                );
            }
            Report::Checkpoint { step, path, news: CheckpointNews::Complete, .. } => {
                tracing::info!(%step, path, "checkpoint");
            }
            Report::Checkpoint { step, news: CheckpointNews::Failed(why), .. } => {
                tracing::warn!(%step, why, "checkpoint not written; training continues");
            }
            Report::Note(text) => tracing::info!("{text}"),
            Report::HardwareFault(text) => tracing::warn!("{text}"),
            _ => {}
        }
        Ok(())
    }

    fn stops(&self) -> bool {
        self.signal.load(Relaxed) != 0
    }
}
