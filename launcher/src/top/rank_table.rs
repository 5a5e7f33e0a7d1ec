//! A row for each rank: what it does, where its step's time goes, its memory, its replica, its health.

use std::time::Duration;

use coxswain_proto::{
    human,
    report::{Metric, stage_times},
    v1::{RankStatus, WorkerPhase},
};
use ratatui_core::{
    layout::Rect,
    style::Style,
    terminal::Frame,
    text::{Line, Text},
};

use super::{app::App, theme::Theme};
use crate::{
    render::{living::cut, names, table},
    view::RunView,
};

/// Columns below which the host of a rank is left out.
const WIDE: u16 = 100;
/// `cache build`, but not `communication`.
const LONGEST_PHASE: usize = 11;
/// After so long without a sign of life a rank is said to be silent.
const SILENT: Duration = Duration::from_secs(10);

/// Rows that the table would take.
pub fn height(run: &RunView) -> u16 {
    match run.status.ranks.len() {
        0 => 0,
        ranks => u16::try_from(ranks + 1).unwrap_or(u16::MAX),
    }
}

/// Draws as many rows as there is room for, the marked one among them.
pub fn draw(frame: &mut Frame, area: Rect, app: &App, theme: Theme) {
    let run = app.run();
    let wide = area.width >= WIDE && run.status.ranks.iter().any(|rank| !rank.host.is_empty());
    let rows: Vec<Vec<String>> = run.status.ranks.iter().map(|rank| row(run, rank, wide)).collect();
    let mut head =
        vec!["rank", "phase", "ms", "data", "model", "opt", "comm", "memory", "plan", "copy", "health"];
    if wide {
        head.insert(1, "host");
    }
    let text = table::grid(&head, &rows);
    let mut lines = text.lines().map(|line| cut(line, area.width.into()));
    let head = lines.next().map(|line| Line::styled(line, theme.faint()));
    let first = (app.rank + 2).saturating_sub(area.height.into());
    let body = lines.zip(&run.status.ranks).enumerate().skip(first).map(|(at, (line, rank))| {
        let style = match at == app.rank {
            true => theme.marked(),
            false if !matches!(health(rank).as_str(), "ok" | "done") => theme.warning(),
            false => Style::new(),
        };
        Line::styled(line, style)
    });
    frame.render_widget(Text::from_iter(head.into_iter().chain(body)), area);
}

fn row(run: &RunView, rank: &RankStatus, wide: bool) -> Vec<String> {
    let times = rank.times.unwrap_or_default();
    let metrics: Vec<Metric> = rank.metrics.iter().cloned().map(Into::into).collect();
    let model: f64 = stage_times(&metrics).map(|(_, seconds)| 1e3 * seconds).fold(0.0, |sum, ms| sum + ms);
    let ms = |ms: f64| if rank.times.is_some() { format!("{ms:.0}") } else { "-".to_owned() };
    let peak = |bytes| if bytes > 0 { human::bytes(bytes) } else { "-".to_owned() };
    let (measured, of_plan) = match run.memory.get(&rank.rank) {
        Some((measured, predicted)) if *predicted > 0 => (
            *measured.max(&rank.memory_peak),
            format!("{:.0} %", 100.0 * *measured as f64 / *predicted as f64),
        ),
        _ => (rank.memory_peak, "-".to_owned()),
    };
    let mut row = vec![
        rank.rank.to_string(),
        cut(&names::plain(&names::worker_phase(rank.phase)), LONGEST_PHASE),
        ms(times.total_ms),
        ms(times.data_ms),
        ms(model),
        ms(times.optimizer_ms),
        ms(times.communication_ms),
        peak(measured),
        of_plan,
        run.replica(rank),
        health(rank),
    ];
    if wide {
        row.insert(1, cut(&rank.host, 16));
    }
    row
}

fn health(rank: &RankStatus) -> String {
    let silent = Duration::from_millis(rank.silent_ms);
    match rank.gone {
        true => "gone".to_owned(),
        false if rank.spare => "spare".to_owned(),
        false if rank.phase == i32::from(WorkerPhase::Done) => "done".to_owned(),
        false if silent >= SILENT => format!("silent {}", human::time(silent)),
        false if rank.slow.is_some() => rank
            .slow
            .as_ref()
            .map(|slow| format!("slow x{:.2}, {}", slow.factor, slow.part))
            .unwrap_or_default(),
        false => "ok".to_owned(),
    }
}
