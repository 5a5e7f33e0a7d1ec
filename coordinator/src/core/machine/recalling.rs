//! After a restart of the coordinator: everyone it knew is expected to open their lines again, and training
//! has gone on meanwhile.
//!
//! ```text
//! newest generation   phase
//! over, or none       Gathering: survivors say again that they are ready
//! formed              Connecting: ranks say again where they start
//! started             Training: ranks report again what is not committed, and hold leases of a whole window
//!                     from there
//! ```

use coxswain_proto::{ids::Generation, plan::Plan};

use super::run::Run;
use crate::core::{
    action::{Assignment, Member},
    fleet,
    past::{Past, PastGeneration},
    phase::{ConnectingStage, GatheringPhase, LastCall, OverPhase, Phase, RunningPhase, Stage},
    reason::Reason,
    roster::Exit,
};

/// Takes over nodes, slots and the phase of an earlier life.
pub(super) fn recall(run: &mut Run, past: &Past) {
    let (now, patience) = (run.now, run.config.patience);
    run.fleet.recall(now, past, run.config.in_place_of.as_deref());
    match (&past.end, run.progress.plan) {
        (Some(end), _) => {
            run.voice.reason = Reason::of_end(end);
            let deadline = now.after(patience.farewell);
            run.phase = Phase::Over(OverPhase { end: end.clone(), deadline, expired: false });
        }
        (None, Some(plan)) if !run.fleet.roster.all_gone() => recall_phase(run, past, plan),
        (None, _) => {}
    }
    if run.progress.waits_for_drift() == Some(run.progress.committed) {
        run.progress.cache.wait_longer(now.after(patience.reunion));
    }
}

fn recall_phase(run: &mut Run, past: &Past, plan: Plan) {
    let Some((generation, newest)) = past.newest() else { return };
    if let Some((started, of)) = past.started() {
        run.progress.recall(plan, started, of);
    }
    let trains = newest.started.is_some();
    let members = members(run, newest).filter(|_| !newest.over);
    if members.is_none() || !trains {
        run.progress.interrupt();
    }
    let Some(members) = members else { return recall_gathering(run, generation) };
    let checkpoint = run.progress.checkpoints.newest_complete();
    let world = run.config.world;
    let assignment = Assignment::new(generation, checkpoint, members, &run.progress.quarantine, world);
    let assignment = Assignment { closing: run.faults.closing().is_some(), ..assignment };
    // Members that were to leave still are.
    let leaving = assignment.members.iter().any(|member| run.drained(member.slot));
    run.voice.reason = match &run.orders.stop {
        _ if !trains => run.formed(&assignment),
        _ if run.progress.done() => Reason::StepsDone,
        Some(reason) => Reason::StopAsked(reason.clone()),
        None if run.orders.pause => Reason::Pausing,
        None => Reason::Recalled { generation, committed: run.progress.committed },
    };
    let stage = match trains {
        true => Stage::Training,
        false => Stage::Connecting(ConnectingStage::recalled()),
    };
    let running = RunningPhase::new(assignment.into());
    let left =
        |member: &&Member| run.fleet.roster.at(member.slot).is_some_and(|it| it.gone == Some(Exit::Left(0)));
    let left: Vec<_> = running.assignment.members.iter().filter(left).map(|member| member.slot).collect();
    run.phase =
        Phase::Running(Box::new(RunningPhase { regroup: leaving, hand_over: leaving, stage, ..running }));
    if run.at_the_end() {
        left.into_iter().for_each(|slot| run.trust_good_bye(slot));
    }
}

fn recall_gathering(run: &mut Run, generation: Generation) {
    let (now, patience) = (run.now, run.config.patience);
    run.phase = Phase::Gathering(Box::new(GatheringPhase {
        settle_by: Some(now.after(patience.reunion + patience.standstill)),
        respawn_by: Some(now.after(patience.reunion.max(patience.respawn))),
        last_call: LastCall::Over,
        ..GatheringPhase::new(now.after(patience.rendezvous))
    }));
    let because = "the coordinator was restarted while its workers were getting ready".to_owned();
    run.voice.reason = Reason::Regathering { generation, because };
    run.faults.recall(now, generation);
}

/// The members of a generation as they were told; nothing if one of them has lost its slot since.
fn members(run: &Run, past: &PastGeneration) -> Option<Vec<Member>> {
    let members = past
        .members
        .iter()
        .map(|(slot, id)| run.fleet.roster.at(*slot).filter(|worker| worker.id == *id).map(fleet::member));
    members.collect()
}
