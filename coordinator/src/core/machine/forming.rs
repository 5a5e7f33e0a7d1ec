//! The members of the next generation, and whether it can be formed: a value that `transitions` carries out.
//!
//! ```text
//! fixed     every slot has a worker that is ready
//! elastic   every slot of every node that is there; without the slots whose successors do not come in time,
//!           but with the fewest at least; when the run begins, more nodes than the fewest are waited for
//!           until the last call is over
//! spares    elastic, with no more ranks than are wanted: no successor is waited for while others are ready
//! last      see `closing`
//! ```
//!
//! A spare is a worker that is ready, and is not chosen: it waits, with its model loaded, for the next
//! generation. Workers that have a part of the state are chosen before those that have none, and workers that
//! were set aside for being slow come last.
//!
//! A worker is ready when it has said so and its line is open: a generation never begins with the dead.

use coxswain_proto::ids::Slot;

use super::{closing, run::Run};
use crate::{
    core::{
        failure::Failure,
        phase::{GatheringPhase, LastCall, Phase},
        roster::Worker,
    },
    options::CauseKind,
};

/// Whether the next generation can be formed.
pub(super) enum Formation {
    /// A worker or launcher is waited for.
    Wait,
    /// The fewest are there, for the first time: more are waited for until the last call is over.
    OpenLastCall,
    /// The workers at these slots form it.
    Of(Vec<Slot>),
    /// It is the run's last one, and none is left for it.
    Never,
}

/// Whether the next generation can be formed now.
pub(super) fn decide(run: &Run) -> Formation {
    match &run.phase {
        Phase::Gathering(_) if run.faults.closing().is_some() => last(run),
        Phase::Gathering(gathering) if run.config.world.elastic() => elastic(run, gathering),
        Phase::Gathering(_) if run.fleet.roster.assignable() == run.fleet.roster.size() => {
            Formation::Of((0..run.fleet.roster.size()).map(Slot).collect())
        }
        Phase::Gathering(_) => Formation::Wait,
        Phase::Running(_) | Phase::Over(_) => Formation::Wait,
    }
}

/// The last generation of a run that has failed: all that hold a part of the state, once none of them is
/// still leaving the one before.
fn last(run: &Run) -> Formation {
    let mut holders = closing::holders(run).peekable();
    match holders.peek() {
        None => Formation::Never,
        Some(_) if closing::holders(run).all(Worker::assignable) => {
            Formation::Of(holders.map(Worker::slot).collect())
        }
        Some(_) => Formation::Wait,
    }
}

/// The slots of the workers that are there, if no other is to be waited for. What looks at all slots comes
/// last: thousands of workers come one by one.
fn elastic(run: &Run, gathering: &GatheringPhase) -> Formation {
    let (world, roster) = (run.config.world, &run.fleet.roster);
    let stays = |slot: &Slot| run.fleet.assignable(*slot) && !run.may_go(*slot);
    let of_drained = run.orders.draining.iter().flat_map(|place| world.slots_of(*place));
    let going = of_drained.filter(|slot| run.fleet.assignable(*slot) && !stays(slot)).count() as u32;
    let ready = roster.assignable() - going;
    let all_are_there = ready == world.size();
    let (full, enough) = (ready >= world.most(), ready >= world.least());
    if !all_are_there && enough && gathering.last_call == LastCall::Closed {
        return Formation::OpenLastCall;
    }
    let waits_for_more = !all_are_there && gathering.is_first();
    // A worker that is still leaving the old generation has its part of the state.
    let waits_for_leaving = roster.any_leaving() && gathering.settle_by.is_some();
    if !enough || waits_for_more || waits_for_leaving {
        return Formation::Wait;
    }
    let waits = !full && (gathering.respawn_by.is_some() || gathering.is_first());
    let mut missing = run.fleet.missing(&run.orders.draining);
    match waits && missing.any(|slot| !run.health.is_cordoned(slot)) {
        true => Formation::Wait,
        false => Formation::Of(chosen(run, (0..roster.size()).map(Slot).filter(stays).collect())),
    }
}

