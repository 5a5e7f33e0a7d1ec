//! All numbers of a data set, judged: dimensions that never change, values far from all others, statistics
//! that are of other data.

use coxswain_data::{
    FarValue, NormMode,
    lerobot::{Catalog, stats::FeatureStats},
};

use crate::findings::Finding;
use crate::moments::{Extreme, Moments, Total};
use crate::scan::Numeric;

/// Standard deviations of all other values beyond which a value is outlying. A state that a robot really is
/// in stays within ten or so, even where it is rare.
const OUTLYING: f64 = 20.0;
/// Episodes from which on one of them is held against the others: of a few each may well be at another place.
const MANY: u64 = 10;
/// Distances between a statistic and the data, in standard deviations: rounding of float32 stays below the
/// first; from the second on training learns from other numbers than were meant.
const DIFFERENT: f64 = 1e-3;
const WRONG: f64 = 0.05;

/// What is to be said of the numbers of all episodes.
pub fn judge(catalog: &Catalog, features: &[Numeric], totals: &[Vec<Total>]) -> Vec<Finding> {
    let mut findings = Vec::new();
    for (feature, dims) in features.iter().zip(totals).filter(|(feature, _)| !feature.is_bookkeeping()) {
        findings.extend(constant(feature, dims));
        for (dim, total) in dims.iter().enumerate() {
            let extremes = total.extremes.iter().flatten();
            findings.extend(extremes.filter_map(|extreme| outlying(catalog, feature, dim, total, extreme)));
        }
        findings.extend(compared(catalog, feature, dims));
    }
    findings
}

fn constant(feature: &Numeric, dims: &[Total]) -> Option<Finding> {
    let same = dims.iter().enumerate().filter(|(_, total)| total.moments.min == total.moments.max);
    let same: Vec<_> = same
        .map(|(dim, total)| format!("dimension {} is always {}", feature.dimension(dim), total.moments.min))
        .collect();
    let remedy = "record values that change, or leave constant dimensions out of the feature";
    (!same.is_empty()).then(|| Finding::warning("constant", same.join(", "), remedy).feature(&feature.name))
}

/// A value far from all others: from those of all other episodes, or from all but this one.
fn outlying(
    catalog: &Catalog,
    feature: &Numeric,
    dim: usize,
    total: &Total,
    extreme: &Extreme,
) -> Option<Finding> {
    let mut alone = Moments::default();
    alone.add_values(extreme.value, 1, extreme.frame);
    let away = [extreme.of, alone].map(|part| {
        let rest = total.moments.without(&part);
        let spread = rest.std();
        // Rounding leaves some spread where there is none.
        let is_spread = rest.count > 1 && spread > 1e-6 * rest.mean.abs();
        if is_spread { ((extreme.value - rest.mean) / spread).abs() } else { 0.0 }
    });
    let away = if catalog.info.episodes < MANY { away[1] } else { away[0].max(away[1]) };
    let episode = &catalog.episodes.episodes[extreme.episode as usize];
    let dim = feature.dimension(dim);
    let found = format!(
        "dimension {dim} is {}, {away:.0} standard deviations from its mean over other frames",
        extreme.value
    );
    let remedy = "check the episode; repair or delete it, because means, deviations and ranges depend on it";
    (away > OUTLYING).then(|| {
        Finding::warning("outlying", found, remedy)
            .file(&catalog.root, &catalog.data_path(episode.file).unwrap_or_default())
            .feature(&feature.name)
            .episode(extreme.episode)
            .frame(extreme.frame)
    })
}

