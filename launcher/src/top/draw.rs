//! The screen. What there is room for is decided by its size alone; what is missing on a small one is left
//! out from below: events, charts, ranks, figures.

use coxswain_proto::{human, v1::CheckpointState};
use ratatui_core::{
    layout::{Constraint, Layout, Rect},
    style::Style,
    terminal::Frame,
    text::{Line, Span, Text},
};

use super::{app::App, charts, rank_table, theme::Theme};
use crate::{
    render::{cache, events, living::cut, status},
    view::{RunView, Source},
};

/// Rows of a chart, at least and at most.
const CHART: (u16, u16) = (6, 18);
/// Rows below which there are no charts.
const CHARTS_FROM: u16 = 16;
/// Rows below which there is the state alone.
const TABLES_FROM: u16 = 8;

/// Rows of the newest fault.
const FAULT_ROWS: usize = 3;
/// Columns before those that follow the first.
const INDENT: usize = 12;

/// Draws everything.
pub fn draw(frame: &mut Frame, app: &App, theme: Theme) {
    let area = frame.area();
    let run = app.run();
    let (figures, panels) = (figures(run), panels(run, area, theme));
    let tables = area.height >= TABLES_FROM;
    let when = |there: bool, rows: u16| if there { rows } else { 0 };
    let rest = area.height.saturating_sub(4 + rows(&figures));
    let charts = when(area.height >= CHARTS_FROM, (rest * 2 / 5).clamp(CHART.0, CHART.1));
    let ranks = when(tables, rank_table::height(run).min((rest - charts.min(rest)) / 2 + 1));
    let rows = [
        Constraint::Length(1),
        Constraint::Length(1),
        Constraint::Length(rows(&figures)),
        Constraint::Length(charts),
        Constraint::Length(ranks),
        Constraint::Length(when(tables, rows(&panels))),
        Constraint::Fill(1),
        Constraint::Length(1),
    ];
    let [head, bar, below, charted, ranked, panelled, logged, foot] = Layout::vertical(rows).areas(area);
    frame.render_widget(headline(app, head.width, theme), head);
    frame.render_widget(progress(run, bar.width, theme), bar);
    frame.render_widget(lines(&figures, below.width), below);
    if charts > 0 {
        charts::draw(frame, charted, run, theme);
    }
    rank_table::draw(frame, ranked, app, theme);
    frame.render_widget(lines(&panels, panelled.width), panelled);
    log(frame, logged, run, theme);
    frame.render_widget(footer(app, foot.width, theme), foot);
}

fn rows(texts: &[StyledLine]) -> u16 {
    u16::try_from(texts.len()).unwrap_or(u16::MAX)
}

/// A line of figures, and whether something in it is wrong.
struct StyledLine {
    text: String,
    style: Style,
}

impl StyledLine {
    fn plain(text: String) -> Self {
        Self { text, style: Style::new() }
    }
}

fn lines(texts: &[StyledLine], width: u16) -> Text<'static> {
    texts.iter().map(|told| Line::styled(cut(&told.text, width.into()), told.style)).collect()
}

/// A text in at most so many rows, between words; the rest is left in the last one, which is cut.
fn folded(text: &str, width: usize, most: usize) -> Vec<String> {
    let mut rows = vec![String::new()];
    for word in text.split_inclusive(' ') {
        let last = rows.len();
        let row = &mut rows[last - 1];
        let is_full = row.chars().count() + word.trim_end().chars().count() > width;
        if is_full && last < most && !row.trim().is_empty() {
            rows.push(format!("{}{word}", " ".repeat(INDENT)));
        } else {
            row.push_str(word);
        }
    }
    rows.iter().map(|row| row.trim_end().to_owned()).collect()
}

