//! Which frequencies a band has: bands of equal width on the mel scale, narrow where ears tell tones apart.

use std::ops::Range;

/// Frequencies from 0 to half of `sample_rate`, `bins` of them, in `bands` parts of at least one each.
///
/// Edges are at equal steps of `2595 log10(1 + f / 700)` (O'Shaughnessy 1987), rounded to whole bins.
pub fn split(bins: usize, bands: usize, sample_rate: u32) -> Vec<Range<usize>> {
    let nyquist = f64::from(sample_rate) / 2.0;
    let top = (1.0 + nyquist / 700.0).log10();
    let mut start = 0;
    let band = |band: usize| {
        let frequency = 700.0 * (10f64.powf(top * (band + 1) as f64 / bands as f64) - 1.0);
        let edge = (frequency / nyquist * bins as f64).round() as usize;
        // Every band has a bin, and so have those above it.
        let end = edge.max(start + 1).min(bins - (bands - band - 1));
        let range = start..end;
        start = end;
        range
    };
    (0..bands).map(band).collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn every_frequency_is_in_one_band(
            bins in 1usize..1200, part in 1usize..1200, rate in 1u32..200_000,
        ) {
            let bands = part.min(bins);
            let ranges = split(bins, bands, rate);
            prop_assert_eq!(ranges.len(), bands);
            let all: Vec<usize> = ranges.iter().cloned().flatten().collect();
            prop_assert_eq!(all, (0..bins).collect::<Vec<_>>());
            prop_assert!(ranges.iter().all(|band| !band.is_empty()));
        }
    }

    #[test]
    fn low_bands_are_narrow() {
        let ranges = split(1025, 62, 44_100);
        // A sixty-second of 3,923 mel ends at 40 Hz, and frequencies are 21.5 Hz apart.
        assert_eq!(ranges[0], 0..2);
        assert!(ranges[61].len() > 40, "{:?}", ranges[61]);
    }
}
