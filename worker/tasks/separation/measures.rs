//! How well a stem was separated: ratios of signal to distortion, in decibels.

/// Added to both powers, so that silence has a ratio: as in the music demixing challenges.
const FLOOR: f64 = 1e-7;
/// A chunk whose wanted signal has less power than this has no ratio.
const SILENCE: f64 = 1e-10;

/// `10 log10(|s|^2 / |s - s^|^2)` over all channels (MDX, arXiv 2108.13559).
pub fn sdr(estimate: &[&[f32]], wanted: &[&[f32]]) -> f64 {
    ratio(powers(estimate, wanted))
}

/// The median of the same over chunks of `chunk` samples, without those in which nothing is to be heard
/// (SiSEC 2018, arXiv 1804.06267); that of the whole if there is no other, or the signal is shorter.
pub fn chunked_sdr(estimate: &[&[f32]], wanted: &[&[f32]], chunk: usize) -> f64 {
    let samples = wanted.first().map_or(0, |channel| channel.len());
    let part = |signals: &[&[f32]], at: usize| -> Vec<Vec<f32>> {
        signals.iter().map(|channel| channel[at..][..chunk].to_vec()).collect()
    };
    let mut ratios: Vec<f64> = (0..samples / chunk.max(1))
        .map(|number| {
            let (estimate, wanted) = (part(estimate, number * chunk), part(wanted, number * chunk));
            let [estimate, wanted] =
                [&estimate, &wanted].map(|of| of.iter().map(Vec::as_slice).collect::<Vec<_>>());
            powers(&estimate, &wanted)
        })
        .filter(|[signal, _]| *signal > SILENCE)
        .map(ratio)
        .collect();
    if ratios.is_empty() {
        return sdr(estimate, wanted);
    }
    ratios.sort_by(f64::total_cmp);
    let middle = ratios.len() / 2;
    if ratios.len().is_multiple_of(2) { (ratios[middle - 1] + ratios[middle]) / 2.0 } else { ratios[middle] }
}

fn ratio([signal, distortion]: [f64; 2]) -> f64 {
    10.0 * ((signal + FLOOR) / (distortion + FLOOR)).log10()
}

/// Sums of squares of the wanted signal and of what the estimate is off by.
fn powers(estimate: &[&[f32]], wanted: &[&[f32]]) -> [f64; 2] {
    let mut sums = [0.0; 2];
    for (estimate, wanted) in estimate.iter().zip(wanted).flat_map(|(a, b)| a.iter().zip(*b)) {
        let (estimate, wanted) = (f64::from(*estimate), f64::from(*wanted));
        sums[0] += wanted * wanted;
        sums[1] += (wanted - estimate) * (wanted - estimate);
    }
    sums
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tenth_of_error_is_twenty_decibels_and_silence_has_none() {
        let wanted: Vec<f32> = (0..400).map(|at| if at < 300 { (at as f32).sin() } else { 0.0 }).collect();
        let estimate: Vec<f32> = wanted.iter().map(|x| 0.9 * x).collect();
        let found = sdr(&[&estimate, &wanted], &[&wanted, &wanted]);
        assert!((found - 20.0 - 10.0 * 2f64.log10()).abs() < 1e-3, "one of two channels is perfect: {found}");
        let found = chunked_sdr(&[&estimate], &[&wanted], 100);
        assert!((found - 20.0).abs() < 1e-2, "the silent chunk counts: {found}");
        let silent = vec![0.0f32; 400];
        assert!(chunked_sdr(&[&silent], &[&silent], 100).is_finite());
        let half: Vec<f32> =
            wanted.iter().enumerate().map(|(at, x)| if at < 100 { 0.0 } else { 0.9 * x }).collect();
        assert!((chunked_sdr(&[&half], &[&wanted], 100) - 20.0).abs() < 1e-2, "a median");
        assert!(sdr(&[&half], &[&wanted]) < 6.0);
    }
}
