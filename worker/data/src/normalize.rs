//! Normalisation of numeric features, and its inverse, exactly as LeRobot computes them
//! (`normalize_processor.py`).
//!
//! | mode | forward | inverse |
//! |---|---|---|
//! | identity | `x` | `y` |
//! | mean_std | `(x - mean) / (std + eps)` | `y std + mean` |
//! | min_max | `2 (x - min) / d - 1`, `d = max - min`, or `eps` where that is 0 | `(y + 1) / 2 d + min` |
//! | quantiles | the same with `q01`, `q99` | `(y + 1) d / 2 + q01` |
//! | quantile10 | the same with `q10`, `q90` | `(y + 1) d / 2 + q10` |
//!
//! `eps = 1e-8`; f32 arithmetic in this order. Forward and inverse of mean_std differ by `eps`, as LeRobot's
//! do.

use std::path::Path;

use serde::{Deserialize, Serialize};

use super::error::DataError;
use super::lerobot::{
    Catalog,
    stats::{FeatureStats, Stats},
};

const EPS: f32 = 1e-8;

/// How one feature is normalised (LeRobot `normalize_processor.py`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum NormMode {
    /// As stored.
    Identity,
    /// `(x - mean) / (std + eps)`.
    #[default]
    MeanStd,
    /// `2 (x - min) / (max - min) - 1`.
    MinMax,
    /// `2 (x - min) / (max - min) - 1`, cut at -1 and 1; 0 where nothing ever changes. As GR00T has it.
    MinMaxClamped,
    /// `2 (x - q01) / (q99 - q01) - 1`.
    Quantiles,
    /// `2 (x - q10) / (q90 - q10) - 1`.
    Quantile10,
}

/// From this size on a normalised value stands out: of a million values of a normal distribution the largest
/// is below 5, and a squared error of 100 is ten thousand times that of 1.
pub const FAR: f64 = 100.0;

/// A value that a mode makes large.
#[derive(Clone, Debug, PartialEq)]
pub struct FarValue {
    /// Dimension.
    pub dim: usize,
    /// As recorded.
    pub recorded: f64,
    /// Normalised.
    pub normalized: f64,
    /// The statistics that made it so, in words.
    pub range: String,
}

impl NormMode {
    /// As a run file spells it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Identity => "identity",
            Self::MeanStd => "mean_std",
            Self::MinMax => "min_max",
            Self::MinMaxClamped => "min_max_clamped",
            Self::Quantiles => "quantiles",
            Self::Quantile10 => "quantile10",
        }
    }

    /// The statistics that it normalises by; none where it takes values as they are.
    fn statistics(self) -> Option<(&'static str, &'static str)> {
        match self {
            Self::Identity => None,
            Self::MeanStd => Some(("mean", "std")),
            Self::MinMax | Self::MinMaxClamped => Some(("min", "max")),
            Self::Quantiles => Some(("q01", "q99")),
            Self::Quantile10 => Some(("q10", "q90")),
        }
    }

    /// The value, of those that a feature has by its statistics, that this makes largest, if that is [`FAR`]
    /// or more. A dimension that never changes has none.
    pub fn far_value(self, stats: &FeatureStats) -> Option<FarValue> {
        let (first, second) = self.statistics()?;
        let [a, b, min, max] = [first, second, "min", "max"].map(|name| stats.get(name));
        let (a, b, min, max) = (a?, b?, min?, max?);
        let far = |dim: usize| {
            let (a, b, min, max) = (*a.get(dim)?, *b.get(dim)?, *min.get(dim)?, *max.get(dim)?);
            let normalized = |x: f64| match self {
                Self::MeanStd => (x - a) / (b + f64::from(EPS)),
                _ => 2.0 * (x - a) / if b - a == 0.0 { f64::from(EPS) } else { b - a } - 1.0,
            };
            let recorded = if normalized(min).abs() > normalized(max).abs() { min } else { max };
            let range = format!("{first} {a} and {second} {b}");
            let far = FarValue { dim, recorded, normalized: normalized(recorded), range };
            (min < max && far.normalized.abs() >= FAR).then_some(far)
        };
        (0..a.len()).filter_map(far).max_by(|x, y| x.normalized.abs().total_cmp(&y.normalized.abs()))
    }
}

/// The normalisation of one feature. Statistics repeat along the feature: `[channels]` serves `[window,
/// channels]`.
#[derive(Clone, Debug, PartialEq)]
pub struct Normalizer {
    mode: NormMode,
    /// Mean, minimum or lower quantile.
    offset: Vec<f32>,
    /// Standard deviation, or the width of the range: never zero, but where values are clamped.
    scale: Vec<f32>,
}

