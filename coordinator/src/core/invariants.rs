//! What must hold after every event, as named functions: called by debug assertions, property tests and the
//! simulator.

use coxswain_proto::{cache_plan::CacheDecision, ids::Rank, limits};

use super::{
    machine::run::Run,
    phase::{End, Phase, Stage},
    reason::Reason,
    roster::{Exit, Worker},
};

type NamedInvariant = (&'static str, fn(&Run) -> bool);

/// The name of the first invariant that does not hold.
pub fn violated(machine: &impl AsRef<Run>) -> Option<&'static str> {
    let all: [NamedInvariant; 19] = [
        ("no generation has a lost member", no_generation_has_a_lost_member),
        ("a fixed world is complete or waits", a_fixed_world_is_complete_or_waits),
        ("spares have no rank", spares_have_no_rank),
        ("no spare waits while a rank is missing", no_spare_waits_while_a_rank_is_missing),
        ("a run that closes trains no step", a_run_that_closes_trains_no_step),
        ("each worker stands at its slot", each_worker_stands_at_its_slot),
        ("workers are counted as they are", workers_are_counted_as_they_are),
        ("one generation lives", one_generation_lives),
        ("no step is committed that was not leased", no_step_is_committed_that_was_not_leased),
        ("only a generation that trains is granted steps", only_a_generation_that_trains_is_granted_steps),
        ("no rank runs ahead of its lease", no_rank_runs_ahead_of_its_lease),
        ("every leased step has its cache phase", every_leased_step_has_its_cache_phase),
        ("generations of the cache follow each other", generations_of_the_cache_follow_each_other),
        ("only uncommitted steps are in flight", only_uncommitted_steps_are_in_flight),
        ("progress is what the ledger says", progress_is_what_the_ledger_says),
        ("budgets are kept", budgets_are_kept),
        ("no process is asked for at a cordoned slot", no_process_is_asked_for_at_a_cordoned_slot),
        ("every living worker is watched", every_living_worker_is_watched),
        ("the reason fits the phase", the_reason_fits_the_phase),
    ];
    all.into_iter().find(|(_, holds)| !holds(machine.as_ref())).map(|(name, _)| name)
}

/// Each member of a generation that runs is the worker at its slot, and is not lost, unless the results are
/// on disk.
fn no_generation_has_a_lost_member(run: &Run) -> bool {
    let Phase::Running(running) = &run.phase else { return true };
    if run.progress.result_is_safe() {
        return true;
    }
    running.assignment.members.iter().all(|member| {
        let found = run.fleet.roster.at(member.slot);
        found.is_some_and(|worker| worker.id == member.worker && worker.gone != Some(Exit::Lost))
    })
}

/// A fixed world trains with every slot but its spares; an elastic one with the fewest at least. The last
/// generation of a run that fails, which does not train, may be smaller.
fn a_fixed_world_is_complete_or_waits(run: &Run) -> bool {
    let Phase::Running(running) = &run.phase else { return true };
    let least = if running.assignment.closing { 1 } else { run.config.world.least() };
    (least..=run.config.world.most()).contains(&running.assignment.world())
}

/// A worker that waits for a place has none in the generation that runs.
fn spares_have_no_rank(run: &Run) -> bool {
    let Some(running) = run.phase.running() else { return true };
    run.fleet.roster.living().all(|worker| !(worker.without.spare && running.rank_of(worker.id).is_some()))
}

/// Where all that hold a part of the state are ready, and spares make up for the rest, the next generation
/// has been formed.
fn no_spare_waits_while_a_rank_is_missing(run: &Run) -> bool {
    let Phase::Gathering(gathering) = &run.phase else { return true };
    let settled = !gathering.is_first() && run.faults.closing().is_none();
    let roster = &run.fleet.roster;
    let ready = roster.living().filter(|worker| worker.assignable() && !run.drained(worker.slot())).count();
    let leaving = roster.living().any(Worker::is_leaving);
    run.config.world.spares == 0 || !settled || leaving || ready < run.config.world.most() as usize
}

/// Once it is decided that the run has failed, its last generation is told so, and is granted no steps.
fn a_run_that_closes_trains_no_step(run: &Run) -> bool {
    let closing = run.faults.closing().is_some();
    let told = run.phase.running().is_none_or(|running| running.assignment.closing == closing);
    let idle = run.progress.training().is_none() && !run.phase.is_over();
    told && (idle || !closing)
}

/// Two workers never hold one slot, and a worker is found at the slot it claimed.
fn each_worker_stands_at_its_slot(run: &Run) -> bool {
    let stands =
        |worker: &Worker| run.fleet.roster.at(worker.slot()).is_some_and(|found| found.id == worker.id);
    run.fleet.roster.workers().all(stands)
}

