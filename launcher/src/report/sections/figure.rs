//! A part of the page, and a chart with its legend.

use crate::report::{
    chart::{COLOURS, Chart},
    html::Html,
};

/// Classes of the style sheet for a legend's colours; the last one is that of faults.
const CLASSES: [&str; COLOURS + 1] = ["s0", "s1", "s2", "s3", "s4", "s5", "s6", "s7", "fault"];
/// The colour of faults in a legend.
pub const FAULTS: usize = COLOURS;

/// A heading and what is below it; nothing if that is empty.
pub fn section(title: &str, inner: Html) -> Option<Html> {
    if inner == Html::new() {
        return None;
    }
    let mut html = Html::new();
    html.element("section", "", |html| {
        html.element("h3", "", |html| html.text(title));
        html.push(inner);
    });
    Some(html)
}

/// A chart below its title and the names of its curves, each with the number of its colour; nothing if there
/// is no point in it.
pub fn figure(title: &str, names: &[(usize, &str)], chart: Chart) -> Html {
    let mut html = Html::new();
    let class = if chart.small { "small" } else { "" };
    let Some(drawing) = chart.draw() else { return html };
    html.element("figure", class, |html| {
        html.element("figcaption", "", |html| {
            html.element("b", "", |html| html.text(title));
            for (colour, name) in names {
                html.element("span", CLASSES[colour % CLASSES.len()], |html| html.text(name));
            }
        });
        html.drawing(drawing);
    });
    html
}

/// Charts beside each other, as many as there is room for; nothing if all of them are empty.
pub fn charts(figures: impl IntoIterator<Item = Html>) -> Html {
    let mut inner = Html::new();
    figures.into_iter().for_each(|figure| inner.push(figure));
    let mut html = Html::new();
    if inner != Html::new() {
        html.element("div", "charts", |html| html.push(inner));
    }
    html
}
