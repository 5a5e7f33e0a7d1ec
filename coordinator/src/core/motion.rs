//! Whether ranks move: how one that stands still is told from one that is slow, and from one that waits.
//!
//! ```text
//! quiet = time without a sign of motion     expected = what the same work has taken
//! named:     quiet > 3 x expected + patience.standstill
//! given up:  at once; where a disk may be waited for, patience.disk later
//! ```
//!
//! What is expected of a phase is the longest time that any rank of this run was ever quiet in it, once one
//! has been through it. Before, ranks that wait are the clock: they have done the same work since
//! the rank in question entered its phase. While no rank waits and none has finished this work before,
//! nothing is expected, so a model whose first pass takes minutes is no hang: it is reported after a minute,
//! and sooner for a process that has not made itself known.
//!
//! Ranks that are quiet in the same phase are judged together. If that is most of the run, what they wait for
//! is not theirs (a file system, a machine that sleeps): it is reported once, and no rank is given up. A rank
//! that is alone has only its own earlier times to be held against. Five minutes without a sign of motion are
//! too long for one rank, and half an hour for all.
//!
//! What this file does not do: look for all ranks waiting for each other in a collective, which no rank's
//! pulse shows (`machine/standstill.rs`).

use std::{collections::BTreeMap, time::Duration};

use coxswain_proto::{
    ids::Slot,
    limits::{STILL_ALL_TIMEOUT, STILL_NAMED, STILL_TIMEOUT},
};

use super::{report::WorkerPhase, time::Timestamp};
use crate::options::Patience;

/// Whether a worker's trainer moved, as of its last heartbeat.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pulse {
    /// When that came.
    pub at: Timestamp,
    /// How long there had been no sign of motion.
    pub still: Duration,
    /// How long it had been in its phase.
    pub in_phase: Duration,
    /// It waited for us, for as long as it was still.
    pub waits: bool,
}

impl Pulse {
    /// Nothing is known yet.
    pub fn moving(now: Timestamp) -> Self {
        Self { at: now, still: Duration::ZERO, in_phase: Duration::ZERO, waits: false }
    }

    /// The last sign of motion.
    pub fn still_since(&self) -> Timestamp {
        self.at.before(self.still)
    }

    fn phase_since(&self) -> Timestamp {
        self.at.before(self.in_phase)
    }
}

/// A worker, as far as its motion goes.
#[derive(Clone, Copy, Debug)]
pub struct MemberMotion {
    /// Who.
    pub slot: Slot,
    /// What it does.
    pub phase: WorkerPhase,
    /// Whether it waits for others, or has nothing to do.
    pub waits: bool,
    /// Whether it moves.
    pub pulse: Pulse,
}

/// What is known of how long work takes in this run.
#[derive(Clone, Debug, Default)]
pub struct Motion {
    /// Since when what is done now has been done: the generation was formed, has started, or a step was
    /// committed.
    pub began: Timestamp,
    /// When to look next.
    pub look_at: Timestamp,
    /// The longest time between two signs of motion in each phase that a rank has been through.
    longest: BTreeMap<WorkerPhase, Duration>,
}

/// All members at one moment.
#[derive(Clone, Debug, Default)]
pub struct Scene {
    members: usize,
    waiting: usize,
    /// When the last of those who wait began to.
    waiting_since: Timestamp,
    boats: BTreeMap<WorkerPhase, Boat>,
}

/// Members that are quiet in one phase.
#[derive(Clone, Copy, Debug)]
struct Boat {
    members: usize,
    /// The one that has been for longest, and since when.
    first: (Timestamp, Slot),
}

/// A rank that stands still.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StillRank {
    /// Without a sign of motion.
    pub quiet: Duration,
    /// What its work was expected to take, if that is known.
    pub expected: Option<Duration>,
    /// Ranks that wait meanwhile.
    pub waiting: usize,
    /// What is to be done about it.
    pub verdict: Verdict,
}

/// What is to be done about a rank that stands still.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// It is given up.
    GiveUp,
    /// It is named, and given up in this time unless it moves.
    Name(Duration),
    /// It is named for all that stand still as it does, which are most.
    NameAll(usize),
    /// Another one is named for all.
    Ignore,
}

impl Motion {
    /// Something else begins.
    pub fn begin(&mut self, now: Timestamp) {
        self.began = now;
    }

    /// What a worker has seen of its phases.
    pub fn learn(&mut self, paces: &[(WorkerPhase, Duration)]) {
        for (phase, longest) in paces {
            let known = self.longest.entry(*phase).or_default();
            *known = (*known).max(*longest);
        }
    }

