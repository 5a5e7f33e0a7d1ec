//! When a run stands still: no step for so long while it trains. Told once for each standstill.

use std::time::{Duration, Instant};

use coxswain_proto::v1::{RunPhase, WatchEvent, watch_event::Kind};

/// Knows when the last step was committed.
#[derive(Clone, Debug)]
pub struct Standstill {
    patience: Duration,
    trains: bool,
    moved: Instant,
    is_told: bool,
}

impl Standstill {
    /// Nothing has happened yet.
    pub fn new(patience: Duration, now: Instant) -> Self {
        Self { patience, trains: false, moved: now, is_told: false }
    }

    /// Takes in what the run tells.
    pub fn hear(&mut self, now: Instant, event: &WatchEvent) {
        let phase = match &event.kind {
            Some(Kind::Step(_)) => {
                (self.moved, self.is_told, self.trains) = (now, false, true);
                return;
            }
            Some(Kind::Phase(changed)) => changed.phase,
            Some(Kind::Status(status)) => status.phase,
            _ => return,
        };
        // A run that is paused, or waits for workers, stands still as it should; a fault is told as one.
        let trains = phase == i32::from(RunPhase::Training) || phase == i32::from(RunPhase::Starting);
        if trains != self.trains {
            (self.trains, self.moved, self.is_told) = (trains, now, false);
        }
    }

    /// When to look whether it stands still; never while it should, or when that has been told.
    pub fn deadline(&self) -> Option<Instant> {
        (self.trains && !self.is_told).then(|| self.moved + self.patience)
    }

    /// For how long it has stood still, if that is to be told now.
    pub fn due(&mut self, now: Instant) -> Option<Duration> {
        let is_due = self.deadline().is_some_and(|at| at <= now);
        self.is_told |= is_due;
        is_due.then(|| now - self.moved)
    }
}

#[cfg(test)]
mod tests {
    use coxswain_proto::v1::{PhaseChanged, StepCommitted};

    use super::*;

    #[test]
    fn a_standstill_is_told_once_and_again_after_the_next_step() {
        let begin = Instant::now();
        let at = |seconds| begin + Duration::from_secs(seconds);
        let event = |kind| WatchEvent { unix_ms: 0, kind: Some(kind) };
        let phase = |phase: RunPhase| {
            event(Kind::Phase(PhaseChanged { phase: phase.into(), ..PhaseChanged::default() }))
        };
        let mut run = Standstill::new(Duration::from_secs(60), begin);
        assert_eq!((run.deadline(), run.due(at(1000))), (None, None), "it waits for workers");
        run.hear(at(1000), &phase(RunPhase::Starting));
        run.hear(at(1030), &event(Kind::Step(StepCommitted::default())));
        assert_eq!((run.due(at(1089)), run.deadline()), (None, Some(at(1090))));
        assert_eq!(run.due(at(1091)), Some(Duration::from_secs(61)));
        assert_eq!((run.due(at(5000)), run.deadline()), (None, None));
        run.hear(at(5001), &event(Kind::Step(StepCommitted::default())));
        run.hear(at(5002), &phase(RunPhase::Paused));
        assert_eq!(run.due(at(9000)), None, "it is paused");
        run.hear(at(9000), &phase(RunPhase::Training));
        assert_eq!(run.deadline(), Some(at(9060)));
    }
}
