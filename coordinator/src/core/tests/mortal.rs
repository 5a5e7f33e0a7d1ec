//! A run whose records are kept, so that its coordinator can be killed and another one goes on from them.

use super::*;

/// A launcher that asks for a place.
pub(super) fn wants(node_id: &str, host: &str, node_rank: Option<u32>, local_world: u32) -> Ask {
    let (node_id, host) = (node_id.into(), host.into());
    Ask::JoinNode(NodeClaim { origin: origin(), node_id, host, local_world, node_rank, returns: false })
}

/// The run, and what a restarted coordinator would find.
pub(super) struct Mortal {
    pub run: Run,
    pub past: Past,
}

impl Mortal {
    pub fn new(config: Config) -> Self {
        Self { run: Run::new(config), past: Past::default() }
    }

    /// Two workers of one node that have committed steps 0..10.
    pub fn at_step_ten() -> Self {
        let mut mortal = Self::new(config(2));
        mortal.ask(wants(NODE, "node-a", None, 2));
        mortal.ask(Ask::FollowNode { node_id: NODE.into(), stream: NODE_LINE });
        mortal.train_to_ten();
        mortal
    }

    /// Two workers come, and commit steps 0..10.
    pub fn train_to_ten(&mut self) {
        for rank in 0..2 {
            self.ask(Ask::Register(claim(rank)));
            self.reopen(rank);
            self.keep(|run| run.get_ready(rank, 0, ""));
        }
        self.keep(|run| run.start_all(2, 0, StateSource::Fresh));
        self.keep(|run| run.steps(0, 0..10));
        self.keep(|run| run.steps(1, 0..10));
    }

    pub fn ask(&mut self, ask: Ask) -> Vec<Action> {
        self.keep(|run| run.tell(ask))
    }

    /// Does something, and keeps what is recorded.
    pub fn keep(&mut self, act: impl FnOnce(&mut Run) -> Vec<Action>) -> Vec<Action> {
        let actions = act(&mut self.run);
        for action in &actions {
            if let Action::Record(record) = action {
                self.past.add_record(record);
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
        let mut config = self.run.machine.run.config.clone();
        (config.life, config.restarted, config.past) = (config.life + 1, restarted, self.past.clone());
        self.run.machine = Machine::new(self.run.at(), config);
    }
}
