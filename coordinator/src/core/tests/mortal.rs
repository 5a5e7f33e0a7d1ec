//! A run whose records are kept, so that its coordinator can be killed and another one goes on from them.

use super::*;

/// The run, and what a restarted coordinator would find.
pub(super) struct Mortal {
    pub run: Run,
    pub past: Past,
}

impl Mortal {
    pub fn new(config: Config) -> Self {
        Self { run: Run::new(config), past: Past::default() }
    }

    /// Does something, and keeps what is recorded.
    pub fn keep(&mut self, act: impl FnOnce(&mut Run) -> Vec<Action>) -> Vec<Action> {
        let actions = act(&mut self.run);
        for action in &actions {
            if let Action::Record(record) = action {
                self.past.take(record);
            }
        }
        actions
    }

    /// A worker opens its line again.
    pub fn reopen(&mut self, rank: u32) -> Vec<Action> {
        self.keep(|run| {
            run.ticket += 1;
            let stream = u64::from(rank) + 10 * run.ticket;
            let (reply, actions) = run.follow(rank, stream);
            assert_eq!(reply, Ok(Reply::Done));
            actions
        })
    }

    pub fn kill_coordinator(&mut self) {
        self.begin_life(true);
    }

    /// The coordinator that comes next: started again by its launcher, or with a launch of its own.
    pub fn begin_life(&mut self, restarted: bool) {
        let mut config = self.run.machine.config.clone();
        (config.life, config.restarted, config.past) = (config.life + 1, restarted, self.past.clone());
        self.run.machine = Machine::new(self.run.at(), config);
    }
}
