//! Held-out errors by part: dimension of an action, step of a horizon, stem.

use std::collections::BTreeMap;

use serde_json::Value;

use super::figure::section;
use crate::report::{chart::number, html::Html, read::ReportedRun};

/// Parts that have a row, of each measure.
const MOST_PARTS: usize = 64;
/// Rows that are always there to be seen.
const SHORT: usize = 12;

/// Before and after training, measure by measure; nothing if the task tells no parts.
pub(super) fn by_part(run: &ReportedRun) -> Option<Html> {
    let (before, after) =
        (&run.dir.summary["error_before"]["parts"], &run.dir.summary["error_after"]["parts"]);
    let value = |of: &Value, name: &str| of[name].as_f64().filter(|value| value.is_finite());
    let mut measures = BTreeMap::<String, Vec<Part>>::new();
    for name in after.as_object().into_iter().flat_map(|parts| parts.keys()) {
        let (measure, part) = match name.split_once('/') {
            Some((measure, part)) => (measure.replace('_', " "), words(part, &run.action_names)),
            // Measures without parts are next to each other.
            None => (String::new(), name.replace('_', " ")),
        };
        let values = [before, after].map(|of| value(of, name));
        measures.entry(measure).or_default().push(Part { name: part, values });
    }
    let mut html = Html::new();
    if !measures.is_empty() {
        html.element("p", "legend", |html| {
            html.push(Html::with_text("span", "s7", "before training"));
            html.push(Html::with_text("span", "s1", "after"));
        });
    }
    for (measure, parts) in &measures {
        // A short one is seen without a click.
        let (fold, title) = if parts.len() > SHORT { ("details", "summary") } else { ("div", "h4") };
        html.element(fold, "", |html| {
            if !measure.is_empty() || parts.len() > SHORT {
                html.element(title, "", |html| html.text(measure));
            }
            html.table(&["part", "before#", "after#", ""], &rows(parts));
        });
    }
    section("Held-out measures by part", html)
}

/// One part of a measure.
struct Part {
    name: String,
    /// Before and after training, where they are known.
    values: [Option<f64>; 2],
}

/// A row for each part. Lengths say nothing of values below 0.
fn rows(parts: &[Part]) -> Vec<Vec<Html>> {
    let all = || parts.iter().flat_map(|part| part.values).flatten();
    let most = all().fold(f64::MIN_POSITIVE, f64::max);
    let has_bars = all().all(|value| value >= 0.0);
    let row = |part: &Part| {
        let mut bars = Html::new();
        for (class, value) in ["s7", "s1"].into_iter().zip(part.values).filter(|_| has_bars) {
            bars.bar(class, value.unwrap_or(0.0) / most);
        }
        let told = part.values.map(|value| Html::from(value.map_or_else(|| "-".to_owned(), number)));
        [Html::from(part.name.as_str())].into_iter().chain(told).chain([bars]).collect()
    };
    parts.iter().take(MOST_PARTS).map(row).collect()
}

/// `gripper` of `dim3`, or `dimension 3` where it has no name; `step 12` of `step12`.
fn words(part: &str, dimensions: &[String]) -> String {
    let number = |prefix: &str| part.strip_prefix(prefix)?.parse::<usize>().ok();
    let dimension = |dim| dimensions.get(dim).cloned().unwrap_or_else(|| format!("dimension {dim}"));
    let step = || number("step").map(|step| format!("step {step}"));
    number("dim").map(dimension).or_else(step).unwrap_or_else(|| part.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_below_0_have_no_bars_and_what_is_unknown_is_a_dash() {
        let of = |values| rows(&[Part { name: "drums".into(), values }])[0].clone();
        assert_eq!(of([Some(-4.0), Some(2.0)])[3], Html::new());
        assert_ne!(of([Some(4.0), Some(2.0)])[3], Html::new());
        assert_eq!(of([None, Some(2.0)])[1], Html::from("-"));
        let names = ["x", "gripper"].map(str::to_owned);
        let told = ["dim1", "dim3", "step12", "plucks"].map(|part| words(part, &names));
        assert_eq!(told, ["gripper", "dimension 3", "step 12", "plucks"]);
    }
}