/// Picks, from the workers that are ready, those that are to have ranks; the others are spares.
fn chosen(run: &Run, mut ready: Vec<Slot>) -> Vec<Slot> {
    let rank = |slot: &Slot| {
        let worker = run.fleet.roster.at(*slot);
        let aside = worker.is_some_and(|worker| worker.without.aside) || run.health.is_cordoned(*slot);
        (aside, worker.is_none_or(|worker| worker.generation < run.generation), *slot)
    };
    ready.sort_by_key(rank);
    ready.truncate(run.config.world.most() as usize);
    ready.sort();
    ready
}

/// Workers that wait for a place in a generation to come, while one runs without them.
pub(super) fn spares(run: &Run) -> impl Iterator<Item = &Worker> {
    let running = run.phase.running();
    run.fleet.roster.living().filter(move |worker| {
        let outside = running.is_some_and(|running| running.rank_of(worker.id).is_none());
        outside && worker.assignable() && !run.drained(worker.slot())
    })
}

/// Whether the world is to grow: fewer have ranks than may, and workers are ready that have none, and so are
/// all that came.
pub(super) fn widens(run: &Run) -> bool {
    let Some(running) = run.phase.running() else { return false };
    if running.assignment.world() >= run.config.world.most() {
        return false;
    }
    let outside = |worker: &&Worker| running.rank_of(worker.id).is_none() && !run.drained(worker.slot());
    let newcomers = || run.fleet.roster.living().filter(outside);
    let all_ready = newcomers().next().is_some() && newcomers().all(|worker| worker.ready);
    all_ready && may_regroup(run)
}

/// Whether the generation that runs may be asked to end at the next boundary, for the sake of another one.
pub(super) fn may_regroup(run: &Run) -> bool {
    let asked = run.phase.running().is_none_or(|running| running.regroup);
    let within_budget = run.faults.budgets.rescales.is_none_or(|most| run.faults.spent.rescales < most);
    let goes_on = !run.steps_done() && run.faults.closing().is_none();
    !asked && goes_on && within_budget
}

/// Whether a generation with members that are to go is to end at the next boundary.
pub(super) fn lets_go(run: &Run) -> bool {
    let Some(running) = run.phase.running() else { return false };
    let some_go = running.assignment.members.iter().any(|member| run.drained(member.slot));
    let goes_on = !run.steps_done() && run.orders.stop.is_none() && run.faults.closing().is_none();
    some_go && !running.regroup && goes_on
}

/// The rendezvous took too long. If a fault began it, that is the cause.
pub(super) fn failed(run: &Run) -> Failure {
    let (world, enough, roster) = (run.config.world.size(), run.config.world.least(), &run.fleet.roster);
    let seconds = run.config.patience.rendezvous.as_secs();
    let present = roster.present();
    let message = if present >= enough {
        let waiting = roster.living().filter(|worker| !worker.assignable());
        let came = if present == world { "all".to_owned() } else { present.to_string() };
        let ranks = some(waiting.map(Worker::slot));
        format!("{came} workers joined, but these ranks were not ready within {seconds} s: {ranks}")
    } else if run.config.world.elastic() {
        format!("only {present} of the required minimum of {enough} workers joined within {seconds} s")
    } else {
        let missing = some((0..world).map(Slot).filter(|slot| roster.living_at(*slot).is_none()));
        format!("only {present} of {world} workers joined within {seconds} s; missing ranks: {missing}")
    };
    let Some(cause) = run.faults.incident.as_ref().and_then(|incident| incident.cause.as_ref()) else {
        return Failure::of_run(CauseKind::Rendezvous, message);
    };
    let mut failure = (**cause).clone();
    failure.message.push_str(&format!("; after that {message}"));
    failure
}

/// The first ranks of a list that may be long.
fn some(slots: impl Iterator<Item = Slot>) -> String {
    const SHOWN: usize = 8;
    let mut slots: Vec<_> = slots.take(SHOWN + 1).map(|slot| slot.to_string()).collect();
    if slots.len() > SHOWN {
        slots[SHOWN] = "...".into();
    }
    slots.join(", ")
}
