//! Rows of the data set that cannot be used: which workers tried them, and which of them are left out from
//! now on.
//!
//! A sample that fails on one worker may fail because of that worker's disk, so another one gets it: ranks
//! move on by one slot, and with them their slices. What fails again, be it on another worker or in another
//! generation, is left out of every later step of every epoch, and listed: in the log, in the status, in the
//! ledger. Too many such rows are a bad data set, and end the run.
//!
//! What is left out is the row that is damaged, with all samples that need it (a row of actions belongs to
//! every chunk that reaches it). At which positions of an epoch they stand is arithmetic that the workers do,
//! too ([`coxswain_proto::order`]).

use std::{collections::BTreeSet, fmt, ops::Range};

use coxswain_proto::{
    ids::{Generation, Slot},
    limits,
    order::{DamagedRow, LeftOut, Order},
};
use serde::{Deserialize, Serialize};

/// A sample that failed, and the row that was to blame.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct BadSample {
    /// The epoch in which it was asked for.
    pub epoch: u64,
    /// Position there.
    pub position: u64,
    /// What cannot be used.
    pub row: DamagedRow,
}

impl fmt::Display for BadSample {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { epoch, position, row } = self;
        write!(f, "the sample at position {position} of epoch {epoch} (row {} of the data set", row.row)?;
        match row.end.saturating_sub(row.begin) {
            0 | 1 => f.write_str(")"),
            samples => write!(f, ", used by {samples} samples)"),
        }
    }
}

/// What follows from a failed sample.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SampleVerdict {
    /// Another worker tries it.
    TryAnother,
    /// It is left out from now on.
    LeftOut,
    /// There are more of them than a run may leave out.
    TooMany,
    /// It is the worker that cannot read its data: rows fail there and nowhere else.
    WorkerAtFault,
}

/// All such rows of a run.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Quarantine {
    /// Rows that failed, on whom and when, until they are left out.
    tried: BTreeSet<Try>,
    /// Rows that are left out, in order.
    left_out: BTreeSet<LeftOutRow>,
    /// How many slots the ranks have moved on.
    #[serde(rename = "turns")]
    rotations: u32,
    /// The generation that they moved on after.
    #[serde(rename = "turned")]
    rotated_in: Generation,
}

/// A sample that failed, on whom and when.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Try {
    /// What failed.
    pub sample: BadSample,
    /// On whom.
    #[serde(rename = "seat")]
    pub slot: Slot,
    /// When.
    pub generation: Generation,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
struct LeftOutRow {
    row: DamagedRow,
    /// The only worker that failed on it, if there is but one.
    word_of: Option<Slot>,
}

impl Quarantine {
    /// Takes a failure in that a worker met in a generation of `workers`. Nothing follows from what it has
    /// said before, or what is left out already.
    pub fn failed(&mut self, failed: Try, workers: u32) -> Option<SampleVerdict> {
        self.tried(failed, workers, limits::SAMPLE_TRIES.min(workers.max(1) as usize))
    }

    /// Takes in a failure in which the process ended that read the sample. It may have been another's doing,
    /// so a worker that is alone tries it again in its next life.
    pub fn killed(&mut self, killed: Try, workers: u32) -> Option<SampleVerdict> {
        self.tried(killed, workers, limits::SAMPLE_TRIES)
    }

    fn tried(&mut self, failed: Try, workers: u32, enough: usize) -> Option<SampleVerdict> {
        let Try { sample: BadSample { row, .. }, slot, generation } = failed;
        let known = |tried: &Try| (tried.sample.row, tried.slot, tried.generation) == (row, slot, generation);
        if self.left_out().any(|other| *other == row) || self.tried.iter().any(known) {
            return None;
        }
        self.tried.insert(failed);
        let mine = self.tried.iter().filter(|tried| tried.slot == slot);
        let open: BTreeSet<_> = mine.map(|tried| tried.sample.row).collect();
        if workers > 1 && open.len() >= limits::OPEN_SAMPLES {
            return Some(SampleVerdict::WorkerAtFault);
        }
        let tries: Vec<Slot> =
            self.tried.iter().filter(|tried| tried.sample.row == row).map(|tried| tried.slot).collect();
        if tries.len() < enough {
            // Once a generation: two that failed in the same one would else come round to where they were.
            if self.rotated_in != generation {
                (self.rotations, self.rotated_in) = (self.rotations.wrapping_add(1), generation);
            }
            return Some(SampleVerdict::TryAnother);
        }
        self.tried.retain(|tried| tried.sample.row != row);
        let alone = tries.iter().all(|other| *other == slot);
        self.left_out.insert(LeftOutRow { row, word_of: alone.then_some(slot) });
        Some(self.judge(slot, workers))
    }

