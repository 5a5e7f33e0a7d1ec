//! Hangs: everybody heartbeats, and nobody gets on.
//!
//! ```text
//! a rank that shows no sign of motion and does not wait     see `motion`: named, then given up
//! a process that was started and that nobody has heard of   the same, see `launching`
//! nothing moves at all, and a step's time is known          last motion + 3 x that time + patience.standstill
//! all wait, and it is not                                   last motion + 3 x what came before it + patience.standstill
//! ```
//!
//! A step has collectives, so one rank that stands still keeps all others waiting in one. Where nothing moves the culprit is whoever is
//! not in a collective and has entered the fewest. If all are in one, the network between them has lost something: a rank may be behind
//! the others by what it lost, so that is no sign of guilt. All try again, and whoever really never comes out of its collective is found by
//! that. A step's time is that of steps of its kind (live or cached) in this generation, of which some must have been committed: other
//! worlds, and processes that have only come, take longer.
//!
//! All of it is looked at once a second, and by what heartbeats have said: a coordinator that was away itself knows nothing.

use std::time::Duration;

use coxswain_proto::{ids::Seat, limits::LOOK_INTERVAL};

use super::{Machine, Timestamp};
use crate::{
    core::{
        action::Action,
        event::Beat,
        failure::{Failure, Incident},
        motion::{Member, Scene, Still, Verdict},
        news::News,
        phase::Phase,
        report::WorkerPhase,
        roster::Worker,
    },
    options::CauseKind,
};

impl Machine {
    /// When to look next whether all move, while somebody should.
    pub(super) fn next_look(&self) -> Option<Timestamp> {
        (!matches!(self.phase, Phase::Over(_))).then_some(self.motion.look_at)
    }

    /// Whoever stands still is named, or lost.
    pub(super) fn look_for_standstill(&mut self, now: Timestamp, out: &mut Vec<Action>) {
        if self.next_look().is_none_or(|at| at > now) {
            return;
        }
        self.motion.look_at = now.after(LOOK_INTERVAL);
        if self.result_is_safe() {
            // Whoever has not left some time after the first good-bye is waited for no longer.
            let since = *self.safe_since.get_or_insert(now);
            if since.after(self.config.patience.farewell) <= now {
                self.end(now, self.end_in_order(), out);
            }
            return;
        }
        let patience = self.config.patience;
        // Nobody is judged who was quiet for less; with thousands of workers the rest would hold up their calls once a second.
        let everybody = || self.roster.living().map(Worker::motion).chain(self.awaited(now));
        let mut quiet = everybody().filter(|member| member.pulse.still > patience.standstill).peekable();
        if quiet.peek().is_none() {
            return;
        }
        let scene = Scene::of(everybody(), &patience);
        let judged = |member: Member| Some((member, self.motion.judge(&member, &scene, &patience)?));
        let still: Vec<_> = quiet.filter_map(judged).collect();
        let lost = still.iter().find(|(_, still)| still.verdict == Verdict::GiveUp);
        if let Some((member, still)) = lost {
            return self.give_up(now, member, still, out);
        }
        for (member, still) in still {
            self.name_still(&member, &still, out);
        }
        self.look_for_late_step(now, out);
    }

    /// A rank that stands still is lost, or a process that has never made itself known.
    fn give_up(&mut self, now: Timestamp, member: &Member, still: &Still, out: &mut Vec<Action>) {
        if member.phase == WorkerPhase::Starting {
            return self.give_up_start(now, member.seat, still, out);
        }
        let message = self.standing_still(member.seat, still);
        self.lose_silently(now, member.seat, message, out);
    }

    /// Says once of a rank that it stands still.
    fn name_still(&mut self, member: &Member, still: &Still, out: &mut Vec<Action>) {
        let follows = match still.verdict {
            Verdict::Ignore | Verdict::GiveUp => return,
            Verdict::Name(left) => format!("given up in {:.0} s unless it moves", left.as_secs_f64()),
            Verdict::NameAll(boat) => {
                let others =
                    if boat == 2 { "so does 1 other rank" } else { &format!("so do {} others", boat - 1) };
                format!("{others}: a file system or a machine that does not answer? Nobody is given up")
            }
        };
        let seat = member.seat;
        let (news, text) = match member.phase {
            WorkerPhase::Starting => (self.starts.name(seat), self.late_start(seat, still)),
            _ => (self.roster.name(seat), self.standing_still(seat, still)),
        };
        if news {
            let text = format!("{}; {follows}", text.trim_start_matches("it "));
            out.push(Action::Publish(News::Standstill(seat, text)));
        }
    }

