//! Who is gone, with a good-bye or without one, who counts as lost, and when to look for that next.

use coxswain_proto::ids::Slot;

use super::{
    action::{Action, Record},
    fleet::Fleet,
    roster::{Exit, Worker},
    time::Timestamp,
};

impl Fleet {
    /// A worker says good-bye.
    pub fn leave(&mut self, slot: Slot, exit_code: i32, out: &mut Vec<Action>) {
        let Some(closed) = self.roster.at_mut(slot).map(|mut worker| worker.go(Exit::Left(exit_code))) else {
            return;
        };
        out.extend(closed.map(Action::Close));
        out.push(Action::Record(Record::Left { slot, exit_code }));
        self.watch_for_its_node(slot);
    }

    /// A worker is gone without a good-bye.
    pub fn lose(&mut self, slot: Slot, out: &mut Vec<Action>) {
        let Some(closed) = self.roster.at_mut(slot).map(|mut worker| worker.go(Exit::Lost)) else {
            return;
        };
        out.extend(closed.map(Action::Close));
        out.push(Action::Record(Record::Lost { slot, respawn: None }));
        self.watch_for_its_node(slot);
    }

    /// Workers that have been missed for too long.
    pub fn lost(&self, now: Timestamp) -> Vec<Slot> {
        self.roster.lost(now, &self.patience)
    }

    /// Whether the worker at a slot has been.
    pub fn is_lost(&self, now: Timestamp, slot: Slot) -> bool {
        self.roster.living_at(slot).is_some_and(|worker| worker.lost_at(&self.patience) <= now)
    }

    /// Launchers that have been missed for too long and have no living worker: another one may have their
    /// places. If one comes back it is told whom to start.
    pub fn lose_nodes(&mut self, now: Timestamp) -> Vec<u32> {
        let (world, roster) = (self.world, &self.roster);
        let lives = |place| roster.lives_at(world.slots_of(place));
        let missed: Vec<_> = std::iter::from_fn(|| self.nodes.lose_one(now, lives)).collect();
        for slot in missed.iter().flat_map(|place| world.slots_of(*place)) {
            self.starts.end(now, slot);
        }
        missed
    }

    /// Workers of an earlier launch at these places that have not been heard of. Each is taken to have had
    /// one line then.
    pub fn left_behind(&self, places: &[u32]) -> Vec<Slot> {
        let left_behind = |slot: &Slot| {
            let silent = |worker: &&Worker| worker.line.stream.is_none() && worker.line.opened <= 1;
            let worker = self.roster.at(*slot).filter(silent);
            worker.is_some_and(|it| self.roster.is_recalled(it.id) && it.gone != Some(Exit::Lost))
        };
        places.iter().flat_map(|place| self.world.slots_of(*place)).filter(left_behind).collect()
    }

    /// Whether no worker of an earlier life was heard of or is still expected.
    pub fn is_new(&self) -> bool {
        !self.reunited && self.roster.living().all(|worker| !self.roster.is_recalled(worker.id))
    }

    /// Whether no worker of an earlier life has come by the end of the reunion, when these are lost.
    pub fn is_deserted(&self, lost: &[Slot]) -> bool {
        let expected = |worker: &Worker| Some(self.world.node_of(worker.slot())) != self.deserted;
        let of_them = |worker: &Worker| self.roster.is_recalled(worker.id) && expected(worker);
        let longest = lost.first().and_then(|slot| self.roster.at(*slot));
        !self.reunited && longest.is_some_and(of_them)
    }

    /// No worker can count as lost before this.
    pub fn watched_from(&self) -> Option<Timestamp> {
        self.next_loss
    }

    /// All workers that could be lost have been looked at.
    pub fn looked(&mut self) {
        self.next_loss = self.next_possible_loss();
    }

    /// When a worker could count as lost next, or a node.
    pub fn next_possible_loss(&self) -> Option<Timestamp> {
        let lives = |place| self.roster.lives_at(self.world.slots_of(place));
        let losses = [self.roster.next_loss(&self.patience), self.nodes.next_loss(lives)];
        losses.into_iter().flatten().min()
    }

    /// Makes sure that a worker or a node is looked at when it could count as lost.
    pub(super) fn watch_for_loss(&mut self, at: Timestamp) {
        self.next_loss = Some(self.next_loss.map_or(at, |next| next.min(at)));
    }

    /// A worker is gone: if it was the last of a launcher that is missed, so may that be.
    fn watch_for_its_node(&mut self, slot: Slot) {
        if let Some(at) = self.nodes.gone_at(self.world.node_of(slot)) {
            self.watch_for_loss(at);
        }
    }
}
