//! Statistics per feature: `meta/stats.json` (v3.0), or `meta/episodes_stats.jsonl` (v2.1) aggregated over episodes.
//!
//! Aggregation is LeRobot's: counts add up, minima and maxima envelop, means are weighted by count, variances follow the parallel
//! formula `var = sum n_i (var_i + (mean_i - mean)^2) / sum n_i`, and quantiles are count-weighted means (an approximation).
//! Values are flattened: nested lists such as an image's `[[[r]], [[g]], [[b]]]` become `[r, g, b]`.

use std::{
    collections::BTreeMap,
    io::{BufRead, BufReader},
    path::Path,
};

use serde::Serialize;
use serde_json::{Map, Value};

use crate::data::error::{DataError, read_json};

/// One feature's statistics by name (`mean`, `std`, `min`, `max`, `count`, `q01`, ...).
pub type FeatureStats = BTreeMap<String, Vec<f64>>;

/// Statistics of every feature.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
#[serde(transparent)]
pub struct Stats(pub BTreeMap<String, FeatureStats>);

impl Stats {
    /// Reads a `stats.json`; `None` if there is no such file.
    pub fn read(path: &Path) -> Result<Option<Self>, DataError> {
        if !path.exists() {
            return Ok(None);
        }
        let features: Map<String, Value> = read_json(path)?;
        parse(path, &features).map(Some)
    }

    /// Reads and aggregates an `episodes_stats.jsonl`, one line at a time; `None` if there is no such file.
    pub fn read_episodes(path: &Path) -> Result<Option<Self>, DataError> {
        if !path.exists() {
            return Ok(None);
        }
        let file = std::fs::File::open(path).map_err(DataError::io(path, "read"))?;
        let mut sums: BTreeMap<String, Aggregate> = BTreeMap::new();
        for (number, line) in BufReader::new(file).lines().enumerate() {
            let line = line.map_err(DataError::io(path, "read"))?;
            if line.trim().is_empty() {
                continue;
            }
            let at = |e: &str| {
                DataError::invalid(path, format!("line {}", number + 1), e, "repair or restore the file")
            };
            let value: Value = serde_json::from_str(&line).map_err(|e| at(&e.to_string()))?;
            let features = value.get("stats").and_then(Value::as_object).ok_or_else(|| at("no `stats`"))?;
            for (name, stats) in parse(path, features)?.0 {
                match sums.get_mut(&name) {
                    Some(sum) => sum.add(&stats).map_err(|e| at(&format!("{name}: {e}")))?,
                    None => {
                        sums.insert(name, Aggregate::new(stats));
                    }
                }
            }
        }
        Ok(Some(Self(sums.into_iter().map(|(name, sum)| (name, sum.finish())).collect())))
    }

    /// The statistics of `features` alone, in the layout of `stats.json`.
    pub fn only<'a>(&self, features: impl IntoIterator<Item = &'a str>) -> Self {
        let pick = |name: &str| Some((name.to_string(), self.0.get(name)?.clone()));
        Self(features.into_iter().filter_map(pick).collect())
    }

    /// As JSON text.
    pub fn to_json(&self) -> String {
        serde_json::to_string_pretty(self).expect("string keys and finite numbers")
    }
}

fn parse(path: &Path, features: &Map<String, Value>) -> Result<Stats, DataError> {
    let mut out = BTreeMap::new();
    for (name, stats) in features {
        let Some(stats) = stats.as_object() else {
            let field = name.clone();
            return Err(DataError::invalid(path, field, "not an object", "recompute the statistics"));
        };
        let mut feature = FeatureStats::new();
        for (stat, value) in stats {
            let mut flat = Vec::new();
            if !flatten(value, &mut flat) {
                let field = format!("{name}.{stat}");
                return Err(DataError::invalid(
                    path,
                    field,
                    "not finite numbers",
                    "recompute the statistics",
                ));
            }
            feature.insert(stat.clone(), flat);
        }
        out.insert(name.clone(), feature);
    }
    Ok(Stats(out))
}

