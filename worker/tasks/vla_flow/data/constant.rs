//! Numbers that normalization makes something odd of: those that never change in the data set, which tell a
//! model nothing and whose spread is 0, and those that are far outside the range that they are divided by.

use coxswain_data::{
    FarValue, NormMode,
    lerobot::{feature::dimension, stats::FeatureStats},
};

use super::{Dataset, numeric::Numeric};

/// Dimensions named in a line; of more the first are.
const NAMED: usize = 16;

/// A line for each feature that the model sees and that has dimensions which never change, and one for
/// each that has values far outside of its range, by the data set's statistics; none where there are no
/// statistics.
pub(super) fn odd_features(dataset: &Dataset) -> Vec<String> {
    let modes = &dataset.settings.data.normalization;
    let features = [
        (!dataset.state.is_none()).then_some(("state", &dataset.state, modes.state)),
        dataset.sensor.as_ref().map(|sensor| ("sensor", sensor, modes.sensor)),
        Some(("action", &dataset.action, modes.action)),
    ];
    let stats = dataset.stats();
    let lines = |(key, numeric, mode): (&str, &Numeric, NormMode)| {
        let (name, names) = (&numeric.name, numeric.element_names());
        let stats = stats.0.get(name)?;
        let dims = constant_dims(stats);
        let constant = (!dims.is_empty()).then(|| told(name, &dims, &names, mode));
        let far = mode.far_value(stats).map(|far| far_told(name, key, mode, &far, &names));
        Some(constant.into_iter().chain(far))
    };
    features.into_iter().flatten().filter_map(lines).flatten().collect()
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

fn told(name: &str, dims: &[usize], names: &[String], mode: NormMode) -> String {
    let named: Vec<_> = dims.iter().take(NAMED).map(|dim| dimension(*dim, names)).collect();
    let more = if dims.len() > NAMED { format!(" and {} more", dims.len() - NAMED) } else { String::new() };
    let (of, s) = if dims.len() == 1 { ("dimension", "s") } else { ("dimensions", "") };
    let consequence = match mode {
        NormMode::Identity | NormMode::MinMaxClamped => "the model learns nothing from constant values",
        NormMode::MeanStd | NormMode::MinMax | NormMode::Quantiles | NormMode::Quantile10 => {
            "normalization divides by a spread of 0, so any other value becomes 1e8 times too large when \
             the policy runs"
        }
    };
    format!(
        "{name}: {of} {}{more} never change{s} in the data set: {consequence}; record values that change, or leave the constant ones out of the feature",
        named.join(", ")
    )
}

fn far_told(name: &str, key: &str, mode: NormMode, far: &FarValue, names: &[String]) -> String {
    let FarValue { dim, recorded, normalized, range } = far;
    let dim = dimension(*dim, names);
    let other = if mode == NormMode::MeanStd { "min_max" } else { "mean_std` or `min_max" };
    format!(
        "{name}: dimension {dim} has a value of {recorded:?}, which normalization by `{}` ({range}) turns into {normalized:.1e}: \
         such values outweigh all others in the loss; use `{other}` in data.normalization.{key}, or repair the recording",
        mode.name()
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
        let line = told("observation.state", &[3], &[], NormMode::MeanStd);
        assert!(line.starts_with("observation.state: dimension 3 never changes in the data set: "), "{line}");
        assert!(line.contains("1e8") && line.ends_with("out of the feature"), "{line}");
        let names = ["x", "y", "gripper"].map(str::to_owned);
        let line = told("action", &[2], &names, NormMode::MeanStd);
        assert!(line.starts_with("action: dimension 2 (gripper) never changes"), "{line}");
        let line = told("action", &(0..20).collect::<Vec<_>>(), &[], NormMode::Identity);
        assert!(
            line.contains("dimensions 0, 1, 2") && line.contains("15 and 4 more never change in"),
            "{line}"
        );
    }
}
