//! Where the time of a micro-batch goes, when forward turns to backward, and what else its task has to tell
//! of it.

use std::time::{Duration, Instant};

use coxswain_nn::profile;
use coxswain_proto::report::{Merge, Metric};

/// A direction, for memory accounting.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pass {
    /// Forward.
    Forward,
    /// Backward.
    Backward,
}

/// Time by stage, both directions together, in the order in which stages were first left.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StageTimes(Vec<(&'static str, Duration)>);

impl StageTimes {
    /// Records time that a stage took.
    pub fn add(&mut self, stage: &'static str, time: Duration) {
        match self.0.iter_mut().find(|(known, _)| *known == stage) {
            Some((_, sum)) => *sum += time,
            None => self.0.push((stage, time)),
        }
    }

    /// Records all that others came to.
    pub fn extend(&mut self, others: &Self) {
        others.iter().for_each(|(stage, time)| self.add(stage, time));
    }

    /// All of them.
    pub fn iter(&self) -> impl Iterator<Item = (&'static str, Duration)> {
        self.0.iter().copied()
    }

    /// What one stage took.
    pub fn of(&self, stage: &str) -> Duration {
        self.iter().find(|(known, _)| *known == stage).map_or(Duration::ZERO, |(_, time)| time)
    }
}

/// Figures of a step that its task knows, in the order in which they were first told; those of micro-batches
/// are merged as those of ranks are.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Figures(Vec<(Metric, u32)>);

impl Figures {
    /// One more value of a figure.
    pub fn add(&mut self, figure: Metric) {
        debug_assert_eq!(figure.problem(), None, "{}", figure.name);
        let Some((known, times)) = self.0.iter_mut().find(|(known, _)| known.name == figure.name) else {
            return self.0.push((figure, 1));
        };
        *times += 1;
        match known.merge {
            Merge::Mean => known.value += (figure.value - known.value) / f64::from(*times),
            Merge::Sum => known.value += figure.value,
            Merge::Max => known.value = known.value.max(figure.value),
            // Of micro-batches the first.
            Merge::FromRankZero => {}
        }
    }

    /// One more value of each of the others.
    pub fn extend(&mut self, others: Self) {
        others.0.into_iter().for_each(|(figure, _)| self.add(figure));
    }

    /// All of them.
    pub fn iter(&self) -> impl Iterator<Item = &Metric> {
        self.0.iter().map(|(figure, _)| figure)
    }
}

/// Splits the time of micro-batches by stage, and takes down what a task tells of them. On a device that runs
/// behind the host, a lap measures what the host did.
pub struct StageClock<'a> {
    times: StageTimes,
    figures: Figures,
    last: Instant,
    enter: Box<dyn FnMut(Pass) + 'a>,
    leave: Option<Box<dyn FnMut(&'static str) + 'a>>,
}

impl<'a> StageClock<'a> {
    /// Starts at zero. `enter` is called when a micro-batch enters a pass.
    pub fn new(enter: impl FnMut(Pass) + 'a) -> Self {
        Self {
            times: StageTimes::default(),
            figures: Figures::default(),
            last: Instant::now(),
            enter: Box::new(enter),
            leave: None,
        }
    }

    /// This clock; `leave` is called when a stage has run.
    pub fn on_lap(self, leave: impl FnMut(&'static str) + 'a) -> Self {
        Self { leave: Some(Box::new(leave)), ..self }
    }

    /// The sums since the clock was made.
    pub fn into_times(self) -> StageTimes {
        self.times
    }

    /// The sums, and the figures.
    pub fn into_parts(self) -> (StageTimes, Figures) {
        (self.times, self.figures)
    }

    /// Tells a figure of this micro-batch, for the log, `/metrics`, TensorBoard and programs. Its name is
    /// `kind` or `kind/of`.
    pub fn figure(&mut self, figure: Metric) {
        self.figures.add(figure);
    }

    /// Enters a pass; time since the last lap is part of no stage.
    pub fn enter(&mut self, pass: Pass) {
        (self.enter)(pass);
        profile::begin_stages();
        self.last = Instant::now();
    }

    /// Records the time since the last lap for a stage, which is shown under this name.
    pub fn lap(&mut self, stage: &'static str) {
        let now = Instant::now();
        self.times.add(stage, now - std::mem::replace(&mut self.last, now));
        profile::stage(stage);
        if let Some(leave) = &mut self.leave {
            leave(stage);
        }
    }
}

impl Default for StageClock<'_> {
    fn default() -> Self {
        Self::new(|_| {})
    }
}
