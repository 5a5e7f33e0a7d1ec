//! Which micro-batches fit a capacity, and how a rank's samples of a step divide into them.
//!
//! Three answers, all powers of two: the **maximum** just fits; the **recommended** one leaves a tenth of the
//! capacity free, for fragmentation and for what a prediction misses; the **safe** one a quarter, for sharing
//! the GPU.

use serde::Serialize;

/// No forward pass here is better for being larger.
const LARGEST: u64 = 4096;
/// Headroom of the recommended micro-batch, in percent of the capacity.
const RECOMMENDED_HEADROOM: u64 = 10;
/// Headroom of the safe one.
const SAFE_HEADROOM: u64 = 25;

/// The micro-batches that fit; none where not even one sample does.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Fit {
    /// Just fits.
    pub maximum: Option<u64>,
    /// Leaves a tenth free.
    pub recommended: Option<u64>,
    /// Leaves a quarter free.
    pub safe: Option<u64>,
}

/// One way to split a rank's samples of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Split {
    /// Samples of a forward pass.
    pub micro_batch: u64,
    /// Forward passes of a step.
    pub accumulation: u64,
    /// Peak memory, in bytes.
    pub peak: u64,
}

impl Fit {
    /// Looks for the largest powers of two whose `peak` fits `capacity`, up to the `samples` that a rank has
    /// in a step.
    pub fn find(capacity: u64, samples: u64, peak: impl Fn(u64) -> u64) -> Self {
        let mut fit = Self::default();
        let mut micro_batch = 1;
        while micro_batch <= LARGEST.min(samples.max(1).next_power_of_two()) {
            let peak = peak(micro_batch);
            let within = |headroom| peak <= capacity / 100 * (100 - headroom);
            if peak > capacity {
                break;
            }
            fit.maximum = Some(micro_batch);
            if within(RECOMMENDED_HEADROOM) {
                fit.recommended = Some(micro_batch);
            }
            if within(SAFE_HEADROOM) {
                fit.safe = Some(micro_batch);
            }
            micro_batch *= 2;
        }
        fit
    }
}

/// What a micro-batch means for a capacity.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum FitVerdict {
    /// At least a quarter is free.
    Safe,
    /// At least a tenth is free.
    Good,
    /// Fits, with less than a tenth free.
    Tight,
    /// Does not fit.
    TooLarge,
}

impl FitVerdict {
    /// The verdict on a peak within a capacity.
    pub fn judge(peak: u64, capacity: u64) -> Self {
        let free = |percent| peak <= capacity / 100 * (100 - percent);
        match () {
            () if free(SAFE_HEADROOM) => Self::Safe,
            () if free(RECOMMENDED_HEADROOM) => Self::Good,
            () if peak <= capacity => Self::Tight,
            () => Self::TooLarge,
        }
    }
}

/// Samples of a step that the rank with the most of them has.
pub fn samples_of_a_rank(global_batch: u64, world: u64) -> u64 {
    global_batch.div_ceil(world.max(1))
}

/// `samples` in forward passes of `micro_batch`.
pub fn split(samples: u64, micro_batch: u64, peak: u64) -> Split {
    Split { micro_batch, accumulation: samples.div_ceil(micro_batch.max(1)), peak }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn what_is_found_fits_with_its_headroom_and_twice_as_much_does_not(
            capacity in 1_000u64..1_000_000, fixed in 0u64..1_000_000, each in 1u64..100_000, samples in 1u64..200,
        ) {
            let peak = |batch: u64| fixed + each * batch;
            let fit = Fit::find(capacity, samples, peak);
            let most = LARGEST.min(samples.next_power_of_two());
            for (found, headroom) in [(fit.maximum, 0), (fit.recommended, 10), (fit.safe, 25)] {
                let usable = capacity / 100 * (100 - headroom);
                let bound = if headroom == 0 { capacity } else { usable };
                match found {
                    Some(batch) => {
                        prop_assert!(batch.is_power_of_two() && peak(batch) <= bound);
                        prop_assert!(batch == most || peak(2 * batch) > bound);
                    }
                    None => prop_assert!(peak(1) > bound),
                }
            }
            prop_assert!(fit.safe <= fit.recommended && fit.recommended <= fit.maximum);
        }
    }

    #[test]
    fn a_step_is_split_without_losing_a_sample() {
        assert_eq!(samples_of_a_rank(32, 3), 11);
        assert_eq!(split(11, 4, 0).accumulation, 3);
        assert_eq!(FitVerdict::judge(80, 100), FitVerdict::Good);
        assert_eq!(FitVerdict::judge(101, 100), FitVerdict::TooLarge);
    }
}