fn flatten(value: &Value, out: &mut Vec<f64>) -> bool {
    match value {
        Value::Array(items) => items.iter().all(|item| flatten(item, out)),
        Value::Bool(b) => {
            out.push(f64::from(u8::from(*b)));
            true
        }
        other => other.as_f64().filter(|x| x.is_finite()).is_some_and(|x| {
            out.push(x);
            true
        }),
    }
}

/// A running aggregate: weighted sums of means and quantiles, and the second moment around the running mean.
struct Aggregate {
    count: f64,
    stats: FeatureStats,
}

impl Aggregate {
    fn new(stats: FeatureStats) -> Self {
        Self { count: count_of(&stats), stats }
    }

    /// Folds one episode in: with weights `w = n / (n + m)` for what is there and `1 - w` for the episode.
    fn add(&mut self, episode: &FeatureStats) -> Result<(), String> {
        let (n, m) = (self.count, count_of(episode));
        self.count = n + m;
        let w = n / self.count;
        let means = self.stats.get("mean").cloned().zip(episode.get("mean").cloned());
        // A statistic that some episode lacks cannot be aggregated.
        self.stats.retain(|name, _| episode.contains_key(name));
        for (name, mine) in &mut self.stats {
            let theirs = &episode[name];
            if mine.len() != theirs.len() {
                return Err(format!("{name} has {} elements, earlier episodes {}", theirs.len(), mine.len()));
            }
            for (i, (a, b)) in mine.iter_mut().zip(theirs).enumerate() {
                *a = match name.as_str() {
                    "min" => a.min(*b),
                    "max" => a.max(*b),
                    "count" => *a + *b,
                    "std" => {
                        let apart = means.as_ref().map_or(0.0, |(x, y)| x[i] - y[i]);
                        (w * *a * *a + (1.0 - w) * b * b + w * (1.0 - w) * apart * apart).sqrt()
                    }
                    _ => w * *a + (1.0 - w) * b,
                };
            }
        }
        Ok(())
    }

    fn finish(self) -> FeatureStats {
        self.stats
    }
}

fn count_of(stats: &FeatureStats) -> f64 {
    stats.get("count").and_then(|c| c.first()).copied().unwrap_or(1.0).max(1.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stats_of(x: &[f64]) -> FeatureStats {
        let n = x.len() as f64;
        let mean = x.iter().sum::<f64>() / n;
        let var = x.iter().map(|v| (v - mean).powi(2)).sum::<f64>() / n;
        let min = x.iter().copied().fold(f64::INFINITY, f64::min);
        let max = x.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        [("mean", mean), ("std", var.sqrt()), ("min", min), ("max", max), ("count", n)]
            .map(|(k, v)| (k.to_string(), vec![v]))
            .into()
    }

    #[test]
    fn aggregated_episodes_equal_the_statistics_of_all_frames() {
        let episodes = [vec![1.0, 2.0, 4.0], vec![-7.0], vec![0.5, 0.25, 9.0, 100.0]];
        let mut sum = Aggregate::new(stats_of(&episodes[0]));
        for episode in &episodes[1..] {
            sum.add(&stats_of(episode)).unwrap();
        }
        for (name, want) in stats_of(&episodes.concat()) {
            let got = sum.stats[&name][0];
            assert!(
                (got - want[0]).abs() < 1e-12 * want[0].abs().max(1.0),
                "{name}: {got} instead of {want:?}"
            );
        }
    }

    #[test]
    fn a_statistic_that_some_episode_lacks_is_dropped() {
        let mut with_quantile = stats_of(&[1.0, 2.0]);
        with_quantile.insert("q01".into(), vec![1.0]);
        let mut sum = Aggregate::new(with_quantile);
        sum.add(&stats_of(&[3.0])).unwrap();
        assert!(!sum.finish().contains_key("q01"));
    }
}
