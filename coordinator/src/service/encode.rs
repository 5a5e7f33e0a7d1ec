//! From the core to the wire: cannot fail.

use coxswain_proto::{
    ids::{Bytes, Rank, Slot},
    limits::MAX_RANK_METRICS,
    order::DamagedRow,
    v1,
};
use tonic::Status;

use super::{cache, shared::RunFacts};
use crate::{
    core::{
        action::{Assignment, Directive},
        checkpoints::CheckpointEntry,
        failure::Failure,
        memory::RankMemory,
        news::News,
        reason::RunPhase,
        refusal::Refusal,
        report::CommittedStep,
        roster::Respawn,
        slot_health::SlotHealth,
        status::{HardwareFaults, LeavingNode, Occupant, RankStatus, Status as RunStatus, WorkerStatus},
    },
    driver::{CallError, DatedNews, Notice},
    options::CauseKind,
};

impl From<CallError> for Status {
    fn from(denied: CallError) -> Self {
        let text = denied.to_string();
        match denied {
            CallError::Gone => Self::unavailable(text),
            CallError::Journal(_) => Self::internal(text),
            CallError::Refused(refusal) => match refusal {
                Refusal::Version { .. }
                | Refusal::OtherRun { .. }
                | Refusal::LocalWorld { .. }
                | Refusal::OtherDataSet { .. }
                | Refusal::Fenced { .. }
                | Refusal::Cordoned { .. }
                | Refusal::Stale { .. }
                | Refusal::NoCache
                | Refusal::ExactCache
                | Refusal::NotPlanned
                | Refusal::NoCachedStep { .. }
                | Refusal::Needed { .. }
                | Refusal::Over(_) => Self::failed_precondition(text),
                Refusal::NodeRankTaken { .. } | Refusal::RankTaken { .. } => Self::already_exists(text),
                Refusal::NodesComplete { .. } => Self::resource_exhausted(text),
                Refusal::PlaceKept { .. } => Self::unavailable(text),
                Refusal::NodeRankOutside { .. }
                | Refusal::RankOutside { .. }
                | Refusal::RankElsewhere { .. }
                | Refusal::Plan(_) => Self::invalid_argument(text),
                Refusal::UnknownWorker(_) | Refusal::UnknownNode(_) | Refusal::NoNodeThere(_) => {
                    Self::not_found(text)
                }
            },
        }
    }
}

fn damaged_row(row: &DamagedRow) -> v1::DamagedRow {
    v1::DamagedRow { row: row.row, begin: row.begin, end: row.end }
}

/// The members next to a rank on the ring; none in a world of one.
fn neighbours(assignment: &Assignment, Rank(rank): Rank) -> Vec<v1::Peer> {
    let world = assignment.world();
    let mut ranks = vec![(rank + 1) % world, (rank + world - 1) % world];
    ranks.dedup();
    ranks.retain(|other| *other != rank);
    let peer = |rank: u32| {
        let member = &assignment.members[rank as usize];
        v1::Peer { rank, data_address: member.data_address.clone(), host: member.host.clone() }
    };
    ranks.into_iter().map(peer).collect()
}