    /// Whether a member stands still.
    pub fn judge(&self, who: &MemberMotion, scene: &Scene, patience: &Patience) -> Option<StillRank> {
        if who.waits {
            return None;
        }
        let quiet = who.pulse.still;
        // How long of it counts, and what is expected.
        let measure = match self.longest.get(&who.phase) {
            Some(longest) => Some((quiet, *longest)),
            None if scene.waiting > 0 => {
                let since = who.pulse.still_since().max(scene.waiting_since);
                Some((who.pulse.at.since(since), scene.waiting_since.since(who.pulse.phase_since())))
            }
            None => None,
        };
        let left = match measure {
            Some((counted, expected)) => {
                let due = expected.saturating_mul(3).saturating_add(patience.standstill);
                let over = counted.checked_sub(due).filter(|over| !over.is_zero())?;
                let grace = if may_wait_for_disk(who.phase) { patience.disk } else { Duration::ZERO };
                grace.saturating_sub(over)
            }
            None if quiet > named_after(who.phase, patience) => STILL_TIMEOUT.saturating_sub(quiet),
            None => return None,
        };
        let verdict = match scene.boats.get(&who.phase).filter(|boat| scene.is_most(boat)) {
            _ if quiet >= STILL_ALL_TIMEOUT => Verdict::GiveUp,
            Some(boat) if boat.first.1 == who.slot => Verdict::NameAll(boat.members),
            Some(_) => Verdict::Ignore,
            None if left.is_zero() || quiet >= STILL_TIMEOUT => Verdict::GiveUp,
            None => Verdict::Name(left),
        };
        Some(StillRank {
            quiet,
            expected: measure.map(|(_, expected)| expected),
            waiting: scene.waiting,
            verdict,
        })
    }
}

impl StillRank {
    /// Ranks that it is named for.
    pub fn ranks(&self) -> usize {
        match self.verdict {
            Verdict::NameAll(ranks) => ranks,
            Verdict::Name(_) | Verdict::GiveUp | Verdict::Ignore => 1,
        }
    }

    /// What was expected, in words.
    pub fn usual(&self) -> String {
        match self.expected {
            Some(expected) => format!("usually {:.1} s", expected.as_secs_f64()),
            None => "its usual time is unknown".into(),
        }
    }
}

impl Scene {
    /// What all members do.
    pub fn from_members(members: impl Iterator<Item = MemberMotion>, patience: &Patience) -> Self {
        let mut scene = Self::default();
        for member in members {
            scene.members += 1;
            let since = member.pulse.still_since();
            if member.waits {
                scene.waiting += 1;
                scene.waiting_since = scene.waiting_since.max(since);
            } else if member.pulse.still > patience.standstill {
                let first = (since, member.slot);
                let boat = scene.boats.entry(member.phase).or_insert(Boat { members: 0, first });
                (boat.members, boat.first) = (boat.members + 1, boat.first.min(first));
            }
        }
        scene
    }

    /// Whether those in a boat are most of the run, which has more than one.
    fn is_most(&self, boat: &Boat) -> bool {
        self.members > 1 && boat.members * 2 > self.members
    }
}

/// When a worker is reported as standing still of whose work nothing is known. A start reads no weights
/// (`starts`): what a disk is given is enough for it, and being named does not bring the end of its patience
/// nearer.
fn named_after(phase: WorkerPhase, patience: &Patience) -> Duration {
    match phase {
        WorkerPhase::Starting => patience.standstill.saturating_add(patience.disk),
        _ => STILL_NAMED,
    }
}