impl Normalizer {
    /// The normalisation of `feature`, whose value has `width` elements, by the data set's statistics.
    pub fn new(catalog: &Catalog, feature: &str, width: usize, mode: NormMode) -> Result<Self, DataError> {
        // Statistics are counted from rows, so that a shape that is not theirs is to blame first.
        Self::of(catalog.stats.as_ref(), &catalog.stats_path, feature, width, mode)
            .map_err(|error| catalog.shape_fault(feature).unwrap_or(error))
    }

    /// The normalisation by statistics that are those of the file at `path`.
    pub fn of(
        stats: Option<&Stats>,
        path: &Path,
        feature: &str,
        width: usize,
        mode: NormMode,
    ) -> Result<Self, DataError> {
        let Some((first, second)) = mode.statistics() else {
            return Ok(Self { mode, offset: Vec::new(), scale: Vec::new() });
        };
        // What is there, and wrong or not all, is replaced by these flags alone.
        let flags = if stats.is_some() { " --anew --force" } else { "" };
        let fail = |field: String, found: String| {
            let remedy = format!(
                "compute the data set's statistics with `cox data stats{flags}`, or set data.normalization to \
                 `identity`"
            );
            DataError::invalid(path, field, found, remedy)
        };
        let stats = stats.and_then(|all| all.0.get(feature));
        let stats = stats.ok_or_else(|| fail(feature.into(), "no statistics".into()))?;
        let take = |stat: &str| -> Result<Vec<f32>, DataError> {
            let values = stats.get(stat);
            let values = values.ok_or_else(|| fail(format!("{feature}.{stat}"), "missing".into()))?;
            if values.is_empty() || !width.is_multiple_of(values.len()) {
                let found = format!("{} values for a feature of width {width}", values.len());
                return Err(fail(format!("{feature}.{stat}"), found));
            }
            if let Some(element) = values.iter().position(|value| !value.is_finite()) {
                return Err(fail(
                    format!("{feature}.{stat}"),
                    format!("element {element} is not a finite number"),
                ));
            }
            Ok(values.iter().map(|v| *v as f32).collect())
        };
        let (offset, second_values) = (take(first)?, take(second)?);
        if offset.len() != second_values.len() {
            let found = format!("{} values, but {first} has {}", second_values.len(), offset.len());
            return Err(fail(format!("{feature}.{second}"), found));
        }
        let is_possible = |(low, high): (&f32, &f32)| match mode {
            NormMode::MeanStd => *high >= 0.0,
            _ => high >= low,
        };
        if let Some(element) = offset.iter().zip(&second_values).position(|pair| !is_possible(pair)) {
            let found = match mode {
                NormMode::MeanStd => format!("element {element} is negative ({})", second_values[element]),
                _ => format!(
                    "element {element} is {}, below the {first} of {}",
                    second_values[element], offset[element]
                ),
            };
            return Err(fail(format!("{feature}.{second}"), found));
        }
        let scale = match mode {
            NormMode::MeanStd => second_values,
            _ => {
                let least = if mode == NormMode::MinMaxClamped { 0.0 } else { EPS };
                let range = |(low, high): (&f32, &f32)| if high - low == 0.0 { least } else { high - low };
                offset.iter().zip(&second_values).map(range).collect()
            }
        };
        Ok(Self { mode, offset, scale })
    }

    /// The normalisation of features whose values stand side by side: each with its own, and how many values
    /// it has.
    pub fn side_by_side(mode: NormMode, features: impl IntoIterator<Item = (Self, usize)>) -> Self {
        let mut all = Self { mode, offset: Vec::new(), scale: Vec::new() };
        if mode == NormMode::Identity {
            return all;
        }
        for (Self { offset, scale, .. }, width) in features {
            all.offset.extend(offset.iter().cycle().take(width));
            all.scale.extend(scale.iter().cycle().take(width));
        }
        all
    }

    /// Stored values to model values, in place; any number of whole feature values.
    pub fn apply(&self, values: &mut [f32]) {
        self.each(values, |mode, x, offset, scale| match mode {
            NormMode::Identity => x,
            NormMode::MeanStd => (x - offset) / (scale + EPS),
            NormMode::MinMaxClamped if scale == 0.0 => 0.0,
            NormMode::MinMaxClamped => (2.0 * (x - offset) / scale - 1.0).clamp(-1.0, 1.0),
            NormMode::MinMax | NormMode::Quantiles | NormMode::Quantile10 => 2.0 * (x - offset) / scale - 1.0,
        });
    }

