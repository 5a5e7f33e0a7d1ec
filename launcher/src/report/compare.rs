//! Several runs beside each other: losses in one chart, results and differences in columns.

use std::collections::BTreeMap;

use serde_json::Value;

use super::{
    chart::{COLOURS, Chart, PlotCurve, Unit, means},
    html::Html,
    read::ReportedRun,
    sections::{figure, results, section},
};
use crate::render::runs::{differences, is_detail, shown};

/// Columns of a curve beside others.
const COLUMNS: usize = 240;
/// Characters of a value in a column.
const LONGEST: usize = 80;
/// Differences that have a row.
const MOST_ROWS: usize = 300;

/// What is shown of several runs before each of them.
pub fn comparison(runs: &[ReportedRun]) -> Option<Html> {
    let mut html = Html::new();
    let names: Vec<_> = runs.iter().map(|run| run.dir.dir.display().to_string()).collect();
    let legend: Vec<_> =
        names.iter().enumerate().map(|(colour, name)| (colour % COLOURS, name.as_str())).collect();
    let chart = |of: &dyn Fn(&ReportedRun) -> Vec<(f64, f64)>, marked: bool| {
        let curves = runs.iter().enumerate();
        let curves = curves.map(|(colour, run)| {
            let points = if marked { of(run) } else { means(&of(run), COLUMNS) };
            PlotCurve { colour, points, marked, ..PlotCurve::default() }
        });
        Chart { curves: curves.collect(), x: Unit::Steps, ..Chart::default() }
    };
    html.element("div", "charts", |html| {
        html.push(figure("Training loss", &legend, chart(&ReportedRun::losses, false)));
        let mut measures: Vec<_> = runs.iter().flat_map(|run| run.tags("eval/")).collect();
        measures.sort_unstable();
        measures.dedup();
        for (tag, name) in measures.iter().filter(|(_, name)| !name.contains('/')) {
            let title = format!("Held-out {}", name.replace('_', " "));
            html.push(figure(&title, &legend, chart(&|run| run.series(tag), true)));
        }
        let speed = chart(&|run| run.series("speed/samples_per_second"), false);
        html.push(figure("Samples a second", &legend, Chart { from_zero: true, ..speed }));
    });
    html.push(columns("result", &names, results_of(runs)));
    let found = different_keys(runs);
    html.push(match found.is_empty() {
        true => Html::of("p", "note", "no key, program or result is different"),
        false => columns("different", &names, found.into_iter().take(MOST_ROWS).collect()),
    });
    section("Comparison", html)
}

/// One row for each name, one column for each run.
fn columns(what: &'static str, runs: &[String], rows: Vec<(String, Vec<String>)>) -> Html {
    let mut html = Html::new();
    let head: Vec<Html> =
        [what.into()].into_iter().chain(runs.iter().map(|run| Html::of("b", "", run))).collect();
    let rows = rows.into_iter().map(|(name, values)| {
        [Html::from(name)].into_iter().chain(values.into_iter().map(Html::from)).collect()
    });
    let rows: Vec<_> = [head].into_iter().chain(rows).collect();
    html.table(&[], &rows);
    html
}

fn results_of(runs: &[ReportedRun]) -> Vec<(String, Vec<String>)> {
    let all: Vec<_> = runs.iter().map(results).collect();
    let names = all.first().into_iter().flatten().enumerate();
    let rows = names.map(|(row, (name, _))| {
        ((*name).to_owned(), all.iter().map(|results| results[row].1.clone()).collect())
    });
    rows.collect()
}

/// Keys that the runs do not agree in, with the value of each.
fn different_keys(runs: &[ReportedRun]) -> Vec<(String, Vec<String>)> {
    let Some((first, others)) = runs.split_first() else { return Vec::new() };
    let mut rows = BTreeMap::<String, Vec<Option<Value>>>::new();
    for (column, other) in others.iter().enumerate() {
        for difference in differences(&first.dir, &other.dir) {
            if is_detail(&difference) {
                continue;
            }
            let (key, here, there) = difference;
            let row = rows.entry(key).or_insert_with(|| vec![None; runs.len()]);
            (row[0], row[column + 1]) = (Some(here), Some(there));
        }
    }
    let told = |row: Vec<Option<Value>>| {
        let first = row[0].clone().unwrap_or_default();
        row.into_iter().map(|value| shown(value.as_ref().unwrap_or(&first), LONGEST)).collect()
    };
    rows.into_iter().map(|(key, row)| (key, told(row))).collect()
}
