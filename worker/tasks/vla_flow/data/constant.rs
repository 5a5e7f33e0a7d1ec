//! Numbers that never change in the data set: they tell a model nothing, and normalization divides by their
//! spread.

use coxswain_data::{NormMode, lerobot::stats::FeatureStats};

use super::Dataset;

/// Dimensions named in a line; of more the first are.
const NAMED: usize = 16;

impl Dataset {
    /// A line for each feature that the model sees and that has dimensions which never change, by the data
    /// set's statistics; none where there are no statistics.
    pub(super) fn constant_features(&self) -> Vec<String> {
        let modes = &self.settings.data.normalization;
        let features = [
            (!self.state.is_none()).then_some((&self.state.name, modes.state)),
            self.sensor.as_ref().map(|sensor| (&sensor.name, modes.sensor)),
            Some((&self.action.name, modes.action)),
        ];
        let stats = self.stats();
        let line = |(name, mode): (&String, NormMode)| {
            let stats = stats.0.get(name)?;
            let dims = constant_dims(stats);
            (!dims.is_empty()).then(|| told(name, &dims, mode))
        };
        features.into_iter().flatten().filter_map(line).collect()
    }
}

/// Whose spread is 0: no deviation, or the least is the largest. Statistics may have been computed in
/// float32, where the deviation of a constant is rarely 0.
fn constant_dims(stats: &FeatureStats) -> Vec<usize> {
    let of = |name: &str| stats.get(name).map_or(&[][..], Vec::as_slice);
    let (std, min, max) = (of("std"), of("min"), of("max"));
    let dims = std.len().max(min.len().min(max.len()));
    let is_constant = |dim: &usize| {
        let same = min.get(*dim).zip(max.get(*dim)).is_some_and(|(min, max)| min == max);
        same || std.get(*dim) == Some(&0.0)
    };
    (0..dims).filter(is_constant).collect()
}

fn told(name: &str, dims: &[usize], mode: NormMode) -> String {
    let named: Vec<_> = dims.iter().take(NAMED).map(usize::to_string).collect();
    let more = if dims.len() > NAMED { format!(" and {} more", dims.len() - NAMED) } else { String::new() };
    let (of, s) = if dims.len() == 1 { ("dimension", "s") } else { ("dimensions", "") };
    let consequence = match mode {
        NormMode::Identity => "the model learns nothing from it",
        NormMode::MeanStd | NormMode::MinMax | NormMode::Quantiles | NormMode::Quantile10 => {
            "normalization divides by a spread of 0, so that any other value, when the policy acts, is 1e8 times too large"
        }
    };
    format!(
        "{name}: {of} {}{more} never change{s} in the data set: {consequence}; record what moves, or leave it out of the feature",
        named.join(", ")
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stats(of: &[(&str, &[f64])]) -> FeatureStats {
        of.iter().map(|(name, values)| ((*name).to_owned(), values.to_vec())).collect()
    }

    #[test]
    fn dimensions_without_spread_are_found_by_deviation_or_range() {
        let found = |of: &[(&str, &[f64])]| constant_dims(&stats(of));
        assert_eq!(found(&[("std", &[0.5, 0.0, 1e-9])]), [1]);
        let range: [(&str, &[f64]); 2] = [("min", &[0.0, 2.0, 3.0]), ("max", &[1.0, 2.0, 3.0])];
        assert_eq!(found(&range), [1, 2]);
        assert_eq!(found(&[range[0], range[1], ("std", &[0.5, 0.1, 1e-9])]), [1, 2]);
        assert_eq!(found(&[("std", &[f64::NAN, 1.0])]), [0usize; 0]);
        assert_eq!(found(&[]), [0usize; 0]);
    }

    #[test]
    fn a_line_names_the_feature_its_dimensions_and_what_to_do() {
        let line = told("observation.state", &[3], NormMode::MeanStd);
        assert!(line.starts_with("observation.state: dimension 3 never changes in the data set: "), "{line}");
        assert!(line.contains("1e8") && line.ends_with("leave it out of the feature"), "{line}");
        let line = told("action", &(0..20).collect::<Vec<_>>(), NormMode::Identity);
        assert!(
            line.contains("dimensions 0, 1, 2") && line.contains("15 and 4 more never change in"),
            "{line}"
        );
    }
}
