//! How many samples cannot be used, and of which nothing is learned.
//!
//! ```text
//! counted   by the rows that a generation leaves out, from as many samples before it as are judged: so all
//!           ranks count the same, whenever they came, and a new bad row does not begin the count again
//! judged    over at least 1,000 samples, or an epoch where that has fewer
//! too many  more than train.max_left_out of them
//! ```

use coxswain_proto::ids::Step;

/// Samples over which a share means something.
pub(super) const ENOUGH: u64 = 1000;
/// Causes that are kept.
const CAUSES: usize = 3;

/// What was seen of the data, and what was learned from.
#[derive(Debug, Default)]
pub(in crate::train) struct LeftOut {
    /// Samples of this generation's steps, and of those before it that count.
    pub seen: u64,
    /// Seen samples of which nothing was learned.
    pub left_out: u64,
    /// The first step of this process.
    pub first: Option<Step>,
    /// Whether any step of this process has learned anything.
    pub learned: bool,
    /// Why the first samples of this rank could not be used.
    pub causes: Vec<String>,
}

impl LeftOut {
    /// A generation begins with this step; of the samples before it, so many of so many would be left out.
    pub fn begin(&mut self, next: Step, [left_out, seen]: [u64; 2]) {
        (self.seen, self.left_out) = (seen, left_out);
        self.first.get_or_insert(next);
    }

    /// A sample of this rank cannot be used.
    pub fn note(&mut self, cause: &str) {
        if self.causes.len() < CAUSES {
            self.causes.push(cause.to_owned());
        }
    }

    /// A step was taken, of whose samples so many could be learned from.
    pub fn add(&mut self, samples: u64, learned: u64) {
        self.seen += samples;
        self.left_out += samples - learned;
        self.learned |= learned > 0;
    }

    /// Whether more than this share of the samples is left out. Of a small set as many epochs are judged as
    /// were begun, whole: in a part of one, a sample that is left out each time has too much weight.
    pub fn is_too_many(&self, epoch: u64, share: f64) -> bool {
        let of = if epoch < ENOUGH { self.seen.next_multiple_of(epoch.max(1)) } else { self.seen };
        self.seen >= ENOUGH.min(epoch) && self.left_out as f64 > share * of as f64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_share_is_judged_over_enough_samples() {
        let mut count = LeftOut::default();
        count.begin(Step(0), [0, 0]);
        count.add(100, 0);
        assert!(!count.is_too_many(5_000, 0.05), "too few to tell");
        assert!(count.is_too_many(80, 0.05), "more than an epoch");
        count.add(1_900, 1_900);
        assert!(!count.is_too_many(5_000, 0.05), "5 % of 2,000");
        count.add(10, 9);
        assert!(!count.is_too_many(5_000, 0.06) && count.is_too_many(5_000, 0.05));
        let mut small = LeftOut::default();
        small.add(29, 27);
        assert!(!small.is_too_many(25, 0.05), "one of 25, that came twice in 29");
        small.add(21, 20);
        assert!(small.is_too_many(25, 0.05), "3 of two epochs");
        count.begin(Step(20), [3, 79]);
        assert!(!count.is_too_many(80, 0.0) && count.first == Some(Step(0)) && count.learned);
        count.add(1, 1);
        assert!(count.is_too_many(80, 0.0), "what the generation before has left out counts");
    }
}
