//! Statistics per feature: `meta/stats.json` (v3.0, v2.0), or `meta/episodes_stats.jsonl` (v2.1) aggregated
//! over episodes.
//!
//! Aggregation is LeRobot's: counts add up, minima and maxima envelop, means are weighted by count, variances
//! follow the parallel formula `var = sum n_i (var_i + (mean_i - mean)^2) / sum n_i`, and quantiles are
//! count-weighted means (an approximation). Values are flattened: nested lists such as an image's `[[[r]],
//! [[g]], [[b]]]` become `[r, g, b]`.
//!
//! Statistics of features that are not normalised (depth, text, constants) may be anything: Python writes
//! `NaN` where it has divided by nothing, which is not even JSON. What is not a finite number is NaN here and
//! refused by name where it is wanted ([`Normalizer`](crate::Normalizer)); what is no number at all is left
//! out.

use std::{
    borrow::Cow,
    collections::BTreeMap,
    io::{BufRead, BufReader},
    path::Path,
};

use serde::Serialize;
use serde_json::{Map, Value};

use crate::{error::DataError, place, text::read_text};

/// What to do with statistics that cannot be read.
const UNREADABLE: &str = "restore the file, or remove it and compute the statistics with `cox data stats`";

/// One feature's statistics by name (`mean`, `std`, `min`, `max`, `count`, `q01`, ...).
pub type FeatureStats = BTreeMap<String, Vec<f64>>;

/// Statistics of every feature.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
#[serde(transparent)]
pub struct Stats(pub BTreeMap<String, FeatureStats>);

impl Stats {
    /// Reads a `stats.json`; `None` if there is no such file, or nothing in it.
    pub fn read_file(path: &Path) -> Result<Option<Self>, DataError> {
        if place::bytes(path)?.is_none() {
            return Ok(None);
        }
        let text = read_text(path)?;
        if text.trim().is_empty() {
            return Ok(None);
        }
        let features: Map<String, Value> = serde_json::from_str(&python_json(&text))
            .map_err(|e| DataError::invalid(path, format!("line {}", e.line()), e.to_string(), UNREADABLE))?;
        Ok(Some(parse(&features)))
    }

    /// Reads and aggregates an `episodes_stats.jsonl`, one line at a time; `None` if there is no such file,
    /// or nothing in it.
    pub fn read_episodes(path: &Path) -> Result<Option<Self>, DataError> {
        if place::bytes(path)?.is_none() {
            return Ok(None);
        }
        let file = place::Reader::new(place::open(path)?, 0);
        let mut sums: BTreeMap<String, Aggregate> = BTreeMap::new();
        for (number, line) in BufReader::new(file).lines().enumerate() {
            let line = line.map_err(DataError::io(path, "read"))?;
            let line = if number == 0 { line.trim_start_matches('\u{feff}') } else { &line };
            if line.trim().is_empty() {
                continue;
            }
            let at = |e: &str| DataError::invalid(path, format!("line {}", number + 1), e, UNREADABLE);
            let value: Value = serde_json::from_str(&python_json(line)).map_err(|e| at(&e.to_string()))?;
            let features = value.get("stats").and_then(Value::as_object).ok_or_else(|| at("no `stats`"))?;
            for (name, stats) in parse(features).0 {
                match sums.get_mut(&name) {
                    Some(sum) => sum.add(&stats).map_err(|e| at(&format!("{name}: {e}")))?,
                    None => {
                        sums.insert(name, Aggregate::new(stats));
                    }
                }
            }
        }
        let sums: BTreeMap<_, _> = sums.into_iter().map(|(name, sum)| (name, sum.finish())).collect();
        Ok((!sums.is_empty()).then_some(Self(sums)))
    }

    /// The statistics of features whose values stand side by side, each with how many values it has; none
    /// where one of them has no statistics. A statistic that some feature lacks is left out, and of counts
    /// the first is taken.
    pub fn side_by_side<'a>(
        &self,
        features: impl IntoIterator<Item = (&'a str, usize)>,
    ) -> Option<FeatureStats> {
        let each = features.into_iter().map(|(name, width)| Some((self.0.get(name)?, width)));
        let each: Vec<_> = each.collect::<Option<_>>()?;
        let ((first, _), others) = each.split_first()?;
        if others.is_empty() {
            return Some((*first).clone());
        }
        let join = |(stat, values): (&String, &Vec<f64>)| {
            if stat == "count" {
                return Some((stat.clone(), values.clone()));
            }
            let of = |(stats, width): &(&FeatureStats, usize)| {
                let values = stats.get(stat).filter(|values| !values.is_empty())?;
                Some(values.iter().copied().cycle().take(*width).collect::<Vec<_>>())
            };
            let joined: Option<Vec<_>> = each.iter().map(of).collect();
            Some((stat.clone(), joined?.concat()))
        };
        Some(first.iter().filter_map(join).collect())
    }