/// A directive.
pub fn directive(directive: Directive) -> v1::Directive {
    use v1::directive::Kind;
    let kind = match directive {
        Directive::Assignment(assignment, rank) => Kind::Assignment(v1::Assignment {
            generation: assignment.generation.0,
            rank: rank.0,
            world_size: assignment.world(),
            peers: neighbours(&assignment, rank),
            checkpoint_step: assignment.checkpoint.0,
            quarantined: assignment.left_out.iter().map(damaged_row).collect(),
            closing: assignment.closing,
            replica_distance: assignment.replicas.distance,
        }),
        Directive::Lease(lease) => Kind::Lease(v1::ShardLease {
            lease_id: lease.id.0,
            generation: lease.generation.0,
            first_step: lease.first.0,
            end_step: lease.end.0,
            slice: lease.slice.0,
            slices: lease.slices,
            cache_phase: Some(cache::cache_phase(lease.cache_phase)),
        }),
        Directive::Pause => Kind::Pause(v1::Pause {}),
        Directive::Resume => Kind::Resume(v1::Resume {}),
        Directive::Checkpoint(request) => Kind::Checkpoint(v1::CheckpointNow { request }),
        Directive::MemoryReport { request, reset } => {
            Kind::MemoryReport(v1::MemoryReportNow { request, reset })
        }
        Directive::Stop(reason) => Kind::Stop(v1::Stop { reason }),
        Directive::Abort { generation, reason, over } => {
            Kind::Abort(v1::Abort { generation: generation.0, reason, over })
        }
        Directive::Regroup { generation, checkpoint } => {
            Kind::Regroup(v1::Regroup { generation: generation.0, checkpoint })
        }
        Directive::Dismiss(reason) => Kind::Dismiss(v1::Dismiss { reason }),
    };
    v1::Directive { kind: Some(kind) }
}

/// What goes down the stream of a node that one launcher speaks for.
pub fn node_told(told: impl Iterator<Item = Notice>) -> v1::NodeTold {
    let mut batch = v1::NodeTold::default();
    for told in told {
        match told {
            Notice::Lines(lines, directive) => {
                batch.lines.push(v1::LineTold { lines, directive: directive.map(self::directive) });
            }
            Notice::Order(respawn) => batch.orders.push(node_directive(respawn)),
        }
    }
    batch
}

/// What a launcher is told.
pub fn node_directive(respawn: Respawn) -> v1::NodeDirective {
    let Respawn { slot, attempt, reason } = respawn;
    let respawn = v1::Respawn { rank: slot.0, attempt, reason };
    v1::NodeDirective { kind: Some(v1::node_directive::Kind::Respawn(respawn)) }
}

/// The phase of a run.
pub fn run_phase(phase: RunPhase) -> v1::RunPhase {
    match phase {
        RunPhase::WaitingForWorkers => v1::RunPhase::WaitingForWorkers,
        RunPhase::Starting => v1::RunPhase::Starting,
        RunPhase::Training => v1::RunPhase::Training,
        RunPhase::Paused => v1::RunPhase::Paused,
        RunPhase::Stopping => v1::RunPhase::Stopping,
        RunPhase::Finished => v1::RunPhase::Finished,
        RunPhase::Failed => v1::RunPhase::Failed,
    }
}

/// A run at one moment.
pub fn status(status: RunStatus, facts: &RunFacts) -> v1::GetStatusResponse {
    let last = status.last.as_deref();
    v1::GetStatusResponse {
        run_id: facts.run_id.clone(),
        run_name: facts.run_name.clone(),
        spec_digest: facts.document.digest.clone(),
        version: facts.version.clone(),
        phase: run_phase(status.phase).into(),
        reason: status.reason.to_string(),
        generation: status.generation.0,
        world_size: status.workers.wanted,
        committed_steps: status.committed.0,
        total_steps: status.plan.map_or(0, |plan| plan.total_steps()),
        epoch: status.epoch(),
        loss: last.map_or(0.0, |step| step.totals.loss()),
        samples_per_second: last.map_or(0.0, CommittedStep::samples_per_second),
        tokens_per_second: last.map_or(0.0, CommittedStep::tokens_per_second),
        eta_s: status.eta.map_or(0.0, |eta| eta.as_secs_f64()),
        ranks: status.ranks.into_iter().map(rank_status).collect(),
        checkpoints: status.checkpoints.iter().map(checkpoint).collect(),
        first_failure: status.failure.as_deref().map(|failure| self::failure(failure, 0)),
        output_dir: facts.output_dir.clone(),
        training_samples: status.plan.map_or(0, |plan| plan.samples()),
        global_batch: status.plan.map_or(0, |plan| plan.global_batch()),
        skipped_steps: status.skipped,
        held_out: status.held_out.iter().map(Into::into).collect(),
        restarts: status.spent.restarts,
        max_restarts: status.max_restarts,
        rescales: status.spent.rescales,
        cache: status.cache.map(cache::status),
        leaving: status.leaving.into_iter().map(|node| leaving(node, facts)).collect(),
        hardware: status.hardware.into_iter().map(hardware).collect(),
        metrics: last.map_or_else(Vec::new, |step| step.metrics.iter().map(Into::into).collect()),
        order: status.order.as_ref().filter(|order| !order.shares().is_empty()).map(Into::into),
    }
}