/// `1 runs/a  2 runs/b`, or the one that is shown where there is no room for all; phase and why.
fn headline(app: &App, width: u16, theme: Theme) -> Line<'static> {
    let run = app.run();
    let mut spans = Vec::new();
    let labels = app.runs.iter().map(|run| run.label.chars().count() + 4).sum::<usize>();
    if app.runs.len() > 1 && 3 * labels > 2 * usize::from(width) {
        let place = format!("{} of {}  ", app.shown + 1, app.runs.len());
        spans.extend([Span::styled(place, theme.faint()), Span::styled(run.label.clone(), theme.title())]);
        spans.push(Span::raw("  "));
    } else if app.runs.len() > 1 {
        for (at, other) in app.runs.iter().enumerate().filter(|(at, _)| *at != app.shown) {
            spans.push(Span::styled(format!("{} {}  ", at + 1, other.label), theme.faint()));
        }
        let marked = Span::styled(format!("{} {}", app.shown + 1, run.label), theme.title());
        spans.insert(app.shown, Span::raw("  "));
        spans.insert(app.shown, marked);
    } else {
        spans.push(Span::styled(format!("{}  ", run.name()), theme.title()));
    }
    let failed = run.status.first_failure.as_ref().is_some_and(|failure| failure.fatal);
    let style = if failed { theme.warning() } else { theme.loss() };
    spans.push(Span::styled(run.phase(), style));
    let why = match &run.source {
        Source::Files(why) | Source::Nothing(why) => why,
        _ => &run.status.reason,
    };
    let room = usize::from(width).saturating_sub(spans.iter().map(Span::width).sum());
    if room > 4 && !why.is_empty() {
        spans.push(Span::styled(cut(&format!("  {why}"), room), theme.faint()));
    }
    Line::from(spans)
}

fn progress(run: &RunView, width: u16, theme: Theme) -> Line<'static> {
    let status = &run.status;
    if status.total_steps == 0 {
        return Line::styled(format!("step {}", status.committed_steps), theme.faint());
    }
    let share = status.committed_steps.min(status.total_steps) as f64 / status.total_steps as f64;
    let mut text = format!("  {}/{}  {:.0} %", status.committed_steps, status.total_steps, 100.0 * share);
    let left = run.step.as_ref().and_then(events::time_left).filter(|_| !run.is_over());
    let left = if status.eta_s > 0.0 { Some(human::seconds(status.eta_s)) } else { left };
    if let Some(left) = left.filter(|_| !run.is_over()) {
        text += &format!("  {left} left");
    }
    let columns = usize::from(width).saturating_sub(text.chars().count());
    let full = (share * columns as f64) as usize;
    let bar = format!("{}{}", "█".repeat(full), "░".repeat(columns - full));
    Line::from(vec![Span::styled(bar, theme.loss()), Span::raw(cut(&text, width.into()))])
}

/// Loss, gradient, rate; where the time of a step goes.
fn figures(run: &RunView) -> Vec<StyledLine> {
    let Some(step) = &run.step else { return Vec::new() };
    let mut first = format!(
        "loss {:.4}  grad {:.3}  lr {:.2e}  epoch {}",
        step.loss, step.grad_norm, step.learning_rate, run.status.epoch
    );
    if let Some(held_out) = status::held_out(&run.status.held_out) {
        first += &format!("  {held_out}");
    }
    let split = events::split(step).map(|split| format!("step {split}"));
    std::iter::once(first).chain(split).map(StyledLine::plain).collect()
}

/// Membership and faults, checkpoints, kept features: a line each, where there is something to say.
fn panels(run: &RunView, area: Rect, theme: Theme) -> Vec<StyledLine> {
    let now = &run.status;
    let mut told = Vec::new();
    if now.restarts > 0 || now.first_failure.is_some() {
        let cause = now.first_failure.as_ref().map_or_else(String::new, status::failure);
        let what = if now.first_failure.as_ref().is_some_and(|of| of.fatal) { "failed" } else { "survived" };
        let count = match now.max_restarts {
            0 => now.restarts.to_string(),
            most => format!("{} of {most}", now.restarts),
        };
        let text = format!("faults      {count}, {what}: {cause}");
        // What it was stands at its end.
        let most = if area.height >= CHARTS_FROM { FAULT_ROWS } else { 1 };
        let rows = folded(&text, area.width.into(), most).into_iter();
        told.extend(rows.map(|text| StyledLine { text, style: theme.warning() }));
    }
    for of in &now.hardware {
        told.push(StyledLine {
            text: format!("hardware    {}", status::hardware(of)),
            style: theme.warning(),
        });
    }
    if now.generation > 0 {
        let alive = now.ranks.iter().filter(|rank| !rank.gone).count();
        let of = if now.ranks.is_empty() { String::new() } else { format!("{alive} of ") };
        let text = format!("membership  generation {}, {of}{} workers", now.generation, now.world_size);
        told.push(StyledLine::plain(text));
    }
    let complete = |state: i32| state == i32::from(CheckpointState::Complete);
    let steps: Vec<_> =
        now.checkpoints.iter().filter(|of| complete(of.state)).map(|of| of.step.to_string()).collect();
    if !steps.is_empty() {
        told.push(StyledLine::plain(format!("checkpoints after step {}", steps.join(", "))));
    }
    if let Some(kept) = &now.cache {
        told.extend(cache::brief(kept).into_iter().map(StyledLine::plain));
    }
    told
}