/// Phases in which a rank may be waiting for a disk.
pub fn may_wait_for_disk(phase: WorkerPhase) -> bool {
    matches!(
        phase,
        WorkerPhase::Starting
            | WorkerPhase::Loading
            | WorkerPhase::Data
            | WorkerPhase::Checkpoint
            | WorkerPhase::CacheBuild
            | WorkerPhase::Evaluation
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn s(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    fn patience() -> Patience {
        Patience { standstill: s(7), disk: s(20), ..Patience::default() }
    }

    /// A member, as of second 10,000.
    fn member(slot: u32, phase: WorkerPhase, still: u64, in_phase: u64) -> MemberMotion {
        let pulse =
            Pulse { at: Timestamp::at(s(10_000)), still: s(still), in_phase: s(in_phase), waits: false };
        MemberMotion { slot: Slot(slot), phase, waits: phase == WorkerPhase::Communication, pulse }
    }

    fn judged(motion: &Motion, members: &[MemberMotion], who: usize) -> Option<Verdict> {
        let scene = Scene::from_members(members.iter().copied(), &patience());
        motion.judge(&members[who], &scene, &patience()).map(|still| still.verdict)
    }

    const WAITS: WorkerPhase = WorkerPhase::Communication;

    #[test]
    fn ranks_that_wait_are_the_clock_while_nobody_has_been_through_a_phase() {
        let motion = Motion::default();
        // Rank 0 did the same work in 5 s, and has waited for 20: three times that, and seven seconds, are
        // not over.
        let pair = |waited| {
            [member(0, WAITS, waited, waited), member(1, WorkerPhase::Forward, waited + 5, waited + 5)]
        };
        assert_eq!(judged(&motion, &pair(20), 1), None);
        assert_eq!(judged(&motion, &pair(23), 1), Some(Verdict::GiveUp));
        // No rank waits: all are at work.
        let busy = [0, 1].map(|slot| member(slot, WorkerPhase::Forward, 60, 60));
        assert_eq!(judged(&motion, &busy, 1), None);
        // It works, in small steps.
        assert_eq!(
            judged(&motion, &[member(0, WAITS, 600, 600), member(1, WorkerPhase::Loading, 2, 600)], 1),
            None
        );
    }

    #[test]
    fn what_a_phase_has_taken_is_what_it_may_take_three_times_over() {
        let mut motion = Motion::default();
        motion.learn(&[(WorkerPhase::Forward, s(4)), (WorkerPhase::Forward, s(2))]);
        let alone = |still| [member(0, WorkerPhase::Forward, still, 100)];
        assert_eq!(judged(&motion, &alone(19), 0), None);
        assert_eq!(judged(&motion, &alone(20), 0), Some(Verdict::GiveUp), "a rank that is alone, too");
    }

    #[test]
    fn a_rank_that_may_wait_for_a_disk_is_named_before_it_is_given_up() {
        let mut motion = Motion::default();
        motion.learn(&[(WorkerPhase::Checkpoint, s(0))]);
        let pair = |still| [member(0, WAITS, still, still), member(1, WorkerPhase::Checkpoint, still, still)];
        assert_eq!(judged(&motion, &pair(7), 1), None);
        assert_eq!(judged(&motion, &pair(8), 1), Some(Verdict::Name(s(19))));
        assert_eq!(judged(&motion, &pair(27), 1), Some(Verdict::GiveUp));
    }

    #[test]
    fn where_most_stand_still_alike_one_is_named_for_all_and_nobody_is_given_up() {
        let mut motion = Motion::default();
        motion.learn(&[(WorkerPhase::Checkpoint, s(0))]);
        let stuck = |slot| member(slot, WorkerPhase::Checkpoint, 600 + u64::from(slot), 700);
        let all = [stuck(0), stuck(1), member(2, WAITS, 9, 9)];
        assert_eq!(judged(&motion, &all, 0), Some(Verdict::Ignore));
        assert_eq!(judged(&motion, &all, 1), Some(Verdict::NameAll(2)), "the first that stood still");
        let half = [stuck(0), stuck(1), member(2, WAITS, 9, 9), member(3, WAITS, 9, 9)];
        assert_eq!(judged(&motion, &half, 0), Some(Verdict::GiveUp));
    }

    #[test]
    fn what_nothing_is_known_of_is_reported_after_a_minute_and_given_up_after_five() {
        let motion = Motion::default();
        let alone = |still| [member(0, WorkerPhase::Loading, still, still)];
        assert_eq!(judged(&motion, &alone(60), 0), None);
        assert_eq!(judged(&motion, &alone(100), 0), Some(Verdict::Name(s(200))));
        assert_eq!(judged(&motion, &alone(300), 0), Some(Verdict::GiveUp));
        let all = |still| [0, 1].map(|slot| member(slot, WorkerPhase::Loading, still, still));
        assert_eq!(judged(&motion, &all(300), 0), Some(Verdict::NameAll(2)));
        assert_eq!(judged(&motion, &all(1800), 0), Some(Verdict::GiveUp));
    }

    #[test]
    fn who_waits_does_not_stand_still() {
        let mut motion = Motion::default();
        motion.learn(&[(WAITS, s(0))]);
        assert_eq!(judged(&motion, &[member(0, WAITS, 6000, 6000), member(1, WAITS, 1, 1)], 0), None);
    }
}
