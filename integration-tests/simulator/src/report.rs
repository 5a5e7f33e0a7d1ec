//! What is told of a simulated run at its end.

use std::{fmt, time::Duration};

use coxswain_coordinator::Outcome;

/// What is told at the end.
#[derive(Clone, Debug)]
pub struct Report {
    /// How it ended; absent if it hung.
    pub outcome: Option<Outcome>,
    /// Virtual time.
    pub took: Duration,
    /// Steps that were asked for.
    pub steps: u64,
    /// Committed steps.
    pub committed: u64,
    /// Committed steps that were lost and repeated.
    pub repeated: u64,
    /// Times of every survived fault, from its first sign until ranks had a state again.
    pub recoveries: Vec<Duration>,
    /// Faults that were paid for.
    pub restarts: u32,
    /// Faults of the script that met somebody.
    pub faults: usize,
    /// Samples of whole epochs, and of the begun one, that no committed step has, or more than one has.
    pub missing: u64,
    /// See `missing`.
    pub duplicate: u64,
    /// Why it could not go on, where no coordinator lived to say so.
    pub refused: Option<String>,
    /// What happened, in order.
    pub lines: Vec<(Duration, String)>,
    /// What must not be; empty in a sound system.
    pub violations: Vec<String>,
    /// Time that the same steps take undisturbed.
    pub undisturbed: Duration,
}

impl Report {
    /// When something was told first in which this text is.
    pub fn told(&self, text: &str) -> Option<Duration> {
        self.lines.iter().find(|(_, line)| line.contains(text)).map(|(at, _)| *at)
    }

    /// Whether all steps are committed.
    pub fn has_finished(&self) -> bool {
        matches!(self.outcome, Some(Outcome::Finished { .. }))
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (at, line) in &self.lines {
            writeln!(f, "{:>9.3} s  {line}", at.as_secs_f64())?;
        }
        let outcome = match &self.outcome {
            Some(Outcome::Finished { .. }) => "finished".into(),
            Some(Outcome::Stopped { .. }) => "stopped".into(),
            Some(Outcome::ShutDown { .. }) => "shut down".into(),
            Some(Outcome::Failed(cause)) => format!("failed: {cause}"),
            None => self.refused.as_ref().map_or("hangs".into(), |why| format!("refused: {why}")),
        };
        let longest = self.recoveries.iter().max().copied().unwrap_or_default().as_secs_f64();
        let mut sorted = self.recoveries.clone();
        sorted.sort_unstable();
        let median = sorted.get(sorted.len() / 2).copied().unwrap_or_default().as_secs_f64();
        writeln!(f)?;
        writeln!(
            f,
            "run          {outcome} after {:.1} s, {} steps",
            self.took.as_secs_f64(),
            self.committed
        )?;
        writeln!(f, "faults       {}, restarts {}", self.faults, self.restarts)?;
        writeln!(
            f,
            "recovery     {} times, median {median:.2} s, longest {longest:.2} s",
            self.recoveries.len()
        )?;
        writeln!(f, "rollback     {} committed steps repeated", self.repeated)?;
        let share = self.undisturbed.as_secs_f64() / self.took.as_secs_f64().max(1e-9) * 100.0;
        writeln!(f, "speed kept   {share:.1} % of an undisturbed run")?;
        write!(f, "audit        {} samples missing, {} duplicate", self.missing, self.duplicate)?;
        for violation in &self.violations {
            write!(f, "\nVIOLATED     {violation}")?;
        }
        Ok(())
    }
}
