//! Which sample stands at a position: [`Order`] numbers the training samples, [`TrainingSamples`] says which
//! those are.
//!
//! Held-out episodes are left out before permuting, so they change the order as another data set would.

use std::sync::Arc;

use coxswain_proto::order::{DamagedRow, LeftOut, Order, SetShare};

use super::lerobot::Fingerprint;

/// The samples that are trained on: all but those of held-out episodes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TrainingSamples {
    /// Runs of consecutive samples: (training samples before the first, the first sample), both ascending.
    runs: Vec<(u64, u64)>,
    len: u64,
}

impl TrainingSamples {
    /// From the sample ranges that are trained on, ascending and disjoint.
    pub fn new(ranges: impl IntoIterator<Item = std::ops::Range<u64>>) -> Self {
        let (mut runs, mut len, mut last_end) = (Vec::new(), 0, None);
        for range in ranges.into_iter().filter(|r| !r.is_empty()) {
            if last_end != Some(range.start) {
                runs.push((len, range.start));
            }
            last_end = Some(range.end);
            len += range.end - range.start;
        }
        Self { runs, len }
    }

    /// How many there are.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// True when everything is held out.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The training sample that has so many before it.
    pub fn get(&self, number: u64) -> Option<u64> {
        if number >= self.len {
            return None;
        }
        let run = self.runs.partition_point(|(first, _)| *first <= number) - 1;
        let (first, sample) = self.runs[run];
        Some(sample + number - first)
    }

    /// How many training samples are before this one; `None` if it is held out.
    pub fn number(&self, sample: u64) -> Option<u64> {
        let run = self.runs.partition_point(|(_, start)| *start <= sample).checked_sub(1)?;
        let (first, start) = self.runs[run];
        let end = self.runs.get(run + 1).map_or(self.len, |(next, _)| *next);
        Some(first + sample - start).filter(|number| *number < end)
    }
}

/// Which sample stands at a position of an epoch.
#[derive(Clone, Debug)]
pub struct SampleOrder {
    order: Order,
    samples: Arc<TrainingSamples>,
}

impl SampleOrder {
    /// The order of these samples under this seed.
    pub fn new(seed: u64, fingerprint: Fingerprint, samples: Arc<TrainingSamples>) -> Self {
        Self { order: Order::new(seed, fingerprint.word(), samples.len()), samples }
    }

    /// The order of a mixture, of each set of which an epoch has its share; of one data set without shares.
    pub fn of_sets(self, shares: &[SetShare]) -> Self {
        Self { order: self.order.of_sets(shares.to_vec()), ..self }
    }

    /// Samples in an epoch.
    pub fn len(&self) -> u64 {
        self.order.len()
    }

    /// True without samples.
    pub fn is_empty(&self) -> bool {
        self.order.is_empty()
    }

    /// The sample at `position` of `epoch`; `None` past the epoch's end. Of one data set every sample stands
    /// at exactly one position.
    pub fn sample(&self, epoch: u64, position: u64) -> Option<u64> {
        self.samples.get(self.order.at(epoch, position)?)
    }

    /// Positions that no rank consumes, because their samples need one of these rows.
    pub fn without(&self, rows: &[DamagedRow]) -> LeftOut {
        LeftOut::new(self.order.clone(), rows.iter().copied())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn every_epoch_visits_every_training_sample_once(
            seed: u64, epoch in 0u64..1000, lengths in prop::collection::vec((1u64..90, any::<bool>()), 1..30),
        ) {
            let (mut start, mut kept) = (0, Vec::new());
            for (length, keep) in lengths {
                if keep { kept.push(start..start + length); }
                start += length;
            }
            let want: Vec<u64> = kept.iter().cloned().flatten().collect();
            let samples = Arc::new(TrainingSamples::new(kept));
            for sample in 0..start + 1 {
                let number = samples.number(sample);
                prop_assert_eq!(number.is_some(), want.contains(&sample));
                prop_assert!(number.is_none_or(|number| samples.get(number) == Some(sample)));
            }
            let order = SampleOrder::new(seed, Fingerprint([7; 32]), samples);
            let mut got: Vec<u64> = (0..order.len()).filter_map(|p| order.sample(epoch, p)).collect();
            got.sort_unstable();
            prop_assert_eq!(got, want);
            prop_assert_eq!(order.sample(epoch, order.len()), None);
        }
    }
}