fn log(frame: &mut Frame, area: Rect, run: &RunView, theme: Theme) {
    let first = run.log.len().saturating_sub(area.height.into());
    let shown = run.log.range(first..).map(|entry| {
        let style = if entry.warns { theme.warning() } else { theme.faint() };
        Line::styled(cut(&format!("{}  {}", entry.time, entry.text), area.width.into()), style)
    });
    frame.render_widget(shown.collect::<Text>(), area);
}

fn footer(app: &App, width: u16, theme: Theme) -> Line<'static> {
    let (text, style) = match app.asked() {
        Some(asked) => (format!("{asked}  y yes, any other key no"), theme.marked()),
        None if !app.run().message.is_empty() => (app.run().message.clone(), theme.title()),
        None => {
            let runs = if app.runs.len() > 1 { "  tab next run" } else { "" };
            let steers = match app.run().takes_orders() {
                true => "  p pause  r resume  c checkpoint  s stop  d drain",
                false => "",
            };
            (format!("q quit{runs}{steers}  ↑↓ rank"), theme.faint())
        }
    };
    Line::styled(cut(&text, width.into()), style)
}

#[cfg(test)]
mod tests {
    use coxswain_proto::v1::{
        CheckpointRecord, Failure, FailureKind, GetMemoryResponse, GetStatusResponse, MemoryComparison,
        RankMemory, RankStatus, RunPhase, StepTimes, WorkerPhase,
    };
    use ratatui_core::{backend::TestBackend, style::Color, terminal::Terminal};
    use ratatui_termion::termion::event::Key;

    use super::*;
    use crate::view::Update;

    fn rank(rank: u32, gone: bool) -> RankStatus {
        RankStatus {
            rank,
            host: "node-a".into(),
            phase: WorkerPhase::Backward.into(),
            times: Some(StepTimes {
                total_ms: 115.0,
                data_ms: 2.0,
                optimizer_ms: 5.0,
                communication_ms: 1.0,
            }),
            memory_peak: 36 << 20,
            gone,
            ..RankStatus::default()
        }
    }

    fn app() -> App {
        let mut app = App::new(["runs/a".to_owned(), "runs/b".to_owned()]);
        app.apply(0, Update::Source(Source::Coordinator));
        let step = |at: usize| {
            format!(
                "17:15:17  step    {at:>4}/400  epoch 0  loss {:.4}    grad 4.5836    lr 1.00e-4   16.7 samples/s   4267 tokens/s",
                2.0 / at as f64
            )
        };
        let mut lines: Vec<_> = (1..=100).map(step).collect();
        lines.push("17:15:20  fail    warning: lost: rank 1 on node-a".into());
        lines.push("17:15:21  save    checkpoint at step 80: checkpoints/step-00000080, 13.0 MiB".into());
        app.apply(0, Update::Logged(lines));
        let complete = CheckpointState::Complete.into();
        app.apply(
            0,
            Update::Status(Box::new(GetStatusResponse {
                run_name: "pick".into(),
                phase: RunPhase::Training.into(),
                generation: 2,
                world_size: 2,
                committed_steps: 100,
                total_steps: 400,
                loss: 0.02,
                samples_per_second: 16.7,
                eta_s: 36.0,
                restarts: 1,
                max_restarts: 3,
                ranks: vec![rank(0, false), rank(1, true)],
                checkpoints: vec![CheckpointRecord { step: 80, state: complete, ..Default::default() }],
                first_failure: Some(Failure {
                    rank: Some(1),
                    host: "node-a".into(),
                    kind: FailureKind::WorkerLost.into(),
                    phase: WorkerPhase::Forward.into(),
                    step: 9,
                    message: "its process was killed by signal 9".into(),
                    ..Failure::default()
                }),
                ..GetStatusResponse::default()
            })),
        );
        let comparison =
            Some(MemoryComparison { measured: 36 << 20, predicted: 40 << 20, ..Default::default() });
        let ranks = vec![RankMemory { rank: 0, comparison, ..RankMemory::default() }];
        app.apply(0, Update::Memory(Box::new(GetMemoryResponse { ranks })));
        app
    }

