//! Memory: predicted and measured by category, and the peaks of every rank.

use coxswain_proto::{human, memory::MemoryRow};
use serde::Deserialize;
use serde_json::Value;

use super::{
    figure::{self, charts, figure},
    overview::peak_of,
};
use crate::report::{
    chart::{Chart, PlotCurve, Unit},
    html::Html,
    read::ReportedRun,
};

/// Ranks that have a row; those with the largest peaks if there are more.
const MOST_RANKS: usize = 64;

/// The section of a run's memory, from its summary: nothing where it has none.
pub(super) fn section(run: &ReportedRun) -> Option<Html> {
    let summary = &run.dir.summary;
    let points = run.series("memory/peak_bytes");
    let points = points.into_iter().map(|(step, bytes)| (step, bytes / f64::from(1 << 20))).collect();
    let curves = vec![PlotCurve { colour: 3, points, ..PlotCurve::default() }];
    let chart = Chart { curves, x: Unit::Steps, y: Unit::Mebibytes, from_zero: true, ..Chart::default() };
    let mut html = Html::new();
    let mut tables = categories(&summary["memory"]);
    tables.push(ranks(&summary["peak_memory"]));
    let drawn = figure("Largest peak of a rank", &[], chart);
    if tables == Html::new() {
        return figure::section("Memory", charts([drawn]));
    }
    html.element("div", "beside", |html| {
        html.element("div", "", |html| html.push(tables));
        html.push(drawn);
    });
    figure::section("Memory", html)
}

/// Rank 0's memory in steps, by category, predicted above measured.
fn categories(memory: &Value) -> Html {
    let mut html = Html::new();
    let all = Vec::<MemoryRow>::deserialize(&memory["categories"]).unwrap_or_default();
    let (Some(predicted), Some(measured)) = (memory["predicted"].as_u64(), memory["measured"].as_u64())
    else {
        return html;
    };
    let most = all.iter().flat_map(|of| [of.predicted, of.measured.unwrap_or(0)]).max().unwrap_or(0).max(1);
    let row = |name: &str, predicted: u64, measured: Option<u64>, most: u64| {
        let mut bars = Html::new();
        bars.bar("s0", predicted as f64 / most as f64);
        if let Some(measured) = measured {
            bars.bar("s1", measured as f64 / most as f64);
        }
        let error = measured.filter(|&measured| measured > 0).map_or_else(
            || "-".to_owned(),
            |measured| format!("{:+.1} %", 100.0 * (predicted as f64 / measured as f64 - 1.0)),
        );
        let measured = measured.map_or_else(|| "-".to_owned(), human::bytes);
        vec![name.into(), human::bytes(predicted).into(), measured.into(), error.into(), bars]
    };
    let told = all.iter().filter(|of| of.predicted > 0 || of.measured.is_some_and(|bytes| bytes > 0));
    let mut rows: Vec<_> =
        told.map(|of| row(&of.category.to_string(), of.predicted, of.measured, most)).collect();
    rows.push(row(
        "peak, corrected by earlier runs",
        predicted,
        Some(measured),
        predicted.max(measured).max(1),
    ));
    html.element("p", "legend", |html| {
        html.text("rank 0 during steps: ");
        html.push(Html::with_text("span", "s0", "predicted"));
        html.push(Html::with_text("span", "s1", "measured"));
    });
    html.table(&["category", "predicted#", "measured#", "error#", ""], &rows);
    html
}

/// The largest snapshots of each rank, and the phase that each was taken in.
fn ranks(ranks: &Value) -> Html {
    let mut html = Html::new();
    let mut ranks: Vec<_> = ranks.as_array().into_iter().flatten().collect();
    if ranks.is_empty() {
        return html;
    }
    let more = ranks.len().saturating_sub(MOST_RANKS);
    ranks.sort_by_key(|rank| std::cmp::Reverse(peak_of(rank)));
    ranks.truncate(MOST_RANKS);
    ranks.sort_by_key(|rank| rank["rank"].as_u64());
    let most = ranks.iter().filter_map(|rank| peak_of(rank)).max().unwrap_or(0).max(1);
    let row = |rank: &&Value| {
        let bytes = |scope: &str| rank[scope].as_u64().map_or_else(|| "-".to_owned(), human::bytes);
        let phases = rank["phases"].as_object().into_iter().flatten();
        let phase = phases.max_by_key(|(_, peak)| peak["in_use"].as_u64()).map_or("", |(name, _)| name);
        let mut bar = Html::new();
        bar.bar("s1", peak_of(rank).unwrap_or(0) as f64 / most as f64);
        let number = rank["rank"].as_u64().map_or_else(String::new, |number| number.to_string());
        let cells = [number, bytes("in_use"), phase.to_owned(), bytes("reserved"), bytes("driver")];
        cells.map(Html::from).into_iter().chain([bar]).collect()
    };
    let rows: Vec<_> = ranks.iter().map(row).collect();
    html.table(&["rank#", "in use#", "peak phase", "reserved#", "driver or resident#", ""], &rows);
    if more > 0 {
        html.element("p", "note", |html| {
            html.text(&format!("{more} ranks with smaller peaks are not shown"))
        });
    }
    html
}
