//! The living block of `cox run`: where a run is, on a few lines that stay below all others.
//!
//! ```text
//! ███████████░░░░░░░░░░░░░░░░░  57/150  38 %  1 m 10 s, 12 s left
//!   loss 0.4041  ▇▆▅▄▃▂▂▁  grad 1.25  lr 9.09e-5  epoch 0
//!   53.2 samples/s  512 tokens/s  115 ms: language 45% head 30% vision 20%
//!   36.4 MiB on rank 0  checkpoint 40
//!   17:15:20  checkpoint at step 40: checkpoints/step-00000040, 13.0 MiB
//! ```

use std::{collections::VecDeque, time::Duration};

use coxswain_proto::{
    human,
    report::Skip,
    v1::{CheckpointState, GetStatusResponse, StepCommitted, WatchEvent},
};

use super::{events, names};
use crate::view::{RunView, Series};

/// Columns of the curve.
const CURVE: usize = 24;
/// Columns of the bar, at most.
const BAR: usize = 28;
/// Lines of the log below the figures, at most.
const EVENTS: usize = 3;

/// A run, and the lines of its log that are not to stay on the screen.
#[derive(Debug, Default)]
pub struct LiveRun {
    run: RunView,
    events: VecDeque<String>,
}

/// How a line of the block is drawn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tone {
    /// How far the run is.
    Bar,
    /// A figure.
    Figure,
    /// A line of the log.
    Event,
}

/// One line of the block.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BlockLine {
    /// How it is drawn.
    pub tone: Tone,
    /// What it says.
    pub text: String,
}

impl LiveRun {
    /// Takes in an event.
    pub fn hear(&mut self, event: &WatchEvent) {
        self.run.hear(event);
    }

    /// Takes in a line of the log that is not to stay on the screen.
    pub fn note(&mut self, line: String) {
        self.events.push_back(line);
        if self.events.len() > EVENTS {
            self.events.pop_front();
        }
    }

    /// The block for a terminal of `width` columns with room for `height` lines, after so long.
    pub fn lines(&self, width: usize, height: usize, elapsed: Duration) -> Vec<BlockLine> {
        let line = |tone, text: &str| BlockLine { tone, text: cut(text, width) };
        let mut lines = vec![line(Tone::Bar, &self.bar(width, elapsed))];
        if let Some(step) = &self.run.step {
            lines.extend(self.figures(step).map(|text| line(Tone::Figure, &format!("  {text}"))));
        }
        // The newest ones, as far as there is room.
        let room = height.saturating_sub(lines.len()).min(self.events.len());
        let events = self.events.range(self.events.len() - room..);
        lines.extend(events.map(|text| line(Tone::Event, &format!("  {text}"))));
        lines.truncate(height);
        lines
    }

    fn bar(&self, width: usize, elapsed: Duration) -> String {
        let elapsed = human::time(Duration::from_secs(elapsed.as_secs()));
        let GetStatusResponse { committed_steps: done, total_steps: total, phase, .. } = self.run.status;
        let phase = names::plain(&names::run_phase(phase));
        if total == 0 {
            let phase = if phase == "unknown" { "starting" } else { &phase };
            return format!("{phase}  {elapsed}");
        }
        let share = done.min(total) as f64 / total as f64;
        let left = self.run.step.as_ref().and_then(events::time_left).filter(|_| done < total);
        let left = left.map_or_else(String::new, |left| format!(", {left} left"));
        let phase = match phase.as_str() {
            "training" | "unknown" => String::new(),
            other => format!("{other}  "),
        };
        let text = format!("{phase}{done}/{total}  {:.0} %  {elapsed}{left}", 100.0 * share);
        let columns = width.saturating_sub(text.chars().count() + 2).min(BAR);
        if columns < BAR / 4 {
            return text;
        }
        let full = (share * columns as f64) as usize;
        format!("{}{}  {text}", "█".repeat(full), "░".repeat(columns - full))
    }

    fn figures(&self, step: &StepCommitted) -> impl Iterator<Item = String> {
        let loss = match step.skipped.clone().map(Skip::try_from) {
            Some(Ok(skipped)) => format!("left out: {skipped}"),
            _ => format!(
                "loss {:.4}  {}  grad {:.3}  lr {:.2e}  epoch {}",
                step.loss,
                curve(&self.run.loss),
                step.grad_norm,
                step.learning_rate,
                step.epoch
            ),
        };
        let speed = format!(
            "{} samples/s  {} tokens/s  {}",
            human::count(step.samples_per_second),
            human::count(step.tokens_per_second),
            events::split(step).unwrap_or_default()
        );
        let mut memory = Vec::new();
        if step.memory_peak > 0 {
            memory.push(format!("{} on rank {}", human::bytes(step.memory_peak), step.memory_peak_rank));
        }
        memory.extend(events::cache_use(step));
        let GetStatusResponse { checkpoints, restarts, max_restarts, .. } = &self.run.status;
        let mut complete = checkpoints.iter().filter(|record| record.state() == CheckpointState::Complete);
        memory.extend(complete.next_back().map(|newest| format!("checkpoint {}", newest.step)));
        if *restarts > 0 {
            memory.push(format!("restarts {restarts} of {max_restarts}"));
        }
        [loss, speed, memory.join("  ")].into_iter().filter(|line| !line.is_empty())
    }
}