    fn screen(app: &App, width: u16, height: u16, colours: bool) -> (Vec<String>, Vec<Color>) {
        let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
        terminal.draw(|frame| draw(frame, app, Theme::new(colours))).unwrap();
        let cells = terminal.backend().buffer().content();
        let lines = cells.chunks(width.into()).map(|row| row.iter().map(|cell| cell.symbol()).collect());
        (lines.collect(), cells.iter().map(|cell| cell.fg).collect())
    }

    #[test]
    fn a_usual_terminal_shows_all_of_a_run() {
        let (lines, _) = screen(&app(), 80, 24, true);
        let text = lines.join("\n");
        for told in [
            "1 runs/a  2 runs/b  training",
            "100/400  25 %  36.0 s left",
            "loss 0.0200  grad 4.584  lr 1.00e-4  epoch 0",
            " loss 0.020 ",
            " 16.7 samples/s, ",
            "rank  phase      ms  data  model  opt  comm    memory  plan  copy  health",
            "   0  backward  115     2      0    5     1  36.0 MiB  90 %  lost  ok",
            "faults      1 of 3, survived: rank 1 on node-a, worker lost, last heard of",
            "membership  generation 2, 1 of 2 workers",
            "checkpoints after step 80",
            "17:15:21  checkpoint at step 80: checkpoints/step-00000080, 13.0 MiB",
            "q quit  tab next run  p pause  r resume  c checkpoint  s stop  d drain  ↑↓ rank",
        ] {
            assert!(text.contains(told), "{told:?} is missing:\n{text}");
        }
        assert!(
            text.chars().filter(|letter| ('\u{2801}'..='\u{28ff}').contains(letter)).count() > 30,
            "{text}"
        );
    }

    #[test]
    fn every_size_has_a_screen_and_a_small_one_the_state() {
        let mut app = app();
        for (width, height) in (1..120).flat_map(|width| [(width, 1), (width, 5), (width, 24), (width, 60)]) {
            screen(&app, width, height, true);
        }
        let (lines, _) = screen(&app, 20, 5, true);
        assert!(lines[0].starts_with("1 of 2  runs/a") && lines[1].contains("100/400  25 %"), "{lines:?}");
        assert!(lines[2].starts_with("loss 0.0200"), "{lines:?}");
        app.key(Key::Char('s'));
        let (lines, _) = screen(&app, 80, 5, true);
        assert!(lines[4].starts_with("stop pick?") && lines[4].contains("y yes"), "{lines:?}");
    }

    #[test]
    fn keys_that_would_do_nothing_are_not_offered_and_many_runs_leave_room_for_the_state() {
        let mut app = App::new((0..9).map(|number| format!("runs/a-longer-name-{number}")));
        app.apply(0, Update::Source(Source::Files("interrupted".into())));
        let (lines, _) = screen(&app, 80, 24, true);
        assert_eq!(lines[23].trim_end(), "q quit  tab next run  ↑↓ rank");
        assert!(lines[0].starts_with("1 of 9  runs/a-longer-name-0  not running"), "{}", lines[0]);
    }

    #[test]
    fn what_a_fault_was_is_not_cut_off() {
        let text = screen(&app(), 80, 24, true).0.join("\n");
        assert!(text.contains("its process was killed by"), "{text}");
        let rows = folded("faults      1: a word and many more words of a cause", 20, 3);
        assert_eq!(rows.len(), 3, "{rows:?}");
        assert!(rows[0].len() <= 21 && rows[2].contains("a cause"), "{rows:?}");
        assert_eq!(folded(&"x".repeat(50), 20, 3).len(), 1);
    }

    #[test]
    fn without_colours_there_are_none() {
        let (_, colours) = screen(&app(), 80, 24, false);
        assert!(colours.iter().all(|colour| *colour == Color::Reset));
        assert!(screen(&app(), 80, 24, true).1.contains(&Color::Cyan));
    }

    #[test]
    fn a_run_of_which_nothing_is_known_says_so() {
        let mut app = App::new(["runs/a".to_owned()]);
        assert!(screen(&app, 80, 24, true).0[0].starts_with("runs/a  looking for it"));
        app.apply(0, Update::Source(Source::Files("no launcher is running this run".into())));
        assert!(screen(&app, 80, 24, true).0[0].contains("not running  no launcher is running this run"));
    }
}
