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
    let mut measures = BTreeMap::<&str, Vec<[&str; 2]>>::new();
    for name in after.as_object().into_iter().flat_map(|parts| parts.keys()) {
        let (measure, part) = name.split_once('/').unwrap_or((name, ""));
        measures.entry(measure).or_default().push([name, part]);
    }
    let mut html = Html::new();
    for (measure, parts) in &measures {
        let value = |of: &Value, name: &str| of[name].as_f64().filter(|value| value.is_finite());
        let all = || parts.iter().flat_map(|[name, _]| [value(before, name), value(after, name)]).flatten();
        let most = all().map(f64::abs).fold(f64::MIN_POSITIVE, f64::max);
        let row = |[name, part]: &[&str; 2]| {
            let [before, after] = [before, after].map(|of| value(of, name));
            let mut bars = Html::new();
            bars.bar("s7", before.unwrap_or(0.0).abs() / most);
            bars.bar("s1", after.unwrap_or(0.0).abs() / most);
            let told = [before, after].map(|value| Html::from(value.map_or_else(|| "-".to_owned(), number)));
            [Html::from(words(part))].into_iter().chain(told).chain([bars]).collect()
        };
        let rows: Vec<_> = parts.iter().take(MOST_PARTS).map(row).collect();
        // A short one is seen without a click.
        let (fold, title) = if rows.len() > SHORT { ("details", "summary") } else { ("div", "h4") };
        html.element(fold, "", |html| {
            html.element(title, "", |html| html.text(&measure.replace('_', " ")));
            html.table(&["of", "before#", "after#", ""], &rows);
        });
    }
    section("Held-out errors by part", html)
}

/// `dimension 3` of `dim3`.
fn words(part: &str) -> String {
    let numbered = |prefix: &str, word: &str| {
        let number = part.strip_prefix(prefix)?.parse::<u32>().ok()?;
        Some(format!("{word} {number}"))
    };
    numbered("dim", "dimension").or_else(|| numbered("step", "step")).unwrap_or_else(|| part.to_owned())
}
