//! How much of each data set of a mixture an epoch takes.
//!
//! An epoch ends when the set that is gone through fastest has been gone through once, so that within an
//! epoch no set needs to begin again:
//!
//! ```text
//! rate of a set     its mass / its samples       mass: weight, or weight x samples
//! taken of a set    samples x rate / the highest rate, rounded, at least one
//! ```
//!
//! All weights 1 by samples take everything of every set: the mixture is one data set.

use crate::lerobot::Fingerprint;

/// A data set of a mixture.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct WeightedDataset {
    /// Training samples; at least one.
    pub samples: u64,
    /// Passes through it beside those through the others, above 0.
    pub rate: f64,
}

impl WeightedDataset {
    /// A set whose every sample weighs as much.
    pub fn by_samples(samples: u64, weight: f64) -> Self {
        Self { samples, rate: weight }
    }

    /// A set that weighs as much whatever its size.
    pub fn by_sets(samples: u64, weight: f64) -> Self {
        Self { samples, rate: weight / samples as f64 }
    }
}

/// Samples of each set in an epoch.
pub fn taken(sets: &[WeightedDataset]) -> Vec<u64> {
    let highest = sets.iter().map(|set| set.rate).fold(0.0, f64::max);
    let of = |set: &WeightedDataset| {
        let taken = (set.samples as f64 * (set.rate / highest)).round() as u64;
        taken.clamp(1, set.samples.max(1))
    };
    sets.iter().map(of).collect()
}

impl Fingerprint {
    /// The fingerprint of a mixture: its sets, and how many of its samples an epoch takes of each.
    pub fn of_sets(sets: impl IntoIterator<Item = (Self, u64)>) -> Self {
        let mut hash = blake3::Hasher::new_derive_key("coxswain data set mixture v1");
        for (Self(set), taken) in sets {
            hash.update(&set).update(&taken.to_le_bytes());
        }
        Self(hash.finalize().into())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn by(of: fn(u64, f64) -> WeightedDataset, sets: &[(u64, f64)]) -> Vec<u64> {
        taken(&sets.iter().map(|(samples, weight)| of(*samples, *weight)).collect::<Vec<_>>())
    }

    #[test]
    fn equal_weights_take_everything_or_as_much_of_each_as_the_smallest_has() {
        let sets = [(100, 1.0), (7, 1.0), (40, 1.0)];
        assert_eq!(by(WeightedDataset::by_samples, &sets), [100, 7, 40]);
        assert_eq!(by(WeightedDataset::by_sets, &sets), [7, 7, 7]);
    }

    #[test]
    fn weights_are_beside_each_other() {
        assert_eq!(by(WeightedDataset::by_samples, &[(100, 1.0), (40, 2.0)]), [50, 40]);
        assert_eq!(by(WeightedDataset::by_sets, &[(100, 3.0), (40, 1.0)]), [100, 33]);
        assert_eq!(by(WeightedDataset::by_samples, &[(100, 1e-9), (40, 5.0)]), [1, 40]);
    }

    proptest! {
        #[test]
        fn one_set_is_taken_whole_and_none_more_often_than_once(
            sets in prop::collection::vec((1u64..1_000_000, 1e-3..1e3f64), 1..9), by_sets: bool,
        ) {
            let taken = by(if by_sets { WeightedDataset::by_sets } else { WeightedDataset::by_samples }, &sets);
            prop_assert!(taken.iter().zip(&sets).all(|(taken, (samples, _))| (1..=*samples).contains(taken)));
            prop_assert!(taken.iter().zip(&sets).any(|(taken, (samples, _))| taken == samples));
        }
    }
}
