//! Samples that cannot be used: who tried them, and which of them nobody tries any more.
//!
//! A sample that fails on one worker may fail because of that worker's disk, so another one gets it: ranks move on by one seat, and
//! with them their slices. What fails on [`TRIES`](limits::SAMPLE_TRIES) different workers is left out of every later step, and
//! listed: in the log, in the status, in the books. Too many such samples are a bad data set, and end the run.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
    ops::Range,
};

use coxswain_proto::{ids::Seat, limits};
use serde::{Deserialize, Serialize};

/// Positions of one epoch's order of samples.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct EpochPositions {
    /// The epoch.
    pub epoch: u64,
    /// First position.
    pub begin: u64,
    /// One past the last.
    pub end: u64,
}

impl fmt::Display for EpochPositions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.end.saturating_sub(self.begin) {
            1 => write!(f, "the sample at position {} of epoch {}", self.begin, self.epoch),
            _ => write!(f, "the samples at positions {}..{} of epoch {}", self.begin, self.end, self.epoch),
        }
    }
}

/// What follows from a failed sample.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Another worker tries it.
    TryAnother,
    /// Nobody tries it any more.
    LeftOut,
    /// There are more of them than a run may leave out.
    TooMany,
    /// It is the worker that cannot read its data: it fails where others have not tried, again and again.
    WorkerAtFault,
}

/// All such samples of a run.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Quarantine {
    /// Those that failed, and on whom, until they are left out.
    tried: BTreeSet<(EpochPositions, Seat)>,
    /// Those that are left out, in order.
    left_out: BTreeSet<EpochPositions>,
    /// How many seats the ranks have moved on.
    turns: u32,
}

impl Quarantine {
    /// Takes a failure in, in a world of `workers`.
    pub fn failed(&mut self, at: EpochPositions, seat: Seat, workers: u32) -> Verdict {
        let again = !self.tried.insert((at.clone(), seat));
        let open = self.tried.iter().filter(|(_, other)| *other == seat).count();
        if workers > 1 && (again || open >= limits::OPEN_SAMPLES) {
            return Verdict::WorkerAtFault;
        }
        let tries = self.tried.iter().filter(|(other, _)| *other == at).count();
        if tries < limits::SAMPLE_TRIES.min(workers.max(1) as usize) {
            self.turns = self.turns.wrapping_add(1);
            return Verdict::TryAnother;
        }
        self.tried.retain(|(other, _)| *other != at);
        self.left_out.insert(at);
        match self.left_out.len() > limits::MAX_QUARANTINED {
            true => Verdict::TooMany,
            false => Verdict::LeftOut,
        }
    }

    /// Samples that were consumed after all are no evidence any more; false if there was none.
    pub fn consumed(&mut self, epoch: u64, positions: &Range<u64>) -> bool {
        let before = self.tried.len();
        self.tried
            .retain(|(at, _)| at.epoch != epoch || at.begin < positions.start || at.end > positions.end);
        self.tried.len() < before
    }

    /// What is left out, in order.
    pub fn left_out(&self) -> impl Iterator<Item = &EpochPositions> {
        self.left_out.iter()
    }

    /// Left out of each epoch.
    pub fn by_epoch(&self) -> BTreeMap<u64, Vec<Range<u64>>> {
        let mut epochs: BTreeMap<u64, Vec<Range<u64>>> = BTreeMap::new();
        for at in &self.left_out {
            epochs.entry(at.epoch).or_default().push(at.begin..at.end);
        }
        epochs
    }

    /// The seats of a generation in rank order.
    pub fn turn<T>(&self, seats: &mut [T]) {
        if !seats.is_empty() {
            seats.rotate_left(self.turns as usize % seats.len());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(begin: u64) -> EpochPositions {
        EpochPositions { epoch: 0, begin, end: begin + 1 }
    }

    #[test]
    fn a_sample_is_left_out_when_it_has_failed_on_different_workers() {
        let mut quarantine = Quarantine::default();
        assert_eq!(quarantine.failed(at(4), Seat(1), 3), Verdict::TryAnother);
        assert_eq!(quarantine.failed(at(9), Seat(2), 3), Verdict::TryAnother, "another sample");
        assert_eq!(quarantine.failed(at(4), Seat(2), 3), Verdict::LeftOut);
        assert_eq!(quarantine.by_epoch(), BTreeMap::from([(0, vec![4..5])]));
    }

    #[test]
    fn a_worker_that_fails_again_or_on_many_samples_is_at_fault_itself() {
        let mut quarantine = Quarantine::default();
        assert_eq!(quarantine.failed(at(4), Seat(1), 2), Verdict::TryAnother);
        assert_eq!(quarantine.failed(at(4), Seat(1), 2), Verdict::WorkerAtFault);
        let mut quarantine = Quarantine::default();
        assert_eq!(quarantine.failed(at(4), Seat(1), 2), Verdict::TryAnother);
        assert_eq!(quarantine.failed(at(0), Seat(1), 2), Verdict::TryAnother);
        assert!(quarantine.consumed(0, &(0..3)), "position 0 was read by another");
        assert!(!quarantine.consumed(0, &(5..9)));
        assert_eq!(quarantine.failed(at(7), Seat(1), 2), Verdict::TryAnother);
        assert_eq!(quarantine.failed(at(8), Seat(1), 2), Verdict::WorkerAtFault);
    }

    #[test]
    fn ranks_move_on_so_that_someone_else_tries() {
        let mut quarantine = Quarantine::default();
        let mut seats = [0, 1, 2];
        quarantine.turn(&mut seats);
        assert_eq!(seats, [0, 1, 2]);
        quarantine.failed(at(4), Seat(1), 3);
        quarantine.turn(&mut seats);
        assert_eq!(seats, [1, 2, 0]);
        quarantine.turn::<u32>(&mut []);
    }

    #[test]
    fn a_world_of_one_has_nobody_else_and_a_bad_data_set_is_said_to_be_one() {
        let mut quarantine = Quarantine::default();
        let verdicts: Vec<_> =
            (0..=limits::MAX_QUARANTINED as u64).map(|n| quarantine.failed(at(n), Seat(0), 1)).collect();
        let (last, others) = verdicts.split_last().expect("some");
        assert!(others.iter().all(|verdict| *verdict == Verdict::LeftOut));
        assert_eq!(*last, Verdict::TooMany);
    }
}
