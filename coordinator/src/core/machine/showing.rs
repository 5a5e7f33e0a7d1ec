//! What `status` shows.

use std::collections::BTreeMap;

use coxswain_proto::limits;

use super::run::Run;
use crate::core::{
    failure::End,
    motion::MemberMotion,
    phase::Phase,
    roster::Worker,
    status::{HardwareFaults, LeavingNode, Occupant, RankStatus, Status, WorkerStatus, Workers},
};

/// A run at this moment.
pub(super) fn status(run: &Run) -> Status {
    let Run { progress, fleet, faults, voice, .. } = run;
    let (plan, committed) = (progress.plan, progress.committed);
    let left = plan.map(|plan| plan.total_steps().saturating_sub(committed.0));
    Status {
        phase: run.phase_for(&voice.reason),
        reason: voice.reason.clone(),
        generation: run.generation_now(),
        workers: Workers {
            wanted: run.config.world.size(),
            present: fleet.roster.present(),
            spare: fleet.roster.living().filter(|worker| worker.without.spare).count() as u32,
        },
        committed,
        plan,
        last: progress.last.clone(),
        held_out: progress.held_out.clone(),
        skipped: progress.skipped.len() as u64,
        eta: left.and_then(|steps| progress.pace.time_for(steps)),
        ranks: ranks(run),
        checkpoints: progress.checkpoints.newest(limits::MAX_LISTED_CHECKPOINTS),
        failure: match &run.phase {
            Phase::Over(over) => match &over.end {
                End::Failed(failure) => Some(failure.clone()),
                End::Finished(_) | End::Stopped(..) => faults.survived.clone(),
            },
            Phase::Gathering(_) | Phase::Running(_) => faults.newest(),
        },
        spent: faults.spent.clone(),
        max_restarts: run.config.budgets.restarts,
        cache: progress.cache_status(),
        leaving: leaving(run),
        hardware: hardware(run),
        order: progress.order(),
    }
}

/// A row for each slot that a worker has, had, or is on its way to, in slot order; in a world of more than
/// can be listed, of those that something is the matter with first.
fn ranks(run: &Run) -> Vec<RankStatus> {
    let most = limits::MAX_LISTED_RANKS;
    let starts: Vec<_> = run.fleet.on_their_way(run.now).take(most).collect();
    let mut ranks: BTreeMap<_, _> = starts.iter().map(|start| (start.slot, starting(run, start))).collect();
    let there = |worker: &&Worker| !run.fleet.starts.at(worker.slot()) || worker.gone.is_none();
    let is_told = |worker: &&Worker| {
        worker.gone.is_some() || worker.named_for > 0 || run.progress.slow(worker.id).is_some()
    };
    let workers = || run.fleet.roster.workers().filter(there);
    let told_first =
        if run.fleet.roster.size() as usize > most { Some(workers().filter(is_told)) } else { None };
    for worker in told_first.into_iter().flatten().chain(workers()) {
        if ranks.len() >= most {
            break;
        }
        ranks.entry(worker.slot()).or_insert_with(|| present(run, worker));
    }
    ranks.into_values().collect()
}

fn starting(run: &Run, start: &MemberMotion) -> RankStatus {
    let world = run.config.world;
    let node_rank = world.node_of(start.slot);
    RankStatus {
        slot: start.slot,
        host: run.fleet.nodes.host(node_rank).to_owned(),
        node_rank,
        local_rank: start.slot.0 % world.nproc_per_node,
        silent: start.pulse.still,
        occupant: Occupant::Starting,
    }
}

fn present(run: &Run, worker: &Worker) -> RankStatus {
    RankStatus {
        slot: worker.slot(),
        host: worker.claim.host.clone(),
        node_rank: worker.claim.node_rank,
        local_rank: worker.claim.local_rank,
        silent: run.now.since(worker.last_seen),
        occupant: Occupant::Worker(WorkerStatus {
            worker: worker.id,
            gone: worker.gone.is_some(),
            pid: worker.claim.pid,
            device: worker.claim.device.clone(),
            phase: worker.doing.phase,
            step: worker.doing.step,
            lease_first: run.progress.committed,
            lease_end: run.progress.lease_end(worker.id),
            times: worker.times,
            metrics: worker.metrics.clone(),
            memory_peak: run.memory.ledger.peak(worker.slot()),
            slow: run.progress.slow(worker.id),
            spare: worker.without.spare,
        }),
    }
}

fn hardware(run: &Run) -> Vec<HardwareFaults> {
    let faulty = run.health.faulty().map(|(slot, health)| {
        let host = run.fleet.nodes.host(run.config.world.node_of(slot)).to_owned();
        HardwareFaults { slot, host, health: health.clone() }
    });
    faulty.collect()
}

fn leaving(run: &Run) -> Vec<LeavingNode> {
    let leaving = run.orders.draining.iter().filter_map(|place| {
        let node = run.fleet.nodes.at(*place)?;
        let slots = run.config.world.slots_of(*place);
        let workers = slots.filter(|slot| run.fleet.roster.living_at(*slot).is_some()).count() as u32;
        let (node_id, host) = (node.node_id.clone(), node.host.clone());
        Some(LeavingNode { place: *place, node_id, host, workers })
    });
    leaving.collect()
}
