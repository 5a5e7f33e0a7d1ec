//! Where the time of a micro-batch goes, and when forward turns to backward.

use std::time::{Duration, Instant};

/// A direction, for memory accounting.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pass {
    /// Forward.
    Forward,
    /// Backward.
    Backward,
}

/// Splits the time of micro-batches by stages that the task names, both directions together. On a device that runs behind the host, a lap
/// measures what the host did.
pub struct StageClock<'a> {
    times: Vec<(&'static str, Duration)>,
    last: Instant,
    enter: Box<dyn FnMut(Pass) + 'a>,
}

impl<'a> StageClock<'a> {
    /// Starts at zero. `enter` is called when a micro-batch enters a pass.
    pub fn new(enter: impl FnMut(Pass) + 'a) -> Self {
        Self { times: Vec::new(), last: Instant::now(), enter: Box::new(enter) }
    }

    /// The sums since the clock was made, in the order in which stages were first met.
    pub fn times(&self) -> &[(&'static str, Duration)] {
        &self.times
    }

    /// Enters a pass; time since the last lap is not booked.
    pub fn enter(&mut self, pass: Pass) {
        (self.enter)(pass);
        self.last = Instant::now();
    }

    /// Books the time since the last lap under this stage.
    pub fn lap(&mut self, stage: &'static str) {
        let now = Instant::now();
        let spent = now - std::mem::replace(&mut self.last, now);
        match self.times.iter_mut().find(|(name, _)| *name == stage) {
            Some((_, time)) => *time += spent,
            None => self.times.push((stage, spent)),
        }
    }
}

impl Default for StageClock<'_> {
    fn default() -> Self {
        Self::new(|_| {})
    }
}
