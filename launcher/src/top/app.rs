//! What the user looks at and asks for: keys become orders, each after a question.

use ratatui_termion::termion::event::Key;

use crate::view::{RunView, Update};

/// Something a run is told to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ControlRequest {
    /// Stop at the next step boundary.
    Pause,
    /// Go on.
    Resume,
    /// Write a checkpoint.
    Checkpoint,
    /// Let a node go.
    Drain(u32),
    /// Checkpoint, export, end.
    Stop,
}

/// What a key asks of the program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Intent {
    /// To end; runs go on.
    Quit,
    /// To give a run an order.
    Give(usize, ControlRequest),
}

/// Everything on the screen.
#[derive(Debug)]
pub struct App {
    /// At least one.
    pub runs: Vec<RunView>,
    /// The one that is shown.
    pub shown: usize,
    /// Which of its ranks is marked.
    pub rank: usize,
    /// What waits for a yes.
    pub question: Option<ControlRequest>,
}

impl App {
    /// Runs by the names that the user gave them.
    pub fn new(labels: impl IntoIterator<Item = String>) -> Self {
        Self { runs: labels.into_iter().map(RunView::new).collect(), shown: 0, rank: 0, question: None }
    }

    /// The run that is shown.
    pub fn run(&self) -> &RunView {
        &self.runs[self.shown]
    }

    /// Takes in what was learned of a run.
    pub fn apply(&mut self, run: usize, update: Update) {
        if let Some(run) = self.runs.get_mut(run) {
            run.apply(update);
        }
        self.rank = self.rank.min(self.run().status.ranks.len().saturating_sub(1));
    }

    /// Answers a key.
    pub fn key(&mut self, key: Key) -> Option<Intent> {
        if let Some(order) = self.question.take() {
            return matches!(key, Key::Char('y' | 'Y')).then_some(Intent::Give(self.shown, order));
        }
        self.runs[self.shown].message.clear();
        match key {
            Key::Char('q') | Key::Esc | Key::Ctrl('c') => return Some(Intent::Quit),
            Key::Char('\t') | Key::Right => self.show((self.shown + 1) % self.runs.len()),
            Key::BackTab | Key::Left => self.show((self.shown + self.runs.len() - 1) % self.runs.len()),
            Key::Char(digit @ '1'..='9') => self.show(digit as usize - '1' as usize),
            Key::Up => self.rank = self.rank.saturating_sub(1),
            Key::Down if self.rank + 1 < self.run().status.ranks.len() => self.rank += 1,
            Key::Char('p') => self.ask(ControlRequest::Pause),
            Key::Char('r') => self.ask(ControlRequest::Resume),
            Key::Char('c') => self.ask(ControlRequest::Checkpoint),
            Key::Char('s') => self.ask(ControlRequest::Stop),
            Key::Char('d') => {
                if let Some(rank) = self.run().status.ranks.get(self.rank) {
                    self.ask(ControlRequest::Drain(rank.node_rank));
                }
            }
            _ => {}
        }
        None
    }

    fn show(&mut self, run: usize) {
        if run < self.runs.len() {
            (self.shown, self.rank) = (run, 0);
        }
    }

    fn ask(&mut self, order: ControlRequest) {
        let run = &mut self.runs[self.shown];
        match run.takes_orders() {
            true => self.question = Some(order),
            false => run.message = "this run has no coordinator to accept commands".to_owned(),
        }
    }

    /// The question that is on the screen.
    pub fn asked(&self) -> Option<String> {
        let name = self.run().name();
        Some(match self.question? {
            ControlRequest::Pause => format!("pause {name} at the next step boundary?"),
            ControlRequest::Resume => format!("resume {name}?"),
            ControlRequest::Checkpoint => format!("write a checkpoint of {name}?"),
            ControlRequest::Drain(node) => {
                format!("remove node {node} from {name}? the others keep training")
            }
            ControlRequest::Stop => format!("stop {name}? it writes a checkpoint and its results first"),
        })
    }
}

#[cfg(test)]
mod tests {
    use coxswain_proto::v1::{GetStatusResponse, RankStatus, RunPhase};

    use super::*;
    use crate::view::Source;

    fn app() -> App {
        let mut app = App::new(["a".to_owned(), "b".to_owned()]);
        app.apply(0, Update::Source(Source::Coordinator));
        let ranks = [0, 0, 1].map(|node_rank| RankStatus { node_rank, ..RankStatus::default() }).to_vec();
        let phase = RunPhase::Training.into();
        app.apply(0, Update::Status(Box::new(GetStatusResponse { ranks, phase, ..Default::default() })));
        app
    }

    #[test]
    fn an_order_needs_a_yes_and_anything_else_is_a_no() {
        let mut app = app();
        for (key, order) in [
            ('p', ControlRequest::Pause),
            ('r', ControlRequest::Resume),
            ('c', ControlRequest::Checkpoint),
            ('s', ControlRequest::Stop),
        ] {
            assert_eq!(app.key(Key::Char(key)), None);
            assert!(app.asked().is_some_and(|asked| asked.contains('a') && asked.contains('?')));
            assert_eq!(app.key(Key::Char('y')), Some(Intent::Give(0, order)));
            assert_eq!((app.key(Key::Char(key)), app.key(Key::Char('q'))), (None, None));
            assert_eq!(app.asked(), None, "a q was a no, and no more than that");
        }
        assert_eq!(app.key(Key::Char('q')), Some(Intent::Quit));
    }

    #[test]
    fn the_node_of_the_marked_rank_is_drained() {
        let mut app = app();
        for _ in 0..5 {
            app.key(Key::Down);
        }
        app.key(Key::Char('d'));
        assert_eq!(app.key(Key::Char('y')), Some(Intent::Give(0, ControlRequest::Drain(1))));
        app.apply(0, Update::Status(Box::default()));
        assert_eq!(app.rank, 0, "the marked rank is gone");
    }

    #[test]
    fn a_run_without_a_coordinator_is_told_nothing() {
        let mut app = app();
        app.key(Key::Char('\t'));
        assert_eq!((app.shown, app.key(Key::Char('s'))), (1, None));
        assert_eq!((app.asked(), app.run().message.is_empty()), (None, false));
        app.key(Key::Char('1'));
        app.key(Key::Char('9'));
        assert_eq!(app.shown, 0);
    }
}