    /// As JSON text; null for what is not finite.
    pub fn to_json(&self) -> String {
        serde_json::to_string_pretty(self).expect("string keys and numbers")
    }
}

/// The literals of Python's `json` that JSON does not have, as null.
fn python_json(text: &str) -> Cow<'_, str> {
    let literals = ["-Infinity", "Infinity", "NaN"];
    if !literals.iter().any(|literal| text.contains(literal)) {
        return text.into();
    }
    let mut out = String::with_capacity(text.len());
    let (mut rest, mut quoted) = (text, false);
    while let Some(first) = rest.chars().next() {
        let literal = literals.iter().find(|literal| !quoted && rest.starts_with(**literal));
        let taken = match (first, literal) {
            (_, Some(literal)) => literal.len(),
            // An escaped character, a quote among them, ends nothing.
            ('\\', None) => 1 + rest[1..].chars().next().map_or(0, char::len_utf8),
            _ => first.len_utf8(),
        };
        quoted ^= first == '"';
        out.push_str(literal.map_or(&rest[..taken], |_| "null"));
        rest = &rest[taken..];
    }
    out.into()
}

fn parse(features: &Map<String, Value>) -> Stats {
    let statistics = |stats: &Map<String, Value>| -> FeatureStats {
        let numbers = |value| {
            let mut flat = Vec::new();
            flatten(value, &mut flat).then_some(flat)
        };
        stats.iter().filter_map(|(stat, value)| Some((stat.clone(), numbers(value)?))).collect()
    };
    let feature = |(name, stats): (&String, &Value)| Some((name.clone(), statistics(stats.as_object()?)));
    Stats(features.iter().filter_map(feature).collect())
}

/// False for what is no number, and no list of numbers.
fn flatten(value: &Value, out: &mut Vec<f64>) -> bool {
    match value {
        Value::Array(items) => return items.iter().all(|item| flatten(item, out)),
        Value::Bool(b) => out.push(f64::from(u8::from(*b))),
        Value::Number(x) => out.push(x.as_f64().filter(|x| x.is_finite()).unwrap_or(f64::NAN)),
        Value::Null => out.push(f64::NAN),
        Value::String(_) | Value::Object(_) => return false,
    }
    true
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
        // A statistic that some episode lacks cannot be aggregated, nor a deviation around a mean that nobody
        // knows.
        self.stats.retain(|name, _| episode.contains_key(name) && (name != "std" || means.is_some()));
        for (name, mine) in &mut self.stats {
            let theirs = &episode[name];
            if mine.len() != theirs.len() {
                let (found, before) = (theirs.len(), mine.len());
                return Err(format!("{name} has length {found}, but {before} in earlier episodes"));
            }
            for (i, (a, b)) in mine.iter_mut().zip(theirs).enumerate() {
                *a = match name.as_str() {
                    _ if b.is_nan() => f64::NAN,
                    "min" if !a.is_nan() => a.min(*b),
                    "max" if !a.is_nan() => a.max(*b),
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

/// Samples behind these statistics, as a weight; NaN, which then all statistics become, if it is unknown.
fn count_of(stats: &FeatureStats) -> f64 {
    let count = stats.get("count").and_then(|count| count.first()).copied().unwrap_or(1.0);
    if count < 1.0 { 1.0 } else { count }
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
    fn what_python_writes_for_no_number_is_no_number() {
        let text = r#"{"a": {"std": [NaN, 2.0, -Infinity], "mean": null}, "of \"NaN\\": {"max": Infinity, "unit": "NaN"}}"#;
        let stats = parse(&serde_json::from_str(&python_json(text)).unwrap());
        let a = &stats.0["a"];
        assert!(a["std"][0].is_nan() && a["std"][1] == 2.0 && a["std"][2].is_nan() && a["mean"][0].is_nan());
        assert_eq!(stats.0["of \"NaN\\"].keys().collect::<Vec<_>>(), ["max"]);
        assert!(matches!(python_json("[1.0]"), Cow::Borrowed(_)));
    }

    #[test]
    fn one_odd_episode_makes_what_it_touches_odd() {
        let odd = |name: &str| {
            let mut stats = stats_of(&[3.0]);
            stats.insert(name.into(), vec![f64::NAN]);
            let mut sum = Aggregate::new(stats_of(&[1.0, 2.0]));
            sum.add(&stats).unwrap();
            sum.finish()
        };
        let nan = |stats: &FeatureStats| -> Vec<String> {
            stats.iter().filter(|(_, values)| values[0].is_nan()).map(|(name, _)| name.clone()).collect()
        };
        assert_eq!(nan(&odd("max")), ["max"]);
        assert_eq!(nan(&odd("mean")), ["mean", "std"]);
        assert_eq!(nan(&odd("count")), ["count", "mean", "std"]);
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
