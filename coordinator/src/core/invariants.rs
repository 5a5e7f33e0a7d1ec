//! What must hold after every event, as named functions: called by debug assertions, property tests and the simulator.

use super::{
    machine::Machine,
    phase::{End, Phase},
    reason::Reason,
};

type Named = (&'static str, fn(&Machine) -> bool);

/// The name of the first invariant that does not hold.
pub fn violated(machine: &Machine) -> Option<&'static str> {
    let all: [Named; 8] = [
        ("a running generation has every rank", a_running_generation_has_every_rank),
        ("each worker stands at its rank", each_worker_stands_at_its_rank),
        ("no step is committed that was not leased", no_step_is_committed_that_was_not_leased),
        ("no rank runs ahead of its lease", no_rank_runs_ahead_of_its_lease),
        ("only uncommitted steps are in flight", only_uncommitted_steps_are_in_flight),
        ("progress is what the ledger says", progress_is_what_the_ledger_says),
        ("every living worker is watched", every_living_worker_is_watched),
        ("the reason fits the phase", the_reason_fits_the_phase),
    ];
    all.into_iter().find(|(_, holds)| !holds(machine)).map(|(name, _)| name)
}

/// A generation starts when the world is complete, and its assignment names every rank.
pub fn a_running_generation_has_every_rank(machine: &Machine) -> bool {
    match &machine.phase {
        Phase::Running(running) => {
            machine.roster.complete()
                && running.assignment.peers.len() == machine.config.world.size() as usize
        }
        _ => true,
    }
}

/// Two workers never hold one rank, and a worker is found under the rank it claimed.
pub fn each_worker_stands_at_its_rank(machine: &Machine) -> bool {
    machine
        .roster
        .workers()
        .all(|worker| machine.roster.at(worker.claim.rank).is_some_and(|found| found.id == worker.id))
}

/// Commits stay below the end of the leases.
pub fn no_step_is_committed_that_was_not_leased(machine: &Machine) -> bool {
    match &machine.phase {
        Phase::Running(running) => {
            running.ledger.committed() <= running.leases.end().max(running.assignment.first_step)
        }
        _ => true,
    }
}

/// No rank has reported a step that it had no lease for.
pub fn no_rank_runs_ahead_of_its_lease(machine: &Machine) -> bool {
    let Phase::Running(running) = &machine.phase else { return true };
    let limit = running.leases.end().max(running.assignment.first_step);
    machine.roster.workers().all(|worker| {
        running
            .ledger
            .owed(worker.claim.rank)
            .is_some_and(|owed| owed <= limit && owed >= running.ledger.committed())
    })
}

/// Steps in flight lie between the commits and the rank that is furthest ahead.
pub fn only_uncommitted_steps_are_in_flight(machine: &Machine) -> bool {
    let Phase::Running(running) = &machine.phase else { return true };
    let committed = running.ledger.committed();
    let furthest = machine
        .roster
        .workers()
        .filter_map(|worker| running.ledger.owed(worker.claim.rank))
        .max()
        .unwrap_or(committed);
    furthest.0 - committed.0 == running.ledger.in_flight() as u64
}

/// What status shows is what the ledger holds.
pub fn progress_is_what_the_ledger_says(machine: &Machine) -> bool {
    match &machine.phase {
        Phase::Running(running) => machine.progress.committed == running.ledger.committed(),
        _ => true,
    }
}

/// Silence of any worker that is not gone will be noticed.
pub fn every_living_worker_is_watched(machine: &Machine) -> bool {
    match machine.roster.next_loss(&machine.config.patience) {
        Some(first) => machine.watched_from().is_some_and(|watched| watched <= first),
        None => true,
    }
}

/// People are told why the run is where it is.
pub fn the_reason_fits_the_phase(machine: &Machine) -> bool {
    match (&machine.phase, &machine.reason) {
        (Phase::Gathering(_), reason) => matches!(reason, Reason::Incomplete { .. }),
        (Phase::Searching(_), reason) => matches!(reason, Reason::Searching),
        (Phase::Over(over), Reason::Failed(_)) => matches!(over.end, End::Failed(_)),
        (Phase::Over(over), Reason::AllLeft { .. }) => matches!(over.end, End::Finished(_)),
        (Phase::Over(over), Reason::StopAsked(_)) => matches!(over.end, End::Stopped(..)),
        (Phase::Over(_), _) => false,
        (Phase::Running(_), reason) => !matches!(
            reason,
            Reason::Incomplete { .. } | Reason::Searching | Reason::Failed(_) | Reason::AllLeft { .. }
        ),
    }
}
