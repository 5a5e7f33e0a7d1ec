//! The least recompute that fits a memory, by prediction: what `train.recompute: auto` means there.
//!
//! A mode is no candidate where the task refuses it beside the run's other settings: streamed blocks under
//! LoRA rule out those that keep weights alive.

use coxswain_proto::run_spec::Recompute;
use coxswain_task::{
    Task,
    memory::{Ask, Subject},
};

/// The modes, least recompute first.
const MODES: [Recompute; 4] = [Recompute::None, Recompute::Every(2), Recompute::Selective, Recompute::Full];
/// What of a memory a mode may take, in percent: a prediction from sizes alone may be off by the rest.
const USABLE: u64 = 90;

/// A mode, and a rank's peak with it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RecomputeChoice {
    /// The mode.
    pub mode: Recompute,
    /// Predicted bytes.
    pub peak: u64,
}

impl RecomputeChoice {
    /// The mode for a run in `room` bytes; none where the task refuses every mode.
    pub fn find(task: &dyn Task, subject: &dyn Subject, ask: Ask, room: u64) -> Option<Self> {
        let schema = task.schema();
        let predicted = MODES.into_iter().filter_map(|mode| {
            let changed = subject.changed(&|spec| spec.train.recompute = mode).ok()?;
            schema.check(changed.spec()).ok()?;
            Some(Self { mode, peak: changed.predict(ask).peak() })
        });
        Self::choose(predicted, room)
    }

    /// The first that fits, or the one that takes least.
    fn choose(candidates: impl Iterator<Item = Self>, room: u64) -> Option<Self> {
        let mut least: Option<Self> = None;
        for candidate in candidates {
            if candidate.peak <= room / 100 * USABLE {
                return Some(candidate);
            }
            if least.is_none_or(|least| candidate.peak < least.peak) {
                least = Some(candidate);
            }
        }
        least
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_least_recompute_that_leaves_a_tenth_free_is_chosen() {
        let [none, every, selective, full] = MODES;
        let peaks = [900, 600, 500, 300];
        for (room, mode) in [
            (u64::MAX, none),
            (1000, none),
            (999, every),
            (700, every),
            (600, selective),
            (400, full),
            (100, full),
            (0, full),
        ] {
            let candidates = MODES.into_iter().zip(peaks).map(|(mode, peak)| RecomputeChoice { mode, peak });
            let chosen = RecomputeChoice::choose(candidates, room);
            assert_eq!(chosen.map(|chosen| chosen.mode), Some(mode), "{room}");
        }
    }

    #[test]
    fn where_nothing_fits_and_recompute_saves_nothing_there_is_none() {
        let alike = MODES.into_iter().map(|mode| RecomputeChoice { mode, peak: 10 });
        assert_eq!(
            RecomputeChoice::choose(alike, 1),
            Some(RecomputeChoice { mode: Recompute::None, peak: 10 })
        );
        assert_eq!(RecomputeChoice::choose(std::iter::empty(), 1), None);
    }
}
