//! Numbers of one dimension: count, extremes, mean, deviation and quantiles, of an episode and of all.
//!
//! What LeRobot writes into `stats.json` comes about in two steps, and so it does here:
//!
//! | | of an episode | of the data set |
//! |---|---|---|
//! | min, max | of all values | of all episodes |
//! | mean, std | of all values, std with divisor n | of all values |
//! | quantiles | from a histogram of 5,000 bins, linear within a bin | means, weighted by count |
//!
//! Bins lie over `[min - 1e-10, max + 1e-10]`. Episodes are joined by `mean = sum n_i mean_i / n` and `var =
//! sum n_i (var_i + (mean_i - mean)^2) / n`.
//!
//! So a quantile of an episode is right within a 5,000th of the episode's range, and one of the data set is
//! far off where episodes differ (that of `episode_index` is its mean). That is LeRobot's definition, and
//! policies are trained by it; another one would not be the same number.

/// Quantiles that LeRobot writes.
pub const QUANTILES: [(&str, f64); 5] =
    [("q01", 0.01), ("q10", 0.1), ("q50", 0.5), ("q90", 0.9), ("q99", 0.99)];
const BINS: usize = 5000;
/// LeRobot's margin around the range of values.
const MARGIN: f64 = 1e-10;

/// Values of one dimension, without quantiles.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Moments {
    /// Finite values.
    pub count: u64,
    /// The least.
    pub min: f64,
    /// The largest.
    pub max: f64,
    /// Mean.
    pub mean: f64,
    /// Sum of squared distances from the mean.
    squares: f64,
    /// Frames of the episode with the least and the largest.
    pub at: [u64; 2],
}

impl Default for Moments {
    fn default() -> Self {
        Self { count: 0, min: f64::INFINITY, max: f64::NEG_INFINITY, mean: 0.0, squares: 0.0, at: [0; 2] }
    }
}

impl Moments {
    /// Takes `times` values in (Chan, Golub & LeVeque 1979), of frame `frame`.
    pub fn add_values(&mut self, value: f64, times: u64, frame: u64) {
        let one = Self { count: times, min: value, max: value, mean: value, squares: 0.0, at: [frame; 2] };
        self.merge(&one);
    }

    /// Takes the values of another in.
    pub fn merge(&mut self, other: &Self) {
        if other.count == 0 {
            return;
        }
        let (n, m) = (self.count as f64, other.count as f64);
        let apart = other.mean - self.mean;
        self.squares += other.squares + apart * apart * n * m / (n + m);
        self.mean += apart * m / (n + m);
        self.count += other.count;
        if other.min < self.min {
            (self.min, self.at[0]) = (other.min, other.at[0]);
        }
        if other.max > self.max {
            (self.max, self.at[1]) = (other.max, other.at[1]);
        }
    }

    /// All values but those of `part`, whose extremes are not known then.
    pub fn without(&self, part: &Self) -> Self {
        let (n, m) = (self.count as f64, part.count as f64);
        let rest = (n - m).max(1.0);
        let mean = (self.mean * n - part.mean * m) / rest;
        let apart = part.mean - mean;
        let squares = self.squares - part.squares - apart * apart * rest * m / n;
        Self { count: self.count - part.count, mean, squares: squares.max(0.0), ..*self }
    }

    /// Standard deviation, with divisor n.
    pub fn std(&self) -> f64 {
        (self.squares / (self.count as f64).max(1.0)).sqrt()
    }
}

/// How values are spread over their range.
pub struct Histogram {
    first: f64,
    last: f64,
    step: f64,
    counts: Vec<u64>,
}

impl Histogram {
    /// A histogram of values within these.
    pub fn new(of: &Moments) -> Self {
        let (first, last) = (of.min - MARGIN, of.max + MARGIN);
        Self { first, last, step: (last - first) / BINS as f64, counts: vec![0; BINS] }
    }

    fn edge(&self, bin: usize) -> f64 {
        if bin == BINS { self.last } else { self.first + self.step * bin as f64 }
    }

    /// Takes `times` values in.
    pub fn add_values(&mut self, value: f64, times: u64) {
        // Where the range is so narrow that a bin has no width all values are in the first.
        let guess = ((value - self.first) / self.step).floor().clamp(0.0, (BINS - 1) as f64) as usize;
        // Rounding may be off by a bin: a bin has its lower edge, the last one both.
        let bin = match guess {
            bin if bin > 0 && value < self.edge(bin) => bin - 1,
            bin if bin + 1 < BINS && value >= self.edge(bin + 1) => bin + 1,
            bin => bin,
        };
        self.counts[bin] += times;
    }