fn hardware(of: HardwareFaults) -> v1::HardwareFaults {
    let SlotHealth { faults, newest, cordoned, .. } = of.health;
    v1::HardwareFaults { rank: of.slot.0, host: of.host, faults, newest, cordoned }
}

fn leaving(node: LeavingNode, facts: &RunFacts) -> v1::LeavingNode {
    let hosts_coordinator = facts.hosted_by.as_deref() == Some(node.node_id.as_str());
    v1::LeavingNode { node_rank: node.place, host: node.host, workers: node.workers, hosts_coordinator }
}

/// The memory table.
pub fn memory(table: &[RankMemory]) -> v1::GetMemoryResponse {
    let ranks = table.iter().map(|row| v1::RankMemory {
        rank: row.slot.0,
        host: row.host.clone(),
        phases: row.phases.iter().map(Into::into).collect(),
        comparison: row.comparison.as_ref().map(Into::into),
    });
    v1::GetMemoryResponse { ranks: ranks.collect() }
}

/// News for watchers; some are for the log alone.
pub fn watch_event(dated: &DatedNews) -> Option<v1::WatchEvent> {
    use v1::watch_event::Kind;
    let note = |slot: Slot, text| Kind::Note(v1::Note { rank: slot.0, text });
    let kind = match &dated.news {
        News::Step(step) => Kind::Step(committed(step)),
        News::Phase(phase, reason) => {
            Kind::Phase(v1::PhaseChanged { phase: run_phase(*phase).into(), reason: reason.to_string() })
        }
        News::Member { generation, present, world, change } => Kind::Membership(v1::MembershipChanged {
            generation: generation.0,
            present: *present,
            world_size: *world,
            what: change.to_string(),
        }),
        News::Recovered(recovery) => Kind::Membership(v1::MembershipChanged {
            generation: recovery.generation.0,
            present: recovery.members,
            world_size: recovery.world,
            what: recovery.to_string(),
        }),
        News::RolledBack { from, to } => Kind::Phase(v1::PhaseChanged {
            phase: v1::RunPhase::Starting.into(),
            reason: crate::log::rolled_back(*from, *to),
        }),
        News::Checkpoint(entry) => Kind::Checkpoint(checkpoint(entry)),
        News::Failure(failure, _) | News::LostOutside(failure, _) => {
            Kind::Failure(self::failure(failure, dated.unix_ms))
        }
        News::Cache(news) => Kind::Cache(cache::changed(news)),
        News::Note(slot, text) | News::Standstill(slot, text) => note(*slot, text.clone()),
        News::Cordoned(slot, health) => note(*slot, crate::log::cordoned(health)),
        News::Slow(slot, slow) => note(*slot, crate::log::slow(slow.as_ref())),
        News::SetAside(slot, slow) => note(*slot, crate::log::set_aside(slow)),
        News::Sample(at, verdict, failure) => {
            note(failure.slot.unwrap_or_default(), crate::log::sample(at, *verdict, failure))
        }
        News::Consequence(_) | News::Memory(_) | News::Refused(_) => return None,
    };
    Some(v1::WatchEvent { unix_ms: dated.unix_ms, kind: Some(kind) })
}

fn rank_status(rank: RankStatus) -> v1::RankStatus {
    let RankStatus { slot, host, node_rank, local_rank, silent, occupant } = rank;
    let slot = v1::RankStatus {
        rank: slot.0,
        host,
        node_rank,
        local_rank,
        silent_ms: silent.as_millis() as u64,
        ..v1::RankStatus::default()
    };
    match occupant {
        Occupant::Starting => v1::RankStatus { phase: v1::WorkerPhase::Starting.into(), ..slot },
        Occupant::Worker(worker) => worker_status(worker, slot),
    }
}

