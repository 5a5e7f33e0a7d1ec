//! Where the time of a micro-batch goes, and when forward turns to backward.

use std::time::{Duration, Instant};

/// A part of the policy, for time accounting.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    /// Vision tower and merger.
    Vision,
    /// Embedding, decoder layers, final norm.
    Language,
    /// Sensor encoder, expert and loss.
    Expert,
}

/// A direction, for memory accounting.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pass {
    /// Forward.
    Forward,
    /// Backward.
    Backward,
}

/// Time by stage, both directions together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StageTimes {
    /// See [`Stage::Vision`].
    pub vision: Duration,
    /// See [`Stage::Language`].
    pub language: Duration,
    /// See [`Stage::Expert`].
    pub expert: Duration,
}

/// Splits the time of micro-batches by stage. On a device that runs behind the host, a lap measures what the host did.
pub struct StageClock<'a> {
    times: StageTimes,
    last: Instant,
    enter: Box<dyn FnMut(Pass) + 'a>,
}

impl<'a> StageClock<'a> {
    /// Starts at zero. `enter` is called when a micro-batch enters a pass.
    pub fn new(enter: impl FnMut(Pass) + 'a) -> Self {
        Self { times: StageTimes::default(), last: Instant::now(), enter: Box::new(enter) }
    }

    /// The sums since the clock was made.
    pub fn times(&self) -> StageTimes {
        self.times
    }

    /// Enters a pass; time since the last lap belongs to nobody.
    pub(super) fn enter(&mut self, pass: Pass) {
        (self.enter)(pass);
        self.last = Instant::now();
    }

    /// Books the time since the last lap.
    pub(super) fn lap(&mut self, stage: Stage) {
        let now = Instant::now();
        let spent = now - std::mem::replace(&mut self.last, now);
        match stage {
            Stage::Vision => self.times.vision += spent,
            Stage::Language => self.times.language += spent,
            Stage::Expert => self.times.expert += spent,
        }
    }
}

impl Default for StageClock<'_> {
    fn default() -> Self {
        Self::new(|_| {})
    }
}