    /// LeRobot's quantiles.
    pub fn quantiles(&self) -> [f64; 5] {
        let total: u64 = self.counts.iter().sum();
        QUANTILES.map(|(_, q)| self.quantile(q * total as f64))
    }

    fn quantile(&self, wanted: f64) -> f64 {
        let mut before = 0;
        for (bin, count) in self.counts.iter().enumerate() {
            let with = before + count;
            if with as f64 >= wanted {
                return match bin {
                    0 => self.first,
                    _ if *count == 0 => self.edge(bin),
                    _ => {
                        let fraction = (wanted - before as f64) / *count as f64;
                        self.edge(bin) + fraction * (self.edge(bin + 1) - self.edge(bin))
                    }
                };
            }
            before = with;
        }
        self.last
    }
}

/// One dimension of one episode.
#[derive(Clone, Copy, Debug)]
pub struct Dim {
    /// Without quantiles.
    pub moments: Moments,
    /// By [`QUANTILES`].
    pub quantiles: [f64; 5],
}

impl Dim {
    /// What is known of values, and of their spread if that was asked for. Of a single value every quantile
    /// is the value.
    pub fn new(moments: Moments, spread: Option<&Histogram>) -> Self {
        let quantiles = match spread {
            Some(spread) if moments.count >= 2 => spread.quantiles(),
            _ => [moments.mean; 5],
        };
        Self { moments, quantiles }
    }
}

/// An extreme value, and the episode it is in.
#[derive(Clone, Copy, Debug)]
pub struct Extreme {
    /// The value.
    pub value: f64,
    /// Episode.
    pub episode: u64,
    /// Frame there.
    pub frame: u64,
    /// All of its episode.
    pub of: Moments,
}

/// One dimension of all episodes.
#[derive(Clone, Debug, Default)]
pub struct Total {
    /// Without quantiles.
    pub moments: Moments,
    /// The least value and the largest.
    pub extremes: [Option<Extreme>; 2],
    quantiles: [f64; 5],
}

impl Total {
    /// Takes the next episode in.
    pub fn add_episode(&mut self, episode: u64, dim: &Dim) {
        let of = dim.moments;
        if of.count == 0 {
            return;
        }
        for (side, value) in [of.min, of.max].into_iter().enumerate() {
            let is_further =
                |known: &Extreme| if side == 0 { value < known.value } else { value > known.value };
            if self.extremes[side].as_ref().is_none_or(is_further) {
                self.extremes[side] = Some(Extreme { value, episode, frame: of.at[side], of });
            }
        }
        self.moments.merge(&of);
        for (sum, quantile) in self.quantiles.iter_mut().zip(dim.quantiles) {
            *sum += quantile * of.count as f64;
        }
    }

    /// By [`QUANTILES`].
    pub fn quantiles(&self) -> [f64; 5] {
        self.quantiles.map(|sum| sum / (self.moments.count as f64).max(1.0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn moments(values: &[f64]) -> Moments {
        let mut all = Moments::default();
        values.iter().enumerate().for_each(|(frame, value)| all.add_values(*value, 1, frame as u64));
        all
    }

    #[test]
    fn a_part_taken_away_leaves_the_rest() {
        let (part, rest) = ([100.0, -3.0, 8.5], [1.0, 2.0, 4.0, 4.0]);
        let all = moments(&[&part[..], &rest[..]].concat());
        let (left, rest) = (all.without(&moments(&part)), moments(&rest));
        assert!((left.mean - rest.mean).abs() < 1e-12 && (left.std() - rest.std()).abs() < 1e-9);
        assert_eq!((all.min, all.max, all.at), (-3.0, 100.0, [1, 0]));
    }

    #[test]
    fn quantiles_are_interpolated_in_the_histogram_and_constant_values_are_themselves() {
        let values: Vec<f64> = (0..1001).map(f64::from).collect();
        let of = moments(&values);
        let mut histogram = Histogram::new(&of);
        values.iter().for_each(|value| histogram.add_values(*value, 1));
        for (quantile, (_, q)) in histogram.quantiles().into_iter().zip(QUANTILES) {
            assert!((quantile - 1000.0 * q).abs() <= 1.2, "{quantile} for {q}");
        }
        let same = moments(&[1e9, 1e9, 1e9]);
        let mut histogram = Histogram::new(&same);
        (0..3).for_each(|_| histogram.add_values(1e9, 1));
        assert!(histogram.quantiles().into_iter().all(|quantile| (quantile - 1e9).abs() < 1e-3));
    }
}
