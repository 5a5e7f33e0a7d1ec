//! A run's records, and what they come to, epoch by epoch.

use std::{collections::BTreeMap, ops::Range};

use coxswain_proto::{
    order::{Order, SetShare},
    report::Skip,
};
use serde::Serialize;

use super::coverage::Coverage;

/// A run's records.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RunRecords {
    /// The run's id.
    pub run_id: String,
    /// Name.
    pub run_name: String,
    /// How it stands, in a word.
    pub state: String,
    /// Names what it trains on by content; empty if no worker ever opened it, and of a run that goes on.
    pub data: String,
    /// Samples in an epoch; 0 if no worker ever opened the data set.
    pub samples: u64,
    /// The order of a mixture's samples; absent where there is one data set.
    pub order: Option<Order>,
    /// Samples in a step that is not an epoch's last.
    pub global_batch: u64,
    /// Steps of the whole run, if they are known.
    pub total_steps: Option<u64>,
    /// Whether all of them should be there.
    pub finished: bool,
    /// Whether it has ended, however that was: finished, stopped or failed.
    pub over: bool,
    /// Committed steps, in order.
    pub steps: Vec<CommittedStep>,
    /// Memberships, in order.
    pub generations: Vec<Membership>,
    /// Faults that were survived, in order, and the one that was not.
    pub faults: Vec<Fault>,
    /// What resumes have changed, in order.
    pub changes: Vec<Change>,
}

/// A key of the run file that was changed where the run was resumed.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Change {
    /// Steps below this one were committed.
    pub step: u64,
    /// Dotted key.
    pub key: String,
    /// What it said before, as JSON.
    pub from: String,
    /// What it says from there on.
    pub to: String,
}

/// One row of the ledger.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct CommittedStep {
    /// Which step.
    pub step: u64,
    /// Which epoch its samples belong to.
    pub epoch: u64,
    /// The membership that did it.
    pub generation: u64,
    /// Ranks in it; 0 if they are not known any more, for a checkpoint alone proves the step.
    pub world: u32,
    /// Positions of the epoch's order, over all ranks.
    pub positions: Vec<Range<u64>>,
    /// Positions that no rank consumed: their samples failed on several workers.
    pub quarantined: Vec<Range<u64>>,
    /// Loss; of a step that was left out it says nothing.
    pub loss: f64,
    /// Times it was voted down before.
    pub retries: u32,
    /// The generation of the feature cache that it took its features from; 0 for none.
    pub cache_generation: u64,
    /// Samples whose features were there.
    pub cache_hits: u64,
    /// Samples whose features were computed.
    pub cache_misses: u64,
    /// Why it was left out, if it was: its positions were consumed, and nothing was learned from them.
    pub skipped: Option<Skip>,
}

/// Steps in a row that took their features from the same place.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CacheRange {
    /// The steps.
    pub steps: Range<u64>,
    /// The generation of the feature cache; 0 for none.
    pub generation: u64,
    /// Samples whose features were there.
    pub hits: u64,
    /// Samples whose features were computed.
    pub misses: u64,
}

/// One generation.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Membership {
    /// Number.
    pub generation: u64,
    /// Workers.
    pub workers: u32,
    /// Where it started, and where its state came from; absent if it never did.
    pub started: Option<(u64, String)>,
}

/// One failure.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Fault {
    /// The membership it hit.
    pub generation: u64,
    /// Whose it was, if one rank's.
    pub rank: Option<u32>,
    /// Ranks that failed because of it.
    pub victims: Vec<u32>,
    /// What kind.
    pub kind: String,
    /// One line for people.
    pub text: String,
}

/// One epoch's account.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EpochAccount {
    /// Which epoch.
    pub epoch: u64,
    /// Samples that should have been consumed: all, or as many as the steps so far have.
    pub expected: u64,
    /// Different samples that were.
    pub committed: u64,
    /// Positions left out because their samples failed on several workers.
    pub quarantined: Vec<Range<u64>>,
    /// Positions of steps that were left out; their samples are not among the committed ones.
    pub skipped: Vec<Range<u64>>,
    /// Positions that were none of these.
    pub missing: Vec<Range<u64>>,
    /// Positions that were consumed again, once for each time; or lie outside of the epoch.
    pub duplicate: Vec<Range<u64>>,
}