/// Values as a row of blocks, the largest full: `▇▅▃▁`.
fn curve(values: &Series) -> String {
    const LEVELS: [char; 8] = ['▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];
    let means: Vec<_> = values.drawn(CURVE).into_iter().map(|(_, mean)| mean).collect();
    let (least, most) =
        means.iter().fold((f64::MAX, f64::MIN), |(least, most), mean| (least.min(*mean), most.max(*mean)));
    let level = |mean: &f64| match most > least {
        true => ((mean - least) / (most - least) * (LEVELS.len() - 1) as f64).round() as usize,
        false => 0,
    };
    means.iter().map(|mean| LEVELS[level(mean)]).collect()
}

/// `text` in `width` columns; what is cut off is a mark.
pub fn cut(text: &str, width: usize) -> String {
    if text.chars().count() <= width {
        return text.to_owned();
    }
    text.chars().take(width.saturating_sub(1)).chain((width > 0).then_some('…')).collect()
}

#[cfg(test)]
mod tests {
    use coxswain_proto::v1::{CheckpointRecord, PhaseChanged, RunPhase, StepTimes, watch_event::Kind};

    use super::*;

    fn event(kind: Kind) -> WatchEvent {
        WatchEvent { unix_ms: 0, kind: Some(kind) }
    }

    fn step(number: u64) -> WatchEvent {
        event(Kind::Step(StepCommitted {
            step: number,
            total_steps: 150,
            loss: 2.0 - number as f64 / 100.0,
            grad_norm: 1.25,
            learning_rate: 9.09e-5,
            samples_per_second: 53.2,
            tokens_per_second: 512.0,
            times: Some(StepTimes { total_ms: 115.0, optimizer_ms: 46.0, ..StepTimes::default() }),
            memory_peak: 36 << 20,
            ..StepCommitted::default()
        }))
    }

    fn trained() -> LiveRun {
        let mut living = LiveRun::default();
        living.hear(&event(Kind::Status(GetStatusResponse { total_steps: 150, ..Default::default() })));
        (0..57).for_each(|number| living.hear(&step(number)));
        let record =
            CheckpointRecord { step: 40, state: CheckpointState::Complete.into(), ..Default::default() };
        living.hear(&event(Kind::Checkpoint(record)));
        (0..5).for_each(|number| living.note(format!("17:15:2{number}  checkpoint at step {number}0")));
        living
    }

    #[test]
    fn five_seconds_of_looking_tell_how_the_run_stands() {
        let shown: Vec<_> =
            trained().lines(80, 20, Duration::from_secs(70)).into_iter().map(|line| line.text).collect();
        assert_eq!(
            shown,
            [
                "██████████░░░░░░░░░░░░░░░░░░  57/150  38 %  1m 10s, 10.7 s left",
                "  loss 1.4400  ██▇▇▇▇▆▆▆▅▅▅▄▄▄▃▃▃▃▂▂▂▁▁  grad 1.250  lr 9.09e-5  epoch 0",
                "  53.2 samples/s  512 tokens/s  115 ms: optimizer 40%",
                "  36.0 MiB on rank 0  checkpoint 40",
                "  17:15:22  checkpoint at step 20",
                "  17:15:23  checkpoint at step 30",
                "  17:15:24  checkpoint at step 40",
            ]
        );
    }

    #[test]
    fn no_line_is_wider_than_the_terminal_and_no_block_higher() {
        let living = trained();
        for width in 1..120 {
            for height in 1..10 {
                let lines = living.lines(width, height, Duration::from_secs(7));
                assert!(lines.len() <= height && !lines.is_empty());
                assert!(lines.iter().all(|line| line.text.chars().count() <= width), "{width}: {lines:?}");
            }
        }
        let shown = living.lines(20, 1, Duration::from_secs(7));
        assert_eq!(shown, [BlockLine { tone: Tone::Bar, text: "57/150  38 %  7.0 s…".into() }]);
    }

    #[test]
    fn before_the_first_step_there_is_a_phase_and_a_clock() {
        let mut living = LiveRun::default();
        assert_eq!(living.lines(80, 9, Duration::from_secs(2))[0].text, "starting  2.0 s");
        let phase = RunPhase::WaitingForWorkers.into();
        living.hear(&event(Kind::Phase(PhaseChanged { phase, ..PhaseChanged::default() })));
        assert_eq!(living.lines(80, 9, Duration::ZERO)[0].text, "waiting for workers  0 ms");
    }
}
