//! What must hold after every event, as named functions: called by debug assertions, property tests and the simulator.

use coxswain_proto::{cache_plan::Decided, ids::Rank, limits};

use super::{
    machine::Machine,
    phase::{End, Phase},
    reason::Reason,
    roster::Gone,
};

type Named = (&'static str, fn(&Machine) -> bool);

/// The name of the first invariant that does not hold.
pub fn violated(machine: &Machine) -> Option<&'static str> {
    let all: [Named; 13] = [
        ("no generation has a lost member", no_generation_has_a_lost_member),
        ("a fixed world is complete or waits", a_fixed_world_is_complete_or_waits),
        ("each worker stands at its seat", each_worker_stands_at_its_seat),
        ("one generation lives", one_generation_lives),
        ("no step is committed that was not leased", no_step_is_committed_that_was_not_leased),
        ("no rank runs ahead of its lease", no_rank_runs_ahead_of_its_lease),
        ("every leased step has its turn", every_leased_step_has_its_turn),
        ("generations of the cache follow each other", generations_of_the_cache_follow_each_other),
        ("only uncommitted steps are in flight", only_uncommitted_steps_are_in_flight),
        ("progress is what the ledger says", progress_is_what_the_ledger_says),
        ("budgets are kept", budgets_are_kept),
        ("every living worker is watched", every_living_worker_is_watched),
        ("the reason fits the phase", the_reason_fits_the_phase),
    ];
    all.into_iter().find(|(_, holds)| !holds(machine)).map(|(name, _)| name)
}

/// Each member of a generation that runs is the worker at its seat, and is not lost, unless all that remains are good-byes.
pub fn no_generation_has_a_lost_member(machine: &Machine) -> bool {
    let Phase::Running(running) = &machine.phase else { return true };
    if machine.result_is_safe() {
        return true;
    }
    running.assignment.members.iter().all(|member| {
        let found = machine.roster.at(member.seat);
        found.is_some_and(|worker| {
            worker.id == member.worker && (worker.gone != Some(Gone::Lost) || running.done())
        })
    })
}

/// A fixed world trains with every seat; an elastic one with the fewest at least.
pub fn a_fixed_world_is_complete_or_waits(machine: &Machine) -> bool {
    let Phase::Running(running) = &machine.phase else { return true };
    (machine.config.world.least()..=machine.config.world.size()).contains(&running.assignment.world())
}

/// Two workers never hold one seat, and a worker is found at the seat it claimed.
pub fn each_worker_stands_at_its_seat(machine: &Machine) -> bool {
    let stands = |worker: &super::roster::Worker| {
        machine.roster.at(worker.seat()).is_some_and(|found| found.id == worker.id)
    };
    machine.roster.workers().all(stands)
}

/// Only members of the newest generation have been told of it, and nobody of a later one.
pub fn one_generation_lives(machine: &Machine) -> bool {
    machine.roster.living().all(|worker| match &machine.phase {
        Phase::Running(running) if running.rank_of(worker.id).is_some() => {
            worker.generation == running.assignment.generation && !worker.ready
        }
        Phase::Running(running) => worker.generation < running.assignment.generation,
        Phase::Gathering(_) | Phase::Over(_) => worker.generation <= machine.generation,
    })
}

/// Commits stay below the end of the leases.
pub fn no_step_is_committed_that_was_not_leased(machine: &Machine) -> bool {
    match &machine.phase {
        Phase::Running(running) => running
            .training()
            .is_none_or(|at| at.course.ledger.committed() <= at.course.leases.end().max(at.first_step)),
        Phase::Gathering(_) | Phase::Over(_) => true,
    }
}

/// No rank has reported a step that it had no lease for, or owes one that is committed.
pub fn no_rank_runs_ahead_of_its_lease(machine: &Machine) -> bool {
    let Some(course) = machine.phase.course() else { return true };
    let committed = course.ledger.committed();
    let held = (0..).map(Rank).map(|rank| course.leases.end_of(rank).max(committed));
    course.ledger.all_owed().zip(held).all(|(owed, limit)| owed <= limit && owed >= committed)
}

/// Nobody is leased a step before it is decided where its features come from, and all of them lie in one window.
pub fn every_leased_step_has_its_turn(machine: &Machine) -> bool {
    let Some(course) = machine.phase.course() else { return true };
    let (committed, end) = (course.ledger.committed(), course.leases.end());
    let held = (0..course.ledger.all_owed().count() as u32).map(|rank| course.leases.end_of(Rank(rank)));
    machine.cache.turns().undecided(committed, end).is_none() && held.max().is_none_or(|held| held <= end)
}

/// A generation of the cache serves from its first step on, under its number alone, and older ones do not come back.
pub fn generations_of_the_cache_follow_each_other(machine: &Machine) -> bool {
    let decided: Vec<_> = machine.cache.turns().decided().collect();
    let follows = |(before, after): (&&Decided, &&Decided)| match after.begins() {
        true => after.generation.number > before.generation.number,
        false => after.generation == before.generation,
    };
    decided.iter().zip(decided.iter().skip(1)).all(follows)
}

/// Steps in flight lie between the commits and the rank that is furthest ahead.
pub fn only_uncommitted_steps_are_in_flight(machine: &Machine) -> bool {
    let Some(course) = machine.phase.course() else { return true };
    let committed = course.ledger.committed();
    let furthest = course.ledger.all_owed().max().unwrap_or(committed);
    furthest.0 - committed.0 == course.ledger.in_flight() as u64
}

/// What status shows is what the ledger holds.
pub fn progress_is_what_the_ledger_says(machine: &Machine) -> bool {
    machine.phase.course().is_none_or(|course| machine.progress.committed == course.ledger.committed())
}

/// No more faults are survived than may be.
pub fn budgets_are_kept(machine: &Machine) -> bool {
    let over = matches!(machine.phase, Phase::Over(_));
    machine.spent.restarts <= machine.config.budgets.restarts
        && (over || machine.spent.barren < limits::MAX_BARREN_GENERATIONS)
}

/// Silence of any worker that is not gone will be noticed.
pub fn every_living_worker_is_watched(machine: &Machine) -> bool {
    machine
        .next_possible_loss()
        .is_none_or(|first| machine.watched_from().is_some_and(|watched| watched <= first))
}

/// People are told why the run is where it is.
pub fn the_reason_fits_the_phase(machine: &Machine) -> bool {
    match (&machine.phase, &machine.reason) {
        (Phase::Gathering(_), reason) => {
            matches!(reason, Reason::Incomplete { .. } | Reason::Regathering { .. })
        }
        (Phase::Over(over), Reason::Failed(_)) => matches!(over.end, End::Failed(_)),
        (Phase::Over(over), Reason::AllLeft { .. }) => matches!(over.end, End::Finished(_)),
        (Phase::Over(over), Reason::StopAsked(_)) => matches!(over.end, End::Stopped(..)),
        (Phase::Over(_), _) => false,
        (Phase::Running(_), reason) => !matches!(
            reason,
            Reason::Incomplete { .. }
                | Reason::Regathering { .. }
                | Reason::Failed(_)
                | Reason::AllLeft { .. }
        ),
    }
}