fn worker_status(worker: WorkerStatus, slot: v1::RankStatus) -> v1::RankStatus {
    v1::RankStatus {
        worker_id: worker.worker.0,
        pid: worker.pid,
        device: worker.device,
        phase: v1::WorkerPhase::from(worker.phase).into(),
        step: worker.step.0,
        lease_first_step: worker.lease_first.0,
        lease_end_step: worker.lease_end.0,
        memory_peak: worker.memory_peak.0,
        times: Some((&worker.times).into()),
        metrics: worker.metrics.iter().take(MAX_RANK_METRICS).map(Into::into).collect(),
        gone: worker.gone,
        spare: worker.spare,
        slow: worker.slow.map(|slow| v1::Slowness { part: slow.part.to_string(), factor: slow.factor }),
        ..slot
    }
}

fn committed(step: &CommittedStep) -> v1::StepCommitted {
    v1::StepCommitted {
        step: step.step.0,
        total_steps: step.total_steps,
        epoch: step.consumed.epoch,
        loss: step.totals.loss(),
        grad_norm: step.totals.grad_norm,
        learning_rate: step.learning_rate().unwrap_or_default(),
        samples_per_second: step.samples_per_second(),
        tokens_per_second: step.tokens_per_second(),
        times: Some((&step.times).into()),
        metrics: step.metrics.iter().map(Into::into).collect(),
        memory_peak: step.memory_peak.bytes.0,
        memory_peak_rank: step.memory_peak.slot.0,
        cache_generation: step.cache_generation,
        cache: Some((&step.cache).into()),
        skipped: step.skipped.as_ref().map(Into::into),
    }
}

fn checkpoint(entry: &CheckpointEntry) -> v1::CheckpointRecord {
    v1::CheckpointRecord {
        step: entry.step.0,
        state: v1::CheckpointState::from(entry.state).into(),
        path: entry.path.clone(),
        bytes: entry.bytes.0,
    }
}

/// As it was recorded: the journal keeps no time of day.
impl From<&Failure> for v1::Failure {
    fn from(recorded: &Failure) -> Self {
        failure(recorded, 0)
    }
}

fn failure(failure: &Failure, unix_ms: u64) -> v1::Failure {
    let samples = failure.positions.iter().map(|p| v1::SampleRange { begin: p.start, end: p.end });
    let Bytes(memory_in_use) = failure.memory_in_use;
    v1::Failure {
        rank: failure.slot.map(|slot| slot.0),
        host: failure.host.clone(),
        generation: failure.generation.0,
        phase: v1::WorkerPhase::from(failure.phase).into(),
        step: failure.step.0,
        collective: failure.collective,
        samples: samples.collect(),
        memory_in_use,
        kind: v1::FailureKind::from(failure.kind).into(),
        message: failure.message.clone(),
        unix_ms,
        victims: failure.victims.iter().map(|slot| slot.0).collect(),
        fatal: failure.fatal,
    }
}

impl From<CauseKind> for v1::FailureKind {
    fn from(kind: CauseKind) -> Self {
        match kind {
            CauseKind::OutOfMemory | CauseKind::KilledForMemory => Self::OutOfMemory,
            CauseKind::PeerLost => Self::PeerLost,
            CauseKind::BadInput => Self::BadInput,
            CauseKind::Numeric => Self::Numeric,
            CauseKind::Io => Self::Io,
            CauseKind::Internal => Self::Internal,
            CauseKind::WorkerLost => Self::WorkerLost,
            CauseKind::Disagreement => Self::Disagreement,
            CauseKind::Rendezvous => Self::Rendezvous,
            CauseKind::NoProgress => Self::NoProgress,
            CauseKind::Hardware => Self::Hardware,
        }
    }
}
