//! What the loss of a worker means for the run, and what it is paid with: values, which `transitions` carries
//! out.

use coxswain_proto::ids::Slot;

use super::run::Run;
use crate::{
    core::{failure::Failure, roster::Worker},
    options::CauseKind,
};

/// What follows from the loss of a worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Loss {
    /// Nothing: the run is over, or its results are safe.
    Farewell,
    /// The end of the run, if it was to write a part of the last checkpoint; else nothing.
    Closing,
    /// The end of the run: the same would happen to any worker.
    Fatal,
    /// Nothing: it was to go, and was in no generation any more.
    ExpectedOutside,
    /// The end of its generation, at no cost: it was to go, and no successor is asked for.
    Expected,
    /// It is not waited for, and the next process on its machine would fail alike.
    Dispensable,
    /// The end of its generation. Its slot is not used any more, so nothing is started again: no restart.
    Cordoned,
    /// The end of the run: its slot is not used any more, and there is none instead.
    Irreplaceable,
    /// The generation goes on without it, and its slot is called back, at the cost of a restart.
    Outside,
    /// The end of its generation, at the cost of a restart; its slot is called back.
    Breaks,
}

/// What the loss of a worker was paid with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Payment {
    /// A restart: its slot is called back.
    Restart,
    /// A spare: no restart is left, and its slot stays empty.
    Spare,
}

/// Pays for the loss of a slot's worker. If that is more than the run may spend, its failure, unless a spare
/// is there: a slot that is not called back costs nothing.
pub(super) fn pay_for(run: &mut Run, slot: Slot, failure: &Failure) -> Result<Payment, Box<Failure>> {
    if run.faults.pay(&mut run.out) {
        return Ok(Payment::Restart);
    }
    if stands_in(run, slot) {
        return Ok(Payment::Spare);
    }
    let budget = run.config.budgets.restarts;
    let message =
        format!("{}; restarts of this launch are used up (--max-restarts={budget})", failure.message);
    Err(Box::new(Failure { message, ..failure.clone() }))
}

/// The failure of a run that needs a slot whose hardware is not sound.
pub(super) fn irreplaceable(run: &Run, slot: Slot, failure: Failure) -> Failure {
    let (faults, enough) =
        (run.health.of_slot(slot).map_or(0, |health| health.faults), run.config.world.least());
    let message = format!(
        "{}; its slot is cordoned (hardware faults: {faults}, see faults.cordon_after), but too few workers \
         remain without it (needed: {enough}): launch again without that machine or device",
        failure.message
    );
    Failure { message, ..failure }
}

/// Whether a worker that waits can have the place of the one that is lost at a slot, or has lost nothing by
/// it: the run goes on though its slot cannot be called back any more.
fn stands_in(run: &Run, slot: Slot) -> bool {
    let world = run.config.world;
    let wanted = run.phase.running().map_or(world.least(), |running| running.assignment.world());
    let sound = |worker: &&Worker| {
        let (slot_of, has_part) = (worker.slot(), worker.generation == run.generation);
        let usable = slot_of != slot && !run.drained(slot_of) && !run.health.is_cordoned(slot_of);
        usable && (has_part || worker.assignable())
    };
    world.spares > 0 && run.fleet.roster.living().filter(sound).count() >= wanted as usize
}

/// What the loss of the worker at a slot means.
pub(super) fn judge(run: &Run, slot: Slot, kind: CauseKind) -> Loss {
    let outside = run.phase.running().is_some() && !run.is_member(slot);
    match () {
        () if run.phase.is_over() || run.progress.result_is_safe() => Loss::Farewell,
        () if run.faults.closing().is_some() => Loss::Closing,
        () if is_final(run, kind, run.is_member(slot)) => Loss::Fatal,
        () if run.drained(slot) && outside => Loss::ExpectedOutside,
        () if run.drained(slot) => Loss::Expected,
        () if run.health.is_cordoned(slot) && outside => Loss::Dispensable,
        () if run.health.is_cordoned(slot) && !has_enough_slots(run) => Loss::Irreplaceable,
        () if run.health.is_cordoned(slot) => Loss::Cordoned,
        () if kind.is_final() && is_dispensable(run, slot) => Loss::Dispensable,
        () if outside => Loss::Outside,
        () => Loss::Breaks,
    }
}

/// Whether the same would happen to any worker. Once steps have been committed the run file, the model and
/// the data are known to be good: what a process cannot use is then a matter of its machine, unless it is a
/// member of the generation that runs. Members that refuse each other all do, and none of them is the one to
/// replace.
pub(super) fn is_final(run: &Run, kind: CauseKind, is_member: bool) -> bool {
    let local = kind == CauseKind::BadInput && run.progress.proven && !is_member;
    kind.is_final() && !local
}

/// Whether an elastic world has enough workers without a slot that has no part in what trains now.
fn is_dispensable(run: &Run, slot: Slot) -> bool {
    let world = run.config.world;
    let stays = |worker: &&Worker| worker.slot() != slot && !run.drained(worker.slot());
    let others = run.fleet.roster.living().filter(stays).count();
    world.elastic() && !run.is_member(slot) && others >= world.least() as usize
}

/// Whether there are slots enough without those that are not used any more.
fn has_enough_slots(run: &Run) -> bool {
    let slots = (0..run.fleet.roster.size()).map(Slot);
    slots.filter(|slot| !run.health.is_cordoned(*slot)).count() >= run.config.world.least() as usize
}

/// Whether others that are there make a world without the worker at a slot that is not used any more.
pub(super) fn can_spare(run: &Run, slot: Slot) -> bool {
    let sound = |worker: &&Worker| {
        worker.slot() != slot && !run.drained(worker.slot()) && !run.health.is_cordoned(worker.slot())
    };
    run.fleet.roster.living().filter(sound).count() >= run.config.world.least() as usize
}

/// Members of the old generation that have not left it: whether each stands still, and is not waiting for a
/// disk.
pub(super) fn stragglers(run: &Run) -> Vec<(Slot, bool)> {
    let patience = run.config.patience.standstill;
    let stuck = |worker: &Worker| worker.pulse.still > patience && !worker.may_wait_for_disk();
    let late = run.fleet.roster.living().filter(|worker| worker.is_leaving());
    late.map(|worker| (worker.slot(), stuck(worker))).collect()
}
