//! What a launcher says, leaves and hands over when everything has ended.

use std::path::Path;

use coxswain_coordinator::journal::{Fate, History};
use coxswain_proto::v1::Failure;

use super::{Launch, coordinating::Coordinating};
use crate::{
    commands::ending,
    control::Access,
    exit::{Exit, Failed, Outcome},
    notify::Notifier,
    render::summary,
    supervise::{console::Console, failure_file, report::Report},
};

impl Launch<'_> {
    /// What the launcher with the coordinator says at the end.
    pub(super) async fn end(
        &self,
        coordinating: &Coordinating<'_>,
        mut report: Report,
        notifier: Option<Notifier>,
        access: &Access,
    ) -> Outcome {
        let history = coordinating.history();
        if report.first_cause.as_ref().is_none_or(|cause| !cause.fatal) {
            report.first_cause = history.as_ref().and_then(recorded_end).or(report.first_cause);
        }
        let stopped = history.is_some_and(|history| history.fate == Fate::Stopped);
        // A launcher that has taken the coordinator over speaks of the end alone.
        if let Some(notifier) = notifier.or_else(|| self.notifier(access)) {
            let exit = report.exit();
            let (state, text) = match exit {
                Exit::Done if stopped => ("stopped", report.success_text(true)),
                Exit::Done => ("finished", report.success_text(false)),
                Exit::Signal(_) => ("interrupted", report.failure_text(&self.spec.run.name)),
                _ => ("failed", report.failure_text(&self.spec.run.name)),
            };
            notifier.end(state, exit.code(), &text).await;
        }
        self.conclude(&report, Some(report.success_text(stopped))).await
    }

    /// Says how it ended. `success` is what the launcher with the coordinator says if all went well.
    pub(super) async fn conclude(&self, report: &Report, success: Option<String>) -> Outcome {
        let hosting = success.is_some();
        match report.exit() {
            Exit::Done => {
                if let Some(told) = success {
                    let summary =
                        summary::of_run(Path::new(&self.spec.run.output_dir), self.terminal.is_living());
                    let page = ending::leave_page(&self.spec.run.output_dir, &self.terminal).await;
                    let page = page
                        .map_or_else(String::new, |page| format!("\n  {:<26}{}", "report", page.display()));
                    ending::hand_over(format!("{told}\n{}{page}", summary.trim_end())).await;
                } else {
                    self.terminal.line(&report.left_text(&self.spec.run.name));
                }
                Ok(())
            }
            exit => {
                self.terminal.line(&report.failure_text(&self.spec.run.name));
                if hosting {
                    failure_file::write(Path::new(&self.spec.run.output_dir), report);
                    ending::leave_page(&self.spec.run.output_dir, &self.terminal).await;
                }
                Err(Failed::silent(exit))
            }
        }
    }
}

/// The failure that ended the run.
fn recorded_end(history: &History) -> Option<Failure> {
    history.failures.last().filter(|failure| failure.fatal).map(Failure::from)
}