    /// What follows from one more row that is left out.
    fn judge(&self, slot: Slot, workers: u32) -> SampleVerdict {
        let rows: BTreeSet<u64> = self.left_out().map(|row| row.row).collect();
        let on_its_word = self.left_out.iter().filter(|left| left.word_of == Some(slot)).count();
        // Where most rows failed on others, too, the data are bad, and not this worker's way to them.
        let by_others = self.left_out.len() - on_its_word;
        let is_suspect = workers > 1 && on_its_word >= limits::OPEN_SAMPLES && on_its_word > by_others;
        match () {
            () if is_suspect => SampleVerdict::WorkerAtFault,
            () if rows.len() > limits::MAX_QUARANTINED => SampleVerdict::TooMany,
            () => SampleVerdict::LeftOut,
        }
    }

    /// Samples that were consumed after all are no evidence any more; false if there was none.
    pub fn consumed(&mut self, epoch: u64, positions: &Range<u64>) -> bool {
        let before = self.tried.len();
        self.tried
            .retain(|Try { sample, .. }| sample.epoch != epoch || !positions.contains(&sample.position));
        self.tried.len() < before
    }

    /// What is left out, in order.
    pub fn left_out(&self) -> impl Iterator<Item = &DamagedRow> {
        self.left_out.iter().map(|left| &left.row)
    }

    /// What is left out, as positions of this order.
    pub fn positions(&self, order: Order) -> LeftOut {
        LeftOut::new(order, self.left_out().copied())
    }

