//! What a launcher says, leaves and hands over when everything has ended.

use std::path::Path;

use coxswain_proto::{run_spec::RunSpec, v1::RunPhase};

use crate::{
    commands::ending,
    exit::{CliError, Exit, Outcome},
    render::summary,
    supervise::{
        console::{Console, Terminal},
        failure_file,
        report::Report,
    },
};

/// A launch whose processes have ended.
pub struct LaunchConclusion<'a> {
    /// The run.
    pub spec: &'a RunSpec,
    /// Where its end is shown.
    pub terminal: &'a Terminal,
}

impl LaunchConclusion<'_> {
    /// Says how it ended. `success` is what the launcher with the coordinator says if all went well.
    pub async fn conclude(&self, report: &Report, success: Option<String>) -> Outcome {
        let hosting = success.is_some();
        match report.exit() {
            Exit::Done => {
                if let Some(told) = success {
                    let summary =
                        summary::of_run(Path::new(&self.spec.run.output_dir), self.terminal.is_living());
                    let page = ending::leave_page(&self.spec.run.output_dir, self.terminal).await;
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
                // A signal ends a run that is well: it goes on when it is launched again.
                let failed = !matches!(exit, Exit::Signal(_)) || report.run_end == Some(RunPhase::Failed);
                if hosting && failed {
                    failure_file::write(Path::new(&self.spec.run.output_dir), report);
                }
                if hosting {
                    ending::leave_page(&self.spec.run.output_dir, self.terminal).await;
                }
                Err(CliError::silent(exit))
            }
        }
    }
}
