//! Held-out samples beside what was predicted of them, from `samples.json`.
//!
//! ```text
//! {"step": 150, "samples": [{"sample": 12, "title": "..",
//!   "pictures": [{"name": "..", "png": base64}],
//!   "curves":   [{"name": "..", "reference": [..], "predicted": [..]}],
//!   "texts":    [{"name": "..", "reference": "..", "predicted": ".."}]}]}
//! ```

use serde_json::Value;

use super::figure::{figure, section};
use crate::report::{
    chart::{Chart, PlotCurve},
    html::Html,
    read::ReportedRun,
};

/// Samples that are shown.
const MOST: usize = 8;
/// Pictures, curves or texts of one.
const MOST_PARTS: usize = 16;

pub(super) fn samples(run: &ReportedRun) -> Option<Html> {
    let mut html = Html::new();
    for sample in list(&run.samples, "samples").take(MOST) {
        html.element("article", "", |html| one(html, sample));
    }
    if html == Html::new() {
        return None;
    }
    let mut whole = Html::new();
    whole.element("p", "legend", |html| {
        if let Some(step) = run.samples["step"].as_u64() {
            html.text(&format!("after step {step} "));
        }
        // Pictures say by their names what they are.
        if list(&run.samples, "samples").any(has_pairs) {
            html.push(Html::with_text("span", "s7", "reference"));
            html.push(Html::with_text("span", "s1", "predicted"));
        }
    });
    whole.push(html);
    section("Held-out samples", whole)
}

/// Whether it has what is drawn in two colours.
fn has_pairs(sample: &Value) -> bool {
    ["curves", "texts"].iter().any(|key| list(sample, key).next().is_some())
}

fn one(html: &mut Html, sample: &Value) {
    html.element("h4", "", |html| {
        html.text(&sample["sample"].as_u64().map_or_else(String::new, |index| format!("sample {index} ")));
        let title = text(&sample["title"]);
        if !title.is_empty() {
            html.element("q", "", |html| html.text(title));
        }
    });
    if list(sample, "pictures").next().is_some() {
        html.element("div", "pictures", |html| {
            for picture in list(sample, "pictures") {
                html.element("figure", "small", |html| {
                    html.picture(text(&picture["png"]), text(&picture["name"]));
                    html.element("figcaption", "", |html| html.text(text(&picture["name"])));
                });
            }
        });
    }
    if list(sample, "curves").next().is_some() {
        html.element("div", "charts small", |html| {
            for curve in list(sample, "curves") {
                let of = |key: &str, colour| PlotCurve {
                    colour,
                    points: points(&curve[key]),
                    ..PlotCurve::default()
                };
                let curves = vec![of("reference", 7), of("predicted", 1)];
                let chart = Chart { curves, small: true, ..Chart::default() };
                html.push(figure(text(&curve["name"]), &[], chart));
            }
        });
    }
    for pair in list(sample, "texts") {
        html.element("div", "pair", |html| {
            html.element("small", "", |html| html.text(text(&pair["name"])));
            html.element("p", "s7", |html| html.text(text(&pair["reference"])));
            html.element("p", "s1", |html| html.text(text(&pair["predicted"])));
        });
    }
}

fn list<'a>(of: &'a Value, key: &str) -> impl Iterator<Item = &'a Value> {
    of[key].as_array().into_iter().flatten().take(MOST_PARTS)
}

fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_default()
}

fn points(values: &Value) -> Vec<(f64, f64)> {
    let values = values.as_array().into_iter().flatten().enumerate();
    values.filter_map(|(at, value)| Some((at as f64, value.as_f64()?))).collect()
}
