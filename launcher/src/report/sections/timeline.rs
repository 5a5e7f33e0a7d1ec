//! What happened when: steps over time, with faults marked, and the events in words.

use coxswain_proto::human;

use super::figure::{FAULTS, charts, figure, section};
use crate::report::{
    chart::{Chart, PlotCurve, Unit},
    html::Html,
    read::ReportedRun,
};

/// Faults that have a row; the first ones of more.
const MOST_FAULTS: usize = 50;

pub(super) fn timeline(run: &ReportedRun) -> Option<Html> {
    let mut html = Html::new();
    html.push(steps_over_time(run));
    html.push(faults(run));
    html.push(events(run));
    section("What happened", html)
}

/// Steps committed, by the clock; flat where nothing was committed.
fn steps_over_time(run: &ReportedRun) -> Html {
    let steps: Vec<_> = run.scalars.series.get("train/loss").into_iter().flatten().collect();
    let Some(begin) = steps.first().map(|point| point.unix_seconds) else { return Html::new() };
    let since = |unix_seconds: f64| unix_seconds - begin;
    let points = steps.iter().map(|point| (since(point.unix_seconds), point.step as f64 + 1.0)).collect();
    let faults = run.story.events.iter().filter(|event| event.tag == "fail");
    let faults: Vec<_> = faults.filter_map(|event| event.unix_seconds.map(since)).collect();
    let lines: &[_] = if faults.is_empty() { &[] } else { &[(FAULTS, "faults")] };
    let world = run.scalars.series.get("run/world_size").into_iter().flatten();
    let world = world.map(|point| (since(point.unix_seconds), point.value)).collect();
    let chart = |curve: PlotCurve, y, faults: &[f64]| Chart {
        curves: vec![curve],
        x: Unit::Seconds,
        y,
        from_zero: true,
        faults: faults.to_vec(),
        ..Chart::default()
    };
    let steps = PlotCurve { points, ..PlotCurve::default() };
    let world = PlotCurve { colour: 2, points: world, ..PlotCurve::default() };
    charts([
        figure("Steps committed over time", lines, chart(steps, Unit::Steps, &faults)),
        figure("Ranks over time", lines, chart(world, Unit::Things, &faults)),
    ])
}

fn faults(run: &ReportedRun) -> Html {
    let mut html = Html::new();
    let faults = run.records().map_or(&[][..], |records| &records.faults);
    if faults.is_empty() {
        return html;
    }
    let rows: Vec<_> = faults
        .iter()
        .take(MOST_FAULTS)
        .map(|fault| {
            let victims: Vec<_> = fault.victims.iter().map(u32::to_string).collect();
            let generation = fault.generation.to_string();
            let cells = [generation, fault.kind.replace('_', " "), victims.join(", "), fault.text.clone()];
            cells.map(Html::from).into()
        })
        .collect();
    html.table(&["generation#", "fault", "victims", "first cause"], &rows);
    if let Some(more) = faults.len().checked_sub(MOST_FAULTS).filter(|more| *more > 0) {
        html.element("p", "note", |html| html.text(&format!("and {more} later ones")));
    }
    html
}

fn events(run: &ReportedRun) -> Html {
    let mut html = Html::new();
    if run.story.events.is_empty() {
        return html;
    }
    html.element("details", "", |html| {
        html.element("summary", "", |html| {
            html.text(&format!("events of the coordinator's log ({})", run.story.events.len()));
        });
        let begin = run.story.events.iter().find_map(|event| event.unix_seconds);
        let row = |event: &crate::report::story::StoryEvent| {
            let after = event.unix_seconds.zip(begin).map(|(at, begin)| human::seconds(at - begin));
            let text = if event.warns {
                Html::with_text("b", "warn", &event.text)
            } else {
                event.text.as_str().into()
            };
            vec![
                event.time.as_str().into(),
                after.unwrap_or_default().into(),
                event.tag.as_str().into(),
                text,
            ]
        };
        let rows: Vec<_> = run.story.events.iter().map(row).collect();
        html.table(&["time", "after", "", ""], &rows);
        if run.story.left_out > 0 {
            let text =
                format!("{} events between the first and the last ones are left out", run.story.left_out);
            html.element("p", "note", |html| html.text(&text));
        }
    });
    html
}