    /// Model values back to stored values, in place.
    pub fn invert(&self, values: &mut [f32]) {
        self.each(values, |mode, y, offset, scale| match mode {
            NormMode::Identity => y,
            NormMode::MeanStd => y * scale + offset,
            NormMode::MinMax => (y + 1.0) / 2.0 * scale + offset,
            NormMode::MinMaxClamped => (y.clamp(-1.0, 1.0) + 1.0) * 0.5 * scale + offset,
            NormMode::Quantiles | NormMode::Quantile10 => (y + 1.0) * scale / 2.0 + offset,
        });
    }

    fn each(&self, values: &mut [f32], f: impl Fn(NormMode, f32, f32, f32) -> f32) {
        if self.offset.is_empty() {
            return;
        }
        for row in values.chunks_mut(self.offset.len()) {
            for ((x, offset), scale) in row.iter_mut().zip(&self.offset).zip(&self.scale) {
                *x = f(self.mode, *x, *offset, *scale);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn statistics_that_no_values_have_are_refused_by_element() {
        let named = [("mean", [0.0; 2]), ("std", [1.0, -0.5]), ("min", [0.0, 2.0]), ("max", [1.0; 2])];
        let of_a: FeatureStats = named.map(|(name, values)| (name.to_owned(), values.to_vec())).into();
        let stats = Stats([("a".to_owned(), of_a)].into());
        let refused = |mode| {
            let found = Normalizer::of(Some(&stats), Path::new("stats.json"), "a", 2, mode);
            found.err().map(|error| error.to_string()).unwrap_or_default()
        };
        let [std, max] = [NormMode::MeanStd, NormMode::MinMax].map(refused);
        assert!(std.contains("a.std: element 1 is negative (-0.5)"), "{std}");
        assert!(max.contains("a.max: element 1 is 1, below the min of 2"), "{max}");
        assert!(max.contains("`cox data stats --anew --force`"), "{max}");
    }

    #[test]
    fn clamped_values_stay_within_their_range_and_constants_are_zero() {
        let named = [("min", vec![-1.0, 3.0]), ("max", vec![3.0, 3.0])];
        let of_a: FeatureStats = named.map(|(name, values)| (name.to_owned(), values)).into();
        let (stats, mode) = (Stats([("a".to_owned(), of_a)].into()), NormMode::MinMaxClamped);
        let normalizer = Normalizer::of(Some(&stats), Path::new("stats.json"), "a", 2, mode).unwrap();
        let mut values = [0.0, 3.0, 5.0, 4.0, -2.0, 3.0];
        normalizer.apply(&mut values);
        assert_eq!(values, [-0.5, 0.0, 1.0, 0.0, -1.0, 0.0]);
        normalizer.invert(&mut values);
        assert_eq!(values, [0.0, 3.0, 3.0, 3.0, -1.0, 3.0]);
        let mut beyond = [1.5, 7.0];
        normalizer.invert(&mut beyond);
        assert_eq!(beyond, [3.0, 3.0]);
    }

    #[test]
    fn a_value_that_a_mode_makes_far_too_large_is_found_with_what_made_it_so() {
        let names = ["min", "max", "mean", "std", "q01", "q99"];
        let stats = |of: [[f64; 2]; 6]| -> FeatureStats {
            names.iter().zip(of).map(|(name, values)| (name.to_string(), values.to_vec())).collect()
        };
        // A joint, and a gripper that closes in one of two hundred frames.
        let rare = stats([[-1.0, 0.0], [1.0, 1.0], [0.0, 0.005], [0.5, 0.07], [-0.9, 0.0], [0.9, 0.0]]);
        let far = NormMode::Quantiles.far_value(&rare).unwrap();
        assert_eq!((far.dim, far.recorded), (1, 1.0));
        assert!((far.normalized / 2e8 - 1.0).abs() < 1e-6, "{}", far.normalized);
        assert!(far.range.contains("q01 0 and q99 0"), "{}", far.range);
        for mode in [NormMode::MeanStd, NormMode::MinMax, NormMode::Identity, NormMode::Quantile10] {
            assert_eq!(mode.far_value(&rare), None, "{mode:?}");
        }
        let still = stats([[0.0, 3.0], [1.0, 3.0], [0.5, 3.0], [0.3, 0.0], [0.0, 3.0], [1.0, 3.0]]);
        assert_eq!(NormMode::Quantiles.far_value(&still), None, "a constant is told by itself");
        assert_eq!(NormMode::MeanStd.far_value(&still), None);
    }
}