/// Nobody asks all workers how many of a kind there are.
fn workers_are_counted_as_they_are(run: &Run) -> bool {
    run.fleet.roster.counts_right()
}

/// Only members of the newest generation were told of it, and no worker was told of a later one.
fn one_generation_lives(run: &Run) -> bool {
    run.fleet.roster.living().all(|worker| match &run.phase {
        Phase::Running(running) if running.rank_of(worker.id).is_some() => {
            worker.generation == running.assignment.generation && !worker.ready
        }
        Phase::Running(running) => worker.generation < running.assignment.generation,
        Phase::Gathering(_) | Phase::Over(_) => worker.generation <= run.generation,
    })
}

/// Commits stay below the end of the leases.
fn no_step_is_committed_that_was_not_leased(run: &Run) -> bool {
    let Some(course) = run.progress.training() else { return true };
    course.ledger.committed() <= course.leases.end().max(course.first_step)
}

/// Steps are granted to the generation that trains, and to no other.
fn only_a_generation_that_trains_is_granted_steps(run: &Run) -> bool {
    let trains = matches!(&run.phase, Phase::Running(running) if matches!(running.stage, Stage::Training));
    trains == run.progress.training().is_some()
}

/// No rank has reported a step that it had no lease for, or owes one that is committed.
fn no_rank_runs_ahead_of_its_lease(run: &Run) -> bool {
    let Some(course) = run.progress.course() else { return true };
    let committed = course.ledger.committed();
    let held = (0..).map(Rank).map(|rank| course.leases.end_of(rank).max(committed));
    course.ledger.all_owed().zip(held).all(|(owed, limit)| owed <= limit && owed >= committed)
}

/// No rank is leased a step before it is decided where its features come from, and all of them lie in one
/// window.
fn every_leased_step_has_its_cache_phase(run: &Run) -> bool {
    let Some(course) = run.progress.course() else { return true };
    let (committed, end) = (course.ledger.committed(), course.leases.end());
    let held = (0..course.ledger.all_owed().count() as u32).map(|rank| course.leases.end_of(Rank(rank)));
    run.progress.cache.book.cache_phases().undecided(committed, end).is_none()
        && held.max().is_none_or(|held| held <= end)
}

/// A generation of the cache serves from its first step on, under its number alone, and older ones do not
/// come back.
fn generations_of_the_cache_follow_each_other(run: &Run) -> bool {
    let decided: Vec<_> = run.progress.cache.book.cache_phases().decided().collect();
    let follows = |(before, after): (&&CacheDecision, &&CacheDecision)| match after.begins() {
        true => after.generation.number > before.generation.number,
        false => after.generation == before.generation,
    };
    decided.iter().zip(decided.iter().skip(1)).all(follows)
}

/// Steps in flight lie between the commits and the rank that is furthest ahead.
fn only_uncommitted_steps_are_in_flight(run: &Run) -> bool {
    let Some(course) = run.progress.course() else { return true };
    let committed = course.ledger.committed();
    let furthest = course.ledger.all_owed().max().unwrap_or(committed);
    furthest.0 - committed.0 == course.ledger.in_flight() as u64
}

/// What status shows is what the ledger holds.
fn progress_is_what_the_ledger_says(run: &Run) -> bool {
    run.progress.course().is_none_or(|course| run.progress.committed == course.ledger.committed())
}

/// No more faults are survived than may be.
fn budgets_are_kept(run: &Run) -> bool {
    let over = matches!(run.phase, Phase::Over(_)) || run.faults.closing().is_some();
    run.faults.spent.restarts <= run.config.budgets.restarts
        && (over || run.faults.spent.stalled < limits::MAX_STALLED_GENERATIONS)
}

/// Where hardware is not sound, nobody is waited for or called back.
fn no_process_is_asked_for_at_a_cordoned_slot(run: &Run) -> bool {
    let cordoned = run.health.faulty().filter(|(_, health)| health.cordoned);
    cordoned.into_iter().all(|(slot, _)| run.fleet.roster.respawn(slot).is_none())
}

/// Silence of any worker that is not gone will be noticed.
fn every_living_worker_is_watched(run: &Run) -> bool {
    let watched = run.fleet.watched_from();
    run.fleet.next_possible_loss().is_none_or(|first| watched.is_some_and(|watched| watched <= first))
}

/// People are told why the run is where it is.
fn the_reason_fits_the_phase(run: &Run) -> bool {
    match (&run.phase, &run.voice.reason) {
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
