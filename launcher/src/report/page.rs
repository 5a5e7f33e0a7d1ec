//! The page: one file with its style and its drawings in it, and nothing that is loaded.

use coxswain_proto::VERSION;

use super::{
    compare::{comparison, labels},
    html::Html,
    read::ReportedRun,
    sections,
};

const STYLE: &str = concat!("<style>\n", include_str!("style.css"), "</style>\n");

/// The report of these runs, in this order.
pub fn page(runs: &[ReportedRun]) -> String {
    let labels = labels(runs);
    let title = labels.join(", ");
    let mut html = Html::new();
    html.markup("<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n");
    html.markup("<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n");
    html.markup("<meta name=\"color-scheme\" content=\"light dark\">\n");
    // Whatever a text may contain, nothing runs and nothing is loaded.
    html.markup("<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; ");
    html.markup("style-src 'unsafe-inline'; img-src data:\">\n");
    html.element("title", "", |html| html.text(&title));
    html.markup(STYLE);
    html.markup("</head>\n<body>\n");
    html.element("header", "", |html| {
        html.element("h1", "", |html| html.text(&title));
        let dirs: Vec<_> = runs.iter().map(|run| run.dir.dir.display().to_string()).collect();
        let note = format!("{} · cox report, Coxswain {VERSION}", dirs.join(", "));
        html.element("p", "note", |html| html.text(&note));
    });
    if runs.len() > 1 {
        comparison(runs).into_iter().for_each(|part| html.push(part));
    }
    for (run, label) in runs.iter().zip(labels) {
        html.element("main", "", |html| one(html, run, Some(label).filter(|_| runs.len() > 1)));
    }
    html.markup("</body>\n</html>\n");
    html.into_string()
}

/// A run, below its name where there are several.
fn one(html: &mut Html, run: &ReportedRun, label: Option<String>) {
    if let Some(label) = label {
        html.element("h2", "", |html| html.text(&label));
    }
    for problem in &run.problems {
        html.element("p", "warn", |html| html.text(problem));
    }
    html.push(sections::all(run));
}
