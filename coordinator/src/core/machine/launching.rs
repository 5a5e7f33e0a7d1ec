//! Processes that are being started: when one begins, when it is heard of, and what becomes of one that never is.
//!
//! A process that stands still before it has registered (stopped, or waiting for a disk) is seen by nobody but its launcher, to whom it
//! looks well. So its start is looked at with everybody's motion: held against the longest start of this run, named, and given up where it
//! would be if it might wait for a disk in any other phase. Whoever was given up counts as seen to take that long, so that a machine on
//! which everything is slow has three times as long the next time, and does not use up the run's restarts.

use coxswain_proto::{ids::Seat, limits::START_FLOOR};

use super::{Machine, Timestamp};
use crate::{
    core::{
        action::Action,
        motion::{Member, Still},
        news::News,
        report::WorkerPhase,
    },
    options::CauseKind,
};

impl Machine {
    /// A launcher that has just taken a place starts all of its workers by itself.
    pub(super) fn launches(&mut self, now: Timestamp, place: u32) {
        for seat in self.config.world.seats_of(place) {
            self.roster.forget_respawn(seat);
            self.starts.begin(now, seat);
        }
    }

    /// A launcher's line is open: for the first time, or it `returns`. What it starts it starts now; who was cut off may have been stopped.
    /// Who has had a seat is known, so at the others somebody is on the way.
    pub(super) fn launcher_follows(&mut self, now: Timestamp, place: u32, returns: bool) {
        for seat in self.config.world.seats_of(place) {
            if self.starts.at(seat) || (returns && self.roster.at(seat).is_none()) {
                self.starts.begin(now, seat);
            }
        }
    }

    /// A process has made itself known at its seat.
    pub(super) fn has_started(&mut self, now: Timestamp, seat: Seat, out: &mut Vec<Action>) {
        let Some(start) = self.starts.end(now, seat) else { return };
        self.motion.learn(&[(WorkerPhase::Starting, start.took.max(START_FLOOR))]);
        if start.named {
            out.push(Action::Publish(News::Standstill(seat, "has made itself known".into())));
        }
    }

    /// A process has ended that may have been the one that is awaited at its seat.
    pub(super) fn start_ended(&mut self, now: Timestamp, seat: Seat, pid: Option<u32>) {
        let known = self.roster.at(seat).map(|worker| worker.claim.pid);
        if pid.is_none() || known != pid {
            self.starts.end(now, seat);
        }
    }

    /// Processes that are on their way to a seat that nobody living has.
    pub(super) fn on_their_way(&self, now: Timestamp) -> impl Iterator<Item = Member> {
        self.starts.members(now).filter(|start| self.roster.living_at(start.seat).is_none())
    }

    /// Those of them that are waited for: their launcher can be told, and their node is to stay.
    pub(super) fn awaited(&self, now: Timestamp) -> impl Iterator<Item = Member> {
        self.on_their_way(now).filter(|start| {
            let place = self.config.world.node_of(start.seat);
            self.nodes.line(place).is_some() && !self.drained(start.seat)
        })
    }

    /// A start that is late, in words.
    pub(super) fn late_start(&self, seat: Seat, still: &Still) -> String {
        let place = self.config.world.node_of(seat);
        let host = self.nodes.at(place).map_or("", |node| &node.host);
        let quiet = still.quiet.as_secs_f64();
        format!(
            "it has not made itself known: its process on {host} was started {quiet:.1} s ago ({})",
            still.usual()
        )
    }

    /// A process that never made itself known is lost like a worker that stands still: another one is asked for.
    pub(super) fn give_up_start(&mut self, now: Timestamp, seat: Seat, still: &Still, out: &mut Vec<Action>) {
        let failure = self.failure_of(seat, CauseKind::WorkerLost, self.late_start(seat, still));
        if let Some(start) = self.starts.end(now, seat) {
            self.motion.learn(&[(WorkerPhase::Starting, start.took)]);
        }
        self.lose(now, seat, failure, out);
    }
}
