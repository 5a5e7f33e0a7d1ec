//! Loss and throughput over the steps.

use coxswain_proto::human;
use ratatui_core::{
    layout::{Constraint, Layout, Rect},
    style::Style,
    symbols::Marker,
    terminal::Frame,
    text::Line,
};
use ratatui_widgets::{
    block::Block,
    borders::Borders,
    chart::{Axis, Chart, Dataset, GraphType},
};

use super::theme::Theme;
use crate::view::{RunView, Series};

/// Columns below which there is room for one chart alone.
const TWO: u16 = 60;
/// Points that a character of braille has beside each other.
const DOTS: usize = 2;

/// Draws both charts side by side, or the loss alone.
pub fn draw(frame: &mut Frame, area: Rect, run: &RunView, theme: Theme) {
    let status = &run.status;
    let loss = format!("loss {}", real(status.loss));
    let speed = format!(
        "{} samples/s, {} tokens/s",
        human::count(status.samples_per_second),
        human::count(status.tokens_per_second)
    );
    if area.width < TWO {
        return chart(frame, area, &Curve { series: &run.loss, title: loss, style: theme.loss() }, theme);
    }
    let [left, right] = Layout::horizontal([Constraint::Fill(1); 2]).spacing(1).areas(area);
    chart(frame, left, &Curve { series: &run.loss, title: loss, style: theme.loss() }, theme);
    chart(frame, right, &Curve { series: &run.speed, title: speed, style: theme.speed() }, theme);
}

struct Curve<'a> {
    series: &'a Series,
    title: String,
    style: Style,
}

fn chart(frame: &mut Frame, area: Rect, curve: &Curve, theme: Theme) {
    let title = Line::styled(format!(" {} ", curve.title), theme.title());
    let block = Block::new().borders(Borders::TOP).border_style(theme.faint()).title(title);
    let points = curve.series.drawn(DOTS * usize::from(area.width));
    let (Some((first, _)), Some((last, _))) = (points.first(), points.last()) else {
        return frame.render_widget(block, area);
    };
    let range = |(least, most): (f64, f64), (_, value): &(f64, f64)| (least.min(*value), most.max(*value));
    let (least, most) = points.iter().fold((f64::INFINITY, f64::NEG_INFINITY), range);
    // A flat curve lies in the middle.
    let margin = if most > least { 0.0 } else { least.abs().max(1.0) / 10.0 };
    let (least, most) = (least - margin, most + margin);
    let steps = [first.round(), last.round()].map(|step| Line::styled(step.to_string(), theme.faint()));
    let values = [least, most].map(|value| Line::styled(real(value), theme.faint()));
    let curve = Dataset::default()
        .marker(Marker::Braille)
        .graph_type(GraphType::Line)
        .style(curve.style)
        .data(&points);
    let chart = Chart::new(vec![curve])
        .block(block)
        .legend_position(None)
        .x_axis(Axis::default().bounds([*first, last.max(first + 1.0)]).labels(steps).style(theme.faint()))
        .y_axis(Axis::default().bounds([least, most]).labels(values).style(theme.faint()));
    frame.render_widget(chart, area);
}

/// Three to four digits.
fn real(value: f64) -> String {
    match value.abs() {
        v if v != 0.0 && v < 1e-3 => format!("{value:.1e}"),
        v if v < 10.0 => format!("{value:.3}"),
        _ => human::count(value),
    }
}