/// What of a mixture's data set was consumed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct SetAccount {
    /// Name.
    pub name: String,
    /// Training samples.
    pub samples: u64,
    /// How many of them an epoch takes.
    #[serde(rename = "an_epoch")]
    pub taken: u64,
    /// Samples of it that committed steps have consumed.
    pub consumed: u64,
    /// Samples of it that were left out because they failed on several workers.
    pub quarantined: u64,
}

impl RunRecords {
    /// An account for each data set of a mixture; nothing where there is one.
    pub fn by_set(&self) -> Vec<SetAccount> {
        let Some(order) = &self.order else { return Vec::new() };
        let account = |share: &SetShare| {
            let SetShare { name, samples, taken, .. } = share.clone();
            SetAccount { name, samples, taken, consumed: 0, quarantined: 0 }
        };
        let mut accounts: Vec<_> = order.shares().iter().map(account).collect();
        for step in &self.steps {
            let count = |ranges: &[Range<u64>]| order.by_set(step.epoch, ranges.iter().cloned().flatten());
            let (consumed, quarantined) = (count(&step.positions), count(&step.quarantined));
            for (account, (consumed, quarantined)) in
                accounts.iter_mut().zip(consumed.iter().zip(quarantined))
            {
                account.consumed += consumed;
                account.quarantined += quarantined;
            }
        }
        accounts
    }

    /// Where features came from, range by range; nothing if no step took any from a cache.
    pub fn cache_ranges(&self) -> Vec<CacheRange> {
        let mut ranges: Vec<CacheRange> = Vec::new();
        for step in &self.steps {
            match ranges.last_mut() {
                Some(last) if last.generation == step.cache_generation && last.steps.end == step.step => {
                    last.steps.end += 1;
                    last.hits += step.cache_hits;
                    last.misses += step.cache_misses;
                }
                _ => ranges.push(CacheRange {
                    steps: step.step..step.step + 1,
                    generation: step.cache_generation,
                    hits: step.cache_hits,
                    misses: step.cache_misses,
                }),
            }
        }
        let cached = ranges.iter().any(|range| range.generation > 0);
        if cached { ranges } else { Vec::new() }
    }

    /// Accounts for every epoch that has begun.
    pub fn audit(&self) -> Vec<EpochAccount> {
        // Learned from, quarantined, and of steps that were left out.
        let mut epochs: BTreeMap<u64, [Vec<Range<u64>>; 3]> = BTreeMap::new();
        for step in &self.steps {
            let [learned, quarantined, skipped] = epochs.entry(step.epoch).or_default();
            let consumed = if step.skipped.is_some() { skipped } else { learned };
            consumed.extend(step.positions.iter().cloned());
            quarantined.extend(step.quarantined.iter().cloned());
        }
        let expected = self.expected();
        for epoch in 0..expected.len() as u64 {
            epochs.entry(epoch).or_default();
        }
        let account = |(epoch, [learned, quarantined, skipped]): (u64, [Vec<Range<u64>>; 3])| {
            let expected = expected.get(epoch as usize).copied().unwrap_or(0);
            let ranges = [learned, quarantined.clone(), skipped.clone()].concat();
            let Coverage { covered, missing, repeated } = Coverage::compute(expected, ranges);
            let committed = covered.saturating_sub(count(&quarantined) + count(&skipped));
            EpochAccount { epoch, expected, committed, quarantined, skipped, missing, duplicate: repeated }
        };
        epochs.into_iter().map(account).collect()
    }

