//! The parts of a run's report, each from what is known of the run to a piece of the page; nothing where
//! there is nothing to show.

mod account;
mod curves;
mod figure;
mod held_out;
mod memory;
mod overview;
mod samples;
mod timeline;

use super::{html::Html, read::ReportedRun};

pub use self::{
    figure::{charts, figure, section},
    overview::results,
};

/// All of a run's parts, in the order of the page.
pub fn all(run: &ReportedRun) -> Html {
    let mut html = Html::new();
    html.push(overview::lead(run));
    html.push(overview::tiles(run));
    let parts = [
        curves::loss(run),
        curves::speed(run),
        held_out::by_part(run),
        samples::samples(run),
        memory::section(run),
        timeline::timeline(run),
        account::account(run),
        overview::what_ran(run),
    ];
    parts.into_iter().flatten().for_each(|part| html.push(part));
    html
}