    /// The slots of a generation in rank order.
    pub fn rotate<T>(&self, slots: &mut [T]) {
        if !slots.is_empty() {
            slots.rotate_left(self.rotations as usize % slots.len());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bad(row: u64) -> BadSample {
        BadSample { epoch: 0, position: row, row: DamagedRow { row, begin: row, end: row + 1 } }
    }

    /// A sample failed on a worker in a generation.
    fn on(slot: u32, generation: u64, sample: BadSample) -> Try {
        Try { sample, slot: Slot(slot), generation: Generation(generation) }
    }

    fn rows(quarantine: &Quarantine) -> Vec<u64> {
        quarantine.left_out().map(|row| row.row).collect()
    }

    #[test]
    fn a_row_is_left_out_when_it_has_failed_on_different_workers() {
        let mut quarantine = Quarantine::default();
        assert_eq!(quarantine.failed(on(1, 1, bad(4)), 3), Some(SampleVerdict::TryAnother));
        assert_eq!(quarantine.failed(on(2, 1, bad(9)), 3), Some(SampleVerdict::TryAnother), "another row");
        assert_eq!(quarantine.failed(on(2, 2, bad(4)), 3), Some(SampleVerdict::LeftOut));
        assert_eq!(rows(&quarantine), [4]);
        assert_eq!(quarantine.failed(on(0, 2, bad(4)), 3), None, "everybody knows by now");
    }

    #[test]
    fn a_row_is_one_whichever_of_its_samples_fails() {
        let row = DamagedRow { row: 40, begin: 25, end: 41 };
        let sample = |position| BadSample { epoch: 0, position, row };
        let mut quarantine = Quarantine::default();
        assert_eq!(quarantine.failed(on(0, 1, sample(3)), 2), Some(SampleVerdict::TryAnother));
        assert_eq!(quarantine.failed(on(1, 1, sample(5)), 2), Some(SampleVerdict::LeftOut));
        assert_eq!(quarantine.left_out().collect::<Vec<_>>(), [&row]);
    }

    #[test]
    fn a_worker_is_not_at_fault_where_most_rows_failed_on_others_too() {
        let mut quarantine = Quarantine::default();
        for row in 0..4 {
            quarantine.failed(on(0, 2 * row, bad(row)), 2);
            assert_eq!(quarantine.failed(on(1, 2 * row + 1, bad(row)), 2), Some(SampleVerdict::LeftOut));
        }
        for row in 10..13 {
            quarantine.failed(on(0, 2 * row, bad(row)), 2);
            assert_eq!(quarantine.failed(on(0, 2 * row + 1, bad(row)), 2), Some(SampleVerdict::LeftOut));
        }
    }

    #[test]
    fn what_is_reported_twice_counts_once_in_a_generation() {
        let mut quarantine = Quarantine::default();
        quarantine.failed(on(1, 1, bad(4)), 2);
        quarantine.failed(on(0, 1, bad(7)), 2);
        assert_eq!(quarantine.failed(on(1, 1, bad(4)), 2), None);
        assert_eq!(quarantine.failed(on(0, 1, bad(7)), 2), None);
        let mut slots = [0, 1];
        quarantine.rotate(&mut slots);
        assert_eq!(slots, [1, 0], "one turn for one generation: each is tried by the other");
    }

    #[test]
    fn a_worker_that_alone_fails_on_many_rows_is_at_fault_itself() {
        let mut quarantine = Quarantine::default();
        assert_eq!(quarantine.failed(on(1, 1, bad(4)), 2), Some(SampleVerdict::TryAnother));
        assert_eq!(quarantine.failed(on(1, 2, bad(0)), 2), Some(SampleVerdict::TryAnother));
        assert!(quarantine.consumed(0, &(0..3)), "position 0 was read by another");
        assert!(!quarantine.consumed(0, &(5..9)));
        assert_eq!(quarantine.failed(on(1, 3, bad(7)), 2), Some(SampleVerdict::TryAnother));
        assert_eq!(quarantine.failed(on(1, 4, bad(8)), 2), Some(SampleVerdict::WorkerAtFault));

        let mut quarantine = Quarantine::default();
        let again = |quarantine: &mut Quarantine, row| {
            quarantine.failed(on(1, 2 * row, bad(row)), 2);
            quarantine.failed(on(1, 2 * row + 1, bad(row)), 2)
        };
        assert_eq!(again(&mut quarantine, 1), Some(SampleVerdict::LeftOut), "its word is enough for a row");
        assert_eq!(again(&mut quarantine, 2), Some(SampleVerdict::LeftOut));
        assert_eq!(again(&mut quarantine, 3), Some(SampleVerdict::WorkerAtFault), "but not for many");
    }

    #[test]
    fn a_sample_that_has_ended_two_processes_is_left_out_also_by_one_worker_alone() {
        let mut quarantine = Quarantine::default();
        assert_eq!(quarantine.killed(on(0, 1, bad(4)), 1), Some(SampleVerdict::TryAnother));
        assert_eq!(quarantine.killed(on(0, 1, bad(4)), 1), None, "told twice");
        assert_eq!(quarantine.killed(on(0, 2, bad(4)), 1), Some(SampleVerdict::LeftOut));
        assert_eq!(quarantine.killed(on(1, 3, bad(7)), 2), Some(SampleVerdict::TryAnother));
        assert_eq!(quarantine.failed(on(0, 4, bad(7)), 2), Some(SampleVerdict::LeftOut));
        assert_eq!(rows(&quarantine), [4, 7]);
    }

    #[test]
    fn ranks_move_on_so_that_someone_else_tries() {
        let mut quarantine = Quarantine::default();
        let mut slots = [0, 1, 2];
        quarantine.rotate(&mut slots);
        assert_eq!(slots, [0, 1, 2]);
        quarantine.failed(on(1, 1, bad(4)), 3);
        quarantine.rotate(&mut slots);
        assert_eq!(slots, [1, 2, 0]);
        quarantine.rotate::<u32>(&mut []);
    }

    #[test]
    fn a_world_of_one_has_nobody_else_and_a_bad_data_set_is_reported_to_be_one() {
        let mut quarantine = Quarantine::default();
        let mut verdicts: Vec<_> = (0..=limits::MAX_QUARANTINED as u64)
            .map(|row| quarantine.failed(on(0, row, bad(row)), 1))
            .collect();
        assert_eq!(verdicts.pop(), Some(Some(SampleVerdict::TooMany)));
        assert!(verdicts.iter().all(|verdict| *verdict == Some(SampleVerdict::LeftOut)));
    }
}