    /// Samples of each epoch that the steps up to the last one should have consumed.
    fn expected(&self) -> Vec<u64> {
        if self.samples == 0 || self.global_batch == 0 {
            return Vec::new();
        }
        let committed = self.steps.last().map_or(0, |last| last.step + 1);
        let steps = match self.total_steps {
            Some(total) if self.finished => total,
            _ => committed,
        };
        let per_epoch = self.samples.div_ceil(self.global_batch);
        let (whole, rest) = (steps / per_epoch, steps % per_epoch);
        let mut expected = vec![self.samples; usize::try_from(whole).unwrap_or(usize::MAX)];
        if rest > 0 {
            expected.push((rest * self.global_batch).min(self.samples));
        }
        expected
    }
}

/// Positions in several ranges.
pub fn count(ranges: &[Range<u64>]) -> u64 {
    ranges.iter().map(|range| range.end - range.start).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Ten samples in steps of four: 4 + 4 + 2.
    fn records(steps: u64) -> RunRecords {
        let step = |step: u64| {
            let begin = step % 3 * 4;
            CommittedStep {
                step,
                epoch: step / 3,
                positions: vec![begin..(begin + 4).min(10)],
                ..Default::default()
            }
        };
        RunRecords {
            samples: 10,
            global_batch: 4,
            steps: (0..steps).map(step).collect(),
            ..RunRecords::default()
        }
    }

    fn wrong(records: &RunRecords) -> Vec<(u64, u64, u64)> {
        let accounts = records.audit().into_iter();
        accounts.map(|account| (account.epoch, count(&account.missing), count(&account.duplicate))).collect()
    }

    #[test]
    fn whole_epochs_and_a_begun_one_add_up() {
        assert_eq!(wrong(&records(5)), [(0, 0, 0), (1, 0, 0)]);
        assert_eq!(records(5).audit()[1].expected, 8);
        assert_eq!(wrong(&records(0)), []);
    }

    #[test]
    fn a_step_that_is_not_there_is_missing_and_one_that_was_done_twice_is_a_duplicate() {
        let mut records = records(6);
        records.steps.remove(1);
        assert_eq!(wrong(&records), [(0, 4, 0), (1, 0, 0)]);
        assert_eq!(records.audit()[0].missing, vec![4..8]);
        let again = records.steps[0].clone();
        records.steps.insert(1, again);
        assert_eq!(wrong(&records), [(0, 4, 4), (1, 0, 0)]);
    }

    #[test]
    fn a_finished_run_must_have_all_its_steps() {
        let mut records = RunRecords { total_steps: Some(6), ..records(5) };
        assert_eq!(wrong(&records), [(0, 0, 0), (1, 0, 0)], "it is not over yet");
        records.finished = true;
        assert_eq!(wrong(&records), [(0, 0, 0), (1, 2, 0)]);
    }

    #[test]
    fn a_quarantined_sample_is_neither_committed_nor_missing_but_one_that_was_consumed_too_is_a_duplicate() {
        let mut records = records(3);
        records.steps[0].positions = vec![0..2, 3..4];
        records.steps[0].quarantined = vec![2..3];
        let account = &records.audit()[0];
        assert_eq!((account.committed, account.quarantined.clone()), (9, vec![2..3]));
        assert_eq!(wrong(&records), [(0, 0, 0)]);
        records.steps[0].positions = vec![0..4];
        assert_eq!(wrong(&records), [(0, 0, 1)]);
    }

    #[test]
    fn steps_are_laid_together_by_where_their_features_came_from() {
        let mut records = records(6);
        assert_eq!(records.cache_ranges(), [], "there is no cache");
        for (step, generation) in records.steps.iter_mut().zip([0, 1, 1, 0, 2, 2]) {
            (step.cache_generation, step.cache_hits) = (generation, 3 * generation);
        }
        let ranges: Vec<_> = records.cache_ranges();
        let shown: Vec<_> =
            ranges.iter().map(|range| (range.steps.clone(), range.generation, range.hits)).collect();
        assert_eq!(shown, [(0..1, 0, 0), (1..3, 1, 6), (3..4, 0, 0), (4..6, 2, 12)]);
    }

    #[test]
    fn ranks_that_overlap_are_found() {
        let mut records = records(1);
        records.steps[0].positions = vec![0..2, 1..4];
        assert_eq!(records.audit()[0].duplicate, vec![1..2]);
    }
}