    fn standing_still(&self, seat: Seat, still: &Still) -> String {
        let Still { quiet, waiting, .. } = still;
        let (phase, step, entered) = match self.roster.at(seat) {
            Some(worker) => (worker.phase, worker.step, worker.collective.0),
            None => Default::default(),
        };
        let wait = match waiting {
            0 => String::new(),
            1 => ", while 1 rank waits".into(),
            many => format!(", while {many} ranks wait"),
        };
        format!(
            "it stands still: {phase} of step {step}, collective {entered} entered, no sign of motion for {:.1} s \
             ({}){wait}",
            quiet.as_secs_f64(),
            still.usual(),
        )
    }

    /// If nothing moves and a step is overdue, whoever holds it up is lost.
    fn look_for_late_step(&mut self, now: Timestamp, out: &mut Vec<Action>) {
        let patience = self.config.patience.standstill;
        let (mut members, mut waiting, mut least, mut furthest) = (0, 0, u64::MAX, 0);
        let mut last = self.motion.began;
        for worker in self.members_now() {
            // Phases outside of steps have no step's time to be held against; what waits for us is not overdue.
            let excused = worker.pulse.waits || worker.may_wait_for_disk();
            if worker.pulse.still <= patience || excused {
                return;
            }
            members += 1;
            waiting += usize::from(worker.waits_for_ranks());
            (least, furthest) = (least.min(worker.collective.0), furthest.max(worker.collective.0));
            last = last.max(worker.pulse.still_since());
        }
        let expected = self.expected_step();
        let due = match expected {
            // While nobody waits all are at work.
            Some(expected) if waiting > 0 || members == 1 => expected,
            None if waiting == members && members > 0 => last.since(self.motion.began),
            _ => return,
        };
        if self.orders.pause || last.after(due.saturating_mul(3).saturating_add(patience)) > now {
            return;
        }
        let culprit = self
            .members_now()
            .filter(|worker| {
                !worker.waits_for_ranks() || (worker.collective.0 < furthest && !worker.in_collective())
            })
            .min_by_key(|worker| (worker.waits_for_ranks(), worker.collective.0));
        let Some(culprit) = culprit else { return self.nobody_gets_on(now, (least, furthest), out) };
        let (seat, quiet, verdict) = (culprit.seat(), culprit.pulse.still, Verdict::GiveUp);
        let message = self.standing_still(seat, &Still { quiet, expected, waiting, verdict });
        self.lose_silently(now, seat, message, out);
    }

    /// How long the next step takes, if that is known of its kind.
    fn expected_step(&self) -> Option<Duration> {
        let Phase::Running(running) = &self.phase else { return None };
        let turn = self.cache.turns().turn(self.progress.committed)?;
        let training = running.training().filter(|_| !running.done())?;
        training.rhythm.expected(turn.number() > 0)
    }

    /// All ranks wait in a collective: the network between them has lost something. They try again.
    fn nobody_gets_on(&mut self, now: Timestamp, (least, furthest): (u64, u64), out: &mut Vec<Action>) {
        let which = match least == furthest {
            true => format!("collective {furthest}"),
            false => format!("collectives {least} to {furthest}"),
        };
        let message = format!("all ranks wait in {which}, and nothing moves");
        let incident = self.incident.get_or_insert_with(|| Incident::new(now));
        let mut complaint = Failure::of_run(CauseKind::PeerLost, message.clone());
        (complaint.generation, complaint.phase) = (self.generation, WorkerPhase::Communication);
        complaint.collective = least;
        incident.complaint.get_or_insert(complaint);
        self.break_up(now, &message, true, out);
    }

    /// What a heartbeat says of a worker's motion.
    pub(super) fn felt(&mut self, beat: &Beat, out: &mut Vec<Action>) {
        self.motion.learn(&beat.paces);
        let patience = self.config.patience.standstill;
        if let Ok(worker) = self.roster.get_mut(beat.worker)
            && worker.named
            && beat.still <= patience
        {
            worker.named = false;
            out.push(Action::Publish(News::Standstill(worker.seat(), "moves again".into())));
        }
    }

    /// Members of the generation that are not gone.
    fn members_now(&self) -> impl Iterator<Item = &Worker> {
        let members = match &self.phase {
            Phase::Running(running) => running.assignment.members.as_slice(),
            Phase::Gathering(_) | Phase::Over(_) => &[],
        };
        let seats = members.iter().map(|member| member.seat);
        seats.filter_map(|seat: Seat| self.roster.living_at(seat))
    }
}
