//! A new launch in the place of an earlier one, whose coordinator died with its launcher.
//!
//! A coordinator that no launcher has started *again* is part of a new launch. Of the launch before nobody may be left, or the launchers of
//! other machines, which look for their coordinator for a while, with their workers. So nobody of it is given up before the reunion is over,
//! but who is replaced is forgotten: neither waited for nor counted as lost. What the run had used of its budgets, and what was asked of
//! it, ends with the last one of the launch that used and heard it.
//!
//! ```text
//! the place of a launcher that was not heard of is claimed   its workers are forgotten; the others, if there are any, go on with it
//! nobody was heard of when the reunion is over               all are forgotten
//! ```

use coxswain_proto::ids::Seat;

use super::{Machine, Timestamp};
use crate::core::{
    action::{Action, Record},
    phase::{Gathering, Phase},
    roster::{Gone, Worker},
};

impl Machine {
    /// Forgets the workers of an earlier launch at `places`, which are another launcher's now.
    pub(super) fn replace_launch(&mut self, now: Timestamp, places: &[u32], out: &mut Vec<Action>) {
        if self.config.restarted || matches!(self.phase, Phase::Over(_)) {
            return;
        }
        let theirs = places.iter().flat_map(|place| self.config.world.seats_of(*place));
        let left_behind: Vec<Seat> = theirs.filter(|seat| self.is_left_behind(*seat)).collect();
        if left_behind.is_empty() {
            return;
        }
        let was_member = left_behind.iter().any(|seat| self.is_member(*seat));
        for seat in left_behind {
            self.roster.clear(seat);
            out.push(Action::Record(Record::Lost { seat, respawn: None }));
        }
        if !self.reunited && self.roster.living().all(|worker| !self.roster.is_recalled(worker.id)) {
            self.begin_again(now, out);
        } else if was_member {
            self.break_up(now, "a launcher was launched again", true, out);
        }
    }

    /// When nobody of an earlier launch has come by the end of the reunion, all of it is over.
    pub(super) fn look_for_an_earlier_launch(&mut self, now: Timestamp, out: &mut Vec<Action>) {
        let missed = |worker: &Worker| self.roster.is_recalled(worker.id);
        if !self.reunited && self.roster.lost(now, &self.config.patience).is_some_and(missed) {
            let places: Vec<_> = (0..self.config.world.max_nodes).collect();
            self.replace_launch(now, &places, out);
        }
    }

    /// A worker of an earlier launch has the seat, and has not been heard of. It is taken to have had one line then.
    fn is_left_behind(&self, seat: Seat) -> bool {
        let silent = |worker: &&Worker| worker.line.is_none() && worker.lines <= 1;
        let worker = self.roster.at(seat).filter(silent);
        worker.is_some_and(|worker| self.roster.is_recalled(worker.id) && worker.gone != Some(Gone::Lost))
    }

    /// Nobody of the earlier launch is left: the run goes on with another.
    fn begin_again(&mut self, now: Timestamp, out: &mut Vec<Action>) {
        self.gather(Gathering::new(now.after(self.config.patience.rendezvous)), out);
        self.incident = None;
        self.spend(|spent| *spent = Default::default(), out);
        self.order(|orders| *orders = Default::default(), out);
        self.say(self.incomplete(), out);
    }
}