/// The data set's own statistics of a feature, held against its data.
fn compared(catalog: &Catalog, feature: &Numeric, dims: &[Total]) -> Vec<Finding> {
    let place = |finding: Finding| finding.file(&catalog.root, &catalog.stats_path).feature(&feature.name);
    let Some(stats) = catalog.stats.as_ref().and_then(|stats| stats.0.get(&feature.name)) else {
        let found = "no statistics, which normalization needs";
        return vec![place(Finding::warning("no statistics", found, "`cox data stats` computes them"))];
    };
    let mut findings = Vec::new();
    let remedy = "`cox data stats --anew --force` recomputes the statistics from the data";
    for name in ["mean", "std", "min", "max"] {
        let Some(stated) = stats.get(name) else {
            let finding =
                Finding::warning("no statistics", format!("no {name}"), "`cox data stats` computes it");
            findings.push(place(finding));
            continue;
        };
        if stated.len() != dims.len() {
            // Statistics of each element of a window are as good, and are not computed here.
            if stated.len() != feature.shape.iter().product::<usize>() {
                let found = format!("{name} has {} values for {} dimensions", stated.len(), dims.len());
                findings.push(place(Finding::error("wrong statistics", found, remedy)));
            }
            continue;
        }
        findings.extend(
            worst(name, stated, feature, dims)
                .map(|finding| place(Finding { remedy: remedy.into(), ..finding })),
        );
    }
    let far = [NormMode::MeanStd, NormMode::Quantiles].into_iter().filter_map(|mode| {
        let far = mode.far_value(stats)?;
        let FarValue { dim, recorded, normalized, range } = far;
        let dim = feature.dimension(dim);
        let found = format!(
            "normalization by `{}` ({range}) turns {recorded} in dimension {dim} into {normalized:.1e}",
            mode.name()
        );
        let remedy = "use another mode for this feature in data.normalization, or repair the recorded value";
        Some(place(Finding::warning("far values", found, remedy)))
    });
    findings.extend(far);
    findings.extend(
        quantiles(feature, stats).map(|found| place(Finding::error("wrong statistics", found, remedy))),
    );
    findings
}

/// The dimension in which a statistic is furthest from the data, if it is far at all.
fn worst(name: &str, stated: &[f64], feature: &Numeric, dims: &[Total]) -> Option<Finding> {
    let apart = |(dim, (stated, total)): (usize, (&f64, &Total))| {
        let moments = &total.moments;
        let (std, mean) = (moments.std(), moments.mean);
        let (computed, slack) = match name {
            "mean" => (mean, 0.0),
            // LeRobot subtracts a squared mean in float32.
            "std" => (std, (std * std + 5e-7 * mean * mean).sqrt() - std),
            "min" => (moments.min, 0.0),
            _ => (moments.max, 0.0),
        };
        let scale = std + 1e-4 * mean.abs().max(1e-3);
        let off = ((stated - computed).abs() - slack).max(0.0) / scale;
        (if stated.is_finite() { off } else { f64::INFINITY }, dim, *stated, computed)
    };
    let all = stated.iter().zip(dims).enumerate().filter(|(_, (_, total))| total.moments.count > 0);
    let (off, dim, stated, computed) = all.map(apart).max_by(|a, b| a.0.total_cmp(&b.0))?;
    let dim = feature.dimension(dim);
    let found = format!("{name} of dimension {dim} is {stated:.6}, but {computed:.6} in the data");
    match off {
        off if off > WRONG => Some(Finding::error("wrong statistics", found, "")),
        off if off > DIFFERENT => Some(Finding::warning("other statistics", found, "")),
        _ => None,
    }
}

/// Quantiles are LeRobot's approximations or exact ones, and so are not compared with the data; but they
/// have an order.
fn quantiles(feature: &Numeric, stats: &FeatureStats) -> Option<String> {
    let of = |name: &str| stats.get(name).map_or(&[][..], Vec::as_slice);
    let (low, high) = (of("q01"), of("q99"));
    let dim =
        low.iter().zip(high).position(|(low, high)| !low.is_finite() || !high.is_finite() || low > high)?;
    Some(format!("q01 of dimension {} is {}, but q99 is {}", feature.dimension(dim), low[dim], high[dim]))
}
