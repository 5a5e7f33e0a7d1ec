//! Several runs beside each other: losses in one chart, results and differences in columns.

use std::collections::{BTreeMap, HashSet};

use serde_json::Value;

use super::{
    chart::{COLOURS, Chart, PlotCurve, Unit, means, number},
    html::Html,
    read::ReportedRun,
    sections::{charts, figure, results, section},
};
use crate::render::runs::{differences, is_detail, shown};

/// Columns of a curve beside others.
const COLUMNS: usize = 80;
/// Characters of a value in a column.
const LONGEST: usize = 80;
/// Keys that are different in any two runs.
const OF_EACH_RUN: [&str; 5] = ["summary.", "run.name", "run.run_id", "run.spec_digest", "run.output_dir"];
/// Differences that have a row.
const MOST_ROWS: usize = 300;

/// What is shown of several runs before each of them.
pub fn comparison(runs: &[ReportedRun]) -> Option<Html> {
    let mut html = Html::new();
    let names = labels(runs);
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
    let mut figures = vec![figure("Training loss", &legend, chart(&ReportedRun::losses, false))];
    let mut measures: Vec<_> = runs.iter().flat_map(|run| run.tags("eval/")).collect();
    measures.sort_unstable();
    measures.dedup();
    for (_, name) in measures.iter().filter(|(_, name)| !name.contains('/')) {
        let title = format!("Held-out {}", name.replace('_', " "));
        figures.push(figure(&title, &legend, chart(&|run| run.held_out(name), true)));
    }
    let speed = chart(&|run| run.series("speed/samples_per_second"), false);
    figures.push(figure("Samples a second", &legend, Chart { from_zero: true, ..speed }));
    html.push(charts(figures));
    html.push(columns("result", &names, results_of(runs)));
    let found = different_keys(runs);
    html.push(match found.is_empty() {
        true => Html::with_text("p", "note", "same program and same run file"),
        false => columns("different", &names, found.into_iter().take(MOST_ROWS).collect()),
    });
    section("Comparison", html)
}

/// What runs are called beside each other: by their names, or where two have the same by their directories,
/// as much of them as tells them apart.
pub fn labels(runs: &[ReportedRun]) -> Vec<String> {
    let path = |run: &ReportedRun| run.dir.dir.display().to_string();
    let last = |run: &ReportedRun| {
        run.dir.dir.file_name().map_or_else(|| path(run), |name| name.to_string_lossy().into_owned())
    };
    let each = |of: &dyn Fn(&ReportedRun) -> String| runs.iter().map(of).collect::<Vec<_>>();
    let choices = [each(&ReportedRun::name), each(&last)];
    let is_unique = |names: &Vec<String>| names.iter().collect::<HashSet<_>>().len() == names.len();
    choices.into_iter().find(is_unique).unwrap_or_else(|| each(&path))
}

/// One row for each name, one column for each run.
fn columns(what: &'static str, runs: &[String], rows: Vec<(String, Vec<String>)>) -> Html {
    let mut html = Html::new();
    let head: Vec<Html> =
        [what.into()].into_iter().chain(runs.iter().map(|run| Html::with_text("b", "", run))).collect();
    let rows = rows.into_iter().map(|(name, values)| {
        [Html::from(name)].into_iter().chain(values.into_iter().map(Html::from)).collect()
    });
    let rows: Vec<_> = [head].into_iter().chain(rows).collect();
    html.table(&[], &rows);
    html
}

fn results_of(runs: &[ReportedRun]) -> Vec<(String, Vec<String>)> {
    let mut rows = Vec::<(String, Vec<String>)>::new();
    for (column, run) in runs.iter().enumerate() {
        let mut results = results(run);
        for (name, value) in run.dir.summary["error_after"].as_object().into_iter().flatten() {
            let name = format!("held-out {}", name.replace('_', " "));
            let is_new = name != "held-out samples" && results.iter().all(|(known, _)| *known != name);
            results.extend(value.as_f64().filter(|_| is_new).map(|value| (name, number(value))));
        }
        for (name, value) in results {
            let row = match rows.iter().position(|(known, _)| *known == name) {
                Some(row) => row,
                None => {
                    rows.push((name, vec![String::new(); runs.len()]));
                    rows.len() - 1
                }
            };
            rows[row].1[column] = value;
        }
    }
    // What none of them knows.
    rows.retain(|(_, values)| values.iter().any(|value| !value.is_empty()));
    rows
}

/// Keys that the runs do not agree in, with the value of each.
fn different_keys(runs: &[ReportedRun]) -> Vec<(String, Vec<String>)> {
    let Some((first, others)) = runs.split_first() else { return Vec::new() };
    let mut rows = BTreeMap::<String, Vec<Option<Value>>>::new();
    for (column, other) in others.iter().enumerate() {
        for difference in differences(&first.dir, &other.dir) {
            // Results have their own table, and every run has its own name.
            if is_detail(&difference) || OF_EACH_RUN.iter().any(|own| difference.0.starts_with(own)) {
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
