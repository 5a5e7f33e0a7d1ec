//! Which samples of a file train: all, or all but the last of every so many.

use std::{collections::BTreeSet, path::Path, sync::Arc};

use coxswain_data::{DataError, TrainingSamples};
use coxswain_proto::order::DamagedRow;

/// Samples that train, and those that are held out.
pub struct Holdout {
    count: u64,
    every: u64,
    training: Arc<TrainingSamples>,
    /// Neither train nor are held out.
    left_out: BTreeSet<u64>,
}

impl Holdout {
    /// A split of so many samples by `data.holdout_every` of the run file; refused if none is left. `one` is
    /// what a sample is called, and `remedy` how to bring some.
    pub fn new(path: &Path, one: &str, remedy: &str, count: u64, every: u64) -> Result<Self, DataError> {
        let training = Arc::new(training(count, every));
        if training.is_empty() {
            let found = format!("{count} {one}s, none left to train on");
            let remedy = format!("{remedy} (with data.holdout_every, at least two {one}s)");
            return Err(DataError::invalid(path, "(samples)", found, remedy));
        }
        Ok(Self { count, every, training, left_out: BTreeSet::new() })
    }

    /// This split without some samples, which are not all of them.
    pub fn without(self, left_out: &[u64]) -> Self {
        if left_out.is_empty() {
            return self;
        }
        let left_out: BTreeSet<u64> = left_out.iter().copied().collect();
        let kept = (0..self.training.len()).filter_map(|number| self.training.get(number));
        let kept = kept.filter(|sample| !left_out.contains(sample));
        let training = Arc::new(TrainingSamples::new(kept.map(|sample| sample..sample + 1)));
        Self { training, left_out, ..self }
    }

    /// The samples that train.
    pub fn training(&self) -> &Arc<TrainingSamples> {
        &self.training
    }

    /// The others.
    pub fn held_out(&self) -> Vec<u64> {
        let others = (0..self.count).filter(|index| self.training.number(*index).is_none());
        others.filter(|index| !self.left_out.contains(index)).collect()
    }

    /// What a damaged record takes along: a record is needed by its own sample alone.
    pub fn damaged(&self, index: u64) -> DamagedRow {
        let begin = self.training.number(index).unwrap_or_default();
        DamagedRow { row: index, begin, end: begin + 1 }
    }

    /// What is held out, for people.
    pub fn describe(&self) -> String {
        match self.every {
            0 => "none held out".to_owned(),
            every => format!("one of {every} held out"),
        }
    }
}

/// How many of so many samples train.
pub fn trained(count: u64, every: u64) -> u64 {
    training(count, every).len()
}

fn training(count: u64, every: u64) -> TrainingSamples {
    let block = if every > 0 { every } else { count.max(1) };
    TrainingSamples::new((0..count).step_by(block as usize).map(|first| {
        let end = (first + block).min(count);
        first..if every > 0 && end == first + block { end - 1 } else { end }
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_of_every_so_many_is_held_out_and_one_has_to_be_left() {
        let of =
            |count, every| Holdout::new(Path::new("a.jsonl"), "chat", "write one chat a line", count, every);
        let split = of(8, 3).expect("most train");
        assert_eq!(split.held_out(), [2, 5]);
        let training: Vec<_> = (0..6).map(|number| split.training().get(number)).collect();
        assert_eq!(training, [0, 1, 3, 4, 6, 7].map(Some));
        assert_eq!(split.damaged(4), DamagedRow { row: 4, begin: 3, end: 4 });
        assert!(of(3, 0).expect("all train").held_out().is_empty());
        let error = of(0, 2).err().expect("nothing to train on").to_string();
        assert!(error.contains("0 chats") && error.contains("at least two"), "{error}");
    }
}
