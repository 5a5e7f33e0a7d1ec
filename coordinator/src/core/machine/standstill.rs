//! Hangs: all ranks send heartbeats, and none makes progress. What is seen is a value; `watching` carries out
//! what follows.
//!
//! ```text
//! a rank that shows no sign of motion and does not wait     see `motion`: named, then given up
//! a process that was started and has not registered         the same
//! nothing moves at all, and a step's time is known          last motion + 3 x that time +
//!                                                           patience.standstill
//! all wait, and it is not                                   last motion + 3 x what came before it +
//!                                                           patience.standstill
//! some are in a collective that all others have finished    last motion + 3 x patience.standstill
//! ```
//!
//! A step has collectives, so one rank that stands still keeps all others waiting in one. Where nothing moves
//! the culprit is the rank that is not in a collective and has entered the fewest. If all are in one, the
//! network between them has lost something: a rank may be behind the others by what it lost, so that is no
//! sign of guilt. All try again, and a rank that never comes out of its collective is found that way. So it
//! is where the others have finished that collective, and wait for us or for a disk.
//!
//! A step's time is that of steps of its kind (live or cached) in this generation, of which some must have
//! been committed: other worlds, and processes that have only come, take longer.
//!
//! A process that stands still before it has registered (stopped, or waiting for a disk) is seen only by its
//! launcher, to which it looks well. So its start is looked at with the motion of all ranks: held against the
//! longest start of this run, named, and given up where it would be if it might wait for a disk in any other
//! phase.

use super::run::Run;
use crate::core::{
    motion::{MemberMotion, Scene, StillRank, Verdict},
    report::WorkerPhase,
    roster::Worker,
};

/// Ranks and starts that stand still.
pub(super) fn quiet(run: &Run) -> Vec<(MemberMotion, StillRank)> {
    let patience = run.config.patience;
    // A worker that was quiet for less is not judged: with thousands of workers that would hold up their
    // calls once a second.
    let everybody = || run.fleet.moving(run.now, &run.orders.draining);
    let mut quiet = everybody().filter(|member| member.pulse.still > patience.standstill).peekable();
    if quiet.peek().is_none() {
        return Vec::new();
    }
    let scene = Scene::from_members(everybody(), &patience);
    let judged = |member: MemberMotion| Some((member, run.fleet.motion.judge(&member, &scene, &patience)?));
    quiet.filter_map(judged).collect()
}

/// A rank that stands still, or a start that is late, in words.
pub(super) fn in_words(run: &Run, member: &MemberMotion, still: &StillRank) -> String {
    let (quiet, usual) = (still.quiet.as_secs_f64(), still.usual());
    if member.phase == WorkerPhase::Starting {
        let host = run.fleet.nodes.host(run.config.world.node_of(member.slot));
        return format!(
            "it has not registered yet, {quiet:.1} s after its process was started on {host} ({usual})"
        );
    }
    let (phase, step, entered) = match run.fleet.roster.at(member.slot) {
        Some(Worker { doing, .. }) => (doing.phase, doing.step, doing.collective.0),
        None => Default::default(),
    };
    let wait = match still.waiting {
        0 => String::new(),
        1 => ", while 1 rank waits".into(),
        many => format!(", while {many} ranks wait"),
    };
    format!(
        "no progress: {phase} of step {step}, collective {entered}, no activity for {quiet:.1} s \
         ({usual}){wait}"
    )
}

/// What people are told will follow for one that is not given up; nothing if another one is named for it.
pub(super) fn follows(still: &StillRank) -> Option<String> {
    match still.verdict {
        Verdict::Ignore | Verdict::GiveUp => None,
        Verdict::Name(left) => {
            Some(format!("it is declared lost unless it makes progress within {:.0} s", left.as_secs_f64()))
        }
        Verdict::NameAll(boat) => {
            let others = match boat - 1 {
                1 => "1 other rank hangs in the same way".to_owned(),
                others => format!("{others} other ranks hang in the same way"),
            };
            Some(format!("{others}: check the file system and the machines; no rank is declared lost"))
        }
    }
}

/// Nothing moves and a step is overdue, or some do not come out of a collective.
pub(super) enum LateStep {
    /// This one holds it up.
    Culprit(MemberMotion, StillRank),
    /// It is no rank's fault as far as can be seen: the first collective that ranks do not come out of, and
    /// what is told.
    Nobody(u64, String),
}

/// Whether nothing moves and a step is overdue, or some do not come out of a collective; and who holds it up.
pub(super) fn late_step(run: &Run) -> Option<LateStep> {
    let left_behind = left_behind(run);
    if left_behind.is_some() {
        return left_behind;
    }
    let patience = run.config.patience.standstill;
    let (mut members, mut waiting, mut least, mut furthest) = (0, 0, u64::MAX, 0);
    let mut last = run.fleet.motion.began;
    for worker in members_of(run) {
        // Phases outside of steps have no step's time to be held against; what waits for us is not overdue.
        let excused = worker.pulse.waits || worker.may_wait_for_disk();
        if worker.pulse.still <= patience || excused {
            return None;
        }
        members += 1;
        waiting += usize::from(worker.waits_for_ranks());
        let entered = worker.doing.collective.0;
        (least, furthest) = (least.min(entered), furthest.max(entered));
        last = last.max(worker.pulse.still_since());
    }
    let expected = run.progress.expected_step();
    let due = match expected {
        // While no rank waits all are at work.
        Some(expected) if waiting > 0 || members == 1 => expected,
        None if waiting == members && members > 0 => last.since(run.fleet.motion.began),
        _ => return None,
    };
    if run.orders.pause || last.after(due.saturating_mul(3).saturating_add(patience)) > run.now {
        return None;
    }
    let behind = |worker: &&Worker| {
        !worker.waits_for_ranks() || (worker.doing.collective.0 < furthest && !worker.in_collective())
    };
    let first = |worker: &&Worker| (worker.waits_for_ranks(), worker.doing.collective.0);
    let Some(culprit) = members_of(run).filter(behind).min_by_key(first) else {
        let which = match least == furthest {
            true => format!("collective {furthest}"),
            false => format!("collectives {least} to {furthest}"),
        };
        return Some(LateStep::Nobody(least, format!("all ranks wait in {which}, and none makes progress")));
    };
    let still = StillRank { quiet: culprit.pulse.still, expected, waiting, verdict: Verdict::GiveUp };
    Some(LateStep::Culprit(culprit.motion(), still))
}

/// Whether some have been in a collective for long that all others have finished.
fn left_behind(run: &Run) -> Option<LateStep> {
    let long = run.config.patience.standstill.saturating_mul(3);
    let still = |worker: &&Worker| worker.in_collective() && worker.pulse.still > long;
    let which = members_of(run).filter(still).map(|worker| worker.doing.collective.0).min()?;
    let (finished, others): (Vec<_>, Vec<_>) =
        members_of(run).partition(|worker| worker.doing.collective.1 >= which);
    let inside = others.iter().all(|worker| still(worker) && worker.doing.collective.0 == which);
    let message = || format!("some ranks are still in collective {which}, which the others finished");
    (inside && !finished.is_empty()).then(|| LateStep::Nobody(which, message()))
}

/// Members of the generation that runs that are not gone.
fn members_of(run: &Run) -> impl Iterator<Item = &Worker> {
    let members = run.phase.running().map_or(&[][..], |running| &running.assignment.members);
    members.iter().filter_map(|member| run.fleet.roster.living_at(member.slot))
}
