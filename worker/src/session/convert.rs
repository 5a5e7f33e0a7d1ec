//! Wire to domain and back. The only file of the session that knows the fields of wire types.

use std::time::Duration;

use coxswain_proto::{
    cache_plan::{CacheGeneration, CacheReport},
    ids::{Bytes, Generation, Rank, Step},
    limits,
    order::DamagedRow,
    v1::{self, directive::Kind},
};

use super::{
    SessionOptions,
    channel::Position,
    standing::{Lease, Notice},
};
use coxswain_nn::pulse::Longest;

use crate::{
    clock,
    link::{Assignment, BadSample, CacheNamespace, CachePhase, CheckpointNews, Phase, Start},
    trainer::{FailureKind, TrainerFailure},
};

pub(super) fn assignment(wire: v1::Assignment) -> Result<Assignment, String> {
    let (rank, world) = (wire.rank, wire.world_size);
    if rank >= world {
        return Err(format!("assignment.rank: {rank} is not below the world size, {world}"));
    }
    let next = (rank + 1) % world;
    let address = wire.peers.into_iter().find(|peer| peer.rank == next).map(|peer| peer.data_address);
    let next = match address {
        Some(address) => address,
        None if world == 1 => String::new(),
        None => {
            return Err(format!("assignment.peers: rank {next}, which is next to rank {rank}, is missing"));
        }
    };
    // A coordinator that names none means the next rank.
    let replica_distance = wire.replica_distance.max(1);
    if replica_distance >= world.max(2) {
        return Err(format!(
            "assignment.replica_distance: {replica_distance} is too large for {world} ranks"
        ));
    }
    Ok(Assignment {
        generation: Generation(wire.generation),
        rank: Rank(rank),
        world,
        next,
        quarantined: wire.quarantined.into_iter().map(damaged_row).collect(),
        checkpoint_step: Step(wire.checkpoint_step),
        closing: wire.closing,
        replica_distance,
    })
}

fn damaged_row(wire: v1::DamagedRow) -> DamagedRow {
    DamagedRow { row: wire.row, begin: wire.begin, end: wire.end }
}

/// One directive.
pub(super) fn told(directive: v1::Directive) -> Result<Notice, String> {
    Ok(match directive.kind {
        Some(Kind::Assignment(wire)) => Notice::Assign(assignment(wire)?),
        Some(Kind::Lease(wire)) => Notice::Grant(lease(wire)?),
        Some(Kind::Pause(_)) => Notice::Pause,
        Some(Kind::Resume(_)) => Notice::Resume,
        Some(Kind::Checkpoint(now)) => Notice::Checkpoints(now.request),
        Some(Kind::MemoryReport(now)) => Notice::MemoryReports { count: now.request, reset: now.reset },
        Some(Kind::Stop(_)) => Notice::Stop,
        Some(Kind::Abort(abort)) if abort.over => Notice::Over(abort.reason),
        Some(Kind::Abort(abort)) => Notice::Abort(Generation(abort.generation), abort.reason),
        Some(Kind::Regroup(regroup)) => {
            Notice::Regroup { generation: Generation(regroup.generation), checkpoint: regroup.checkpoint }
        }
        Some(Kind::Dismiss(dismiss)) => Notice::Dismiss(dismiss.reason),
        None => return Err("directive.kind: missing, or unknown to this version".into()),
    })
}

pub(super) fn lease(wire: v1::ShardLease) -> Result<Lease, String> {
    if wire.slice >= wire.slices {
        return Err(format!(
            "lease.slice: {} is not below the number of slices, {}",
            wire.slice, wire.slices
        ));
    }
    if wire.first_step >= wire.end_step {
        return Err(format!("lease: steps {}..{}", wire.first_step, wire.end_step));
    }
    Ok(Lease {
        generation: Generation(wire.generation),
        steps: wire.first_step..wire.end_step,
        slice: Rank(wire.slice),
        slices: wire.slices,
        cache_phase: cache_phase(wire.cache_phase.unwrap_or_default())?,
    })
}

fn cache_phase(wire: v1::CachePhase) -> Result<CachePhase, String> {
    let namespace = |field: &str, wire: v1::CacheGeneration| {
        if wire.number == 0 {
            return Err(format!("lease.cache_phase.{field}.number: is 0, but generations count from 1"));
        }
        let generation = CacheGeneration { number: wire.number, since: Step(wire.since_step) };
        Ok(CacheNamespace { generation, namespace: (!wire.namespace.is_empty()).then_some(wire.namespace) })
    };
    Ok(match wire.serving {
        Some(serving) => CachePhase::Cached(namespace("serving", serving)?),
        None => CachePhase::Live { kept: wire.kept.map(|kept| namespace("kept", kept)).transpose()? },
    })
}

/// What rank 0 knows of the feature cache.
pub(super) fn cache(report: CacheReport) -> v1::CacheReport {
    v1::CacheReport {
        generation: report.generation,
        namespace: report.namespace,
        stored: report.stored,
        total: report.total,
        bytes: report.bytes.0,
        fill_batch: report.fill_batch,
        damaged: report.damaged,
        drift: report.drift.map(|measured| v1::CacheDrift {
            at_step: measured.at.0,
            relative_l2: measured.drift.relative_l2,
            cosine: measured.drift.cosine,
            loss_fresh: measured.drift.loss_fresh,
            loss_cached: measured.drift.loss_cached,
            probes: measured.probes,
        }),
        stale_unavailable: report.lost,
    }
}

/// Longest times of phases that were left, as far as the coordinator has not been told.
pub(super) fn paces(told: &Longest, longest: &Longest) -> Vec<v1::PhasePace> {
    let phases = Phase::ALL.into_iter().zip(told.iter().zip(longest));
    let news = phases.filter(|(_, (told, longest))| longest > told);
    news.map(|(of, (_, longest))| v1::PhasePace {
        phase: v1::WorkerPhase::from(of).into(),
        longest_ms: whole_ms(longest.unwrap_or_default()),
    })
    .collect()
}

/// Whole milliseconds, rounded down.
pub(super) fn whole_ms(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

fn ranges(positions: &[std::ops::Range<u64>]) -> Vec<v1::SampleRange> {
    positions.iter().map(|range| v1::SampleRange { begin: range.start, end: range.end }).collect()
}

pub(super) fn start(start: &Start, worker_id: u64, generation: Generation) -> v1::ReportStartRequest {
    v1::ReportStartRequest {
        worker_id,
        generation: generation.0,
        first_step: start.first_step.0,
        source: v1::StateSource::from(start.source).into(),
    }
}

/// State of a checkpoint, and what there is to say besides.
pub(super) fn checkpoint(news: CheckpointNews) -> (v1::CheckpointState, Option<String>) {
    match news {
        CheckpointNews::Complete => (v1::CheckpointState::Complete, None),
        CheckpointNews::Failed(why) => (v1::CheckpointState::Failed, Some(why)),
    }
}

fn failure_kind(kind: FailureKind) -> v1::FailureKind {
    use v1::FailureKind as W;
    match kind {
        FailureKind::OutOfMemory => W::OutOfMemory,
        FailureKind::PeerLost => W::PeerLost,
        FailureKind::BadInput => W::BadInput,
        FailureKind::Numeric => W::Numeric,
        FailureKind::Io => W::Io,
        FailureKind::Hardware => W::Hardware,
        FailureKind::Internal => W::Internal,
    }
}

/// A failure with where the worker was when it happened.
pub(super) fn failure(failure: &TrainerFailure, at: Position, options: &SessionOptions) -> v1::Failure {
    let Bytes(memory_in_use) = failure.memory_in_use;
    v1::Failure {
        rank: Some(options.rank.0),
        host: options.host.clone(),
        generation: at.generation.0,
        phase: v1::WorkerPhase::from(failure.phase).into(),
        step: failure.step.0,
        collective: at.entered,
        samples: ranges(&failure.positions),
        memory_in_use,
        kind: failure_kind(failure.kind).into(),
        message: cut(failure.message.clone()),
        unix_ms: unix_ms(),
        victims: Vec::new(),
        fatal: false,
    }
}

/// A sample that failed on a worker that is well.
pub(super) fn bad_sample(bad: &BadSample, generation: Generation, options: &SessionOptions) -> v1::Failure {
    v1::Failure {
        rank: Some(options.rank.0),
        host: options.host.clone(),
        generation: generation.0,
        phase: v1::WorkerPhase::Data.into(),
        step: bad.step.0,
        samples: vec![v1::SampleRange { begin: bad.position, end: bad.position + 1 }],
        kind: v1::FailureKind::BadInput.into(),
        message: cut(bad.message.clone()),
        unix_ms: unix_ms(),
        ..Default::default()
    }
}

pub(super) fn wire_sample(bad: &BadSample) -> v1::BadSample {
    let DamagedRow { row, begin, end } = bad.row;
    let row = Some(v1::DamagedRow { row, begin, end });
    v1::BadSample { epoch: bad.epoch, position: bad.position, row }
}

/// At most as long as an error text may be.
fn cut(mut message: String) -> String {
    message.truncate(message.floor_char_boundary(limits::MAX_ERROR_TEXT));
    message
}

fn unix_ms() -> u64 {
    clock::since_epoch().as_millis() as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    fn peer(rank: u32) -> v1::Peer {
        v1::Peer { rank, data_address: format!("h:{rank}"), host: "h".into() }
    }

    #[test]
    fn a_rank_learns_where_its_next_neighbour_listens() {
        let wire = |rank, peers| v1::Assignment { rank, world_size: 3, peers, ..Default::default() };
        assert_eq!(assignment(wire(0, vec![peer(2), peer(1)])).expect("complete").next, "h:1");
        assert_eq!(assignment(wire(2, vec![peer(1), peer(0)])).expect("complete").next, "h:0");
        assert_eq!(
            assignment(wire(0, vec![peer(1)])).expect("complete").replica_distance,
            1,
            "none is named"
        );
        let alone = v1::Assignment { world_size: 1, ..Default::default() };
        assert_eq!(assignment(alone).expect("nobody is next").next, "");
    }

    #[test]
    fn what_cannot_be_is_refused_with_its_field() {
        let hole = v1::Assignment { world_size: 2, peers: vec![peer(0)], ..Default::default() };
        let error = assignment(hole.clone()).unwrap_err();
        assert_eq!(error, "assignment.peers: rank 1, which is next to rank 0, is missing");
        let outside = v1::Assignment { rank: 1, world_size: 1, ..Default::default() };
        assert_eq!(assignment(outside).unwrap_err(), "assignment.rank: 1 is not below the world size, 1");
        let far = v1::Assignment { world_size: 2, peers: vec![peer(1)], replica_distance: 2, ..hole };
        assert_eq!(assignment(far).unwrap_err(), "assignment.replica_distance: 2 is too large for 2 ranks");
        let lost = v1::ShardLease { slice: 2, slices: 2, end_step: 1, ..Default::default() };
        assert!(lease(lost).unwrap_err().starts_with("lease.slice"));
    }
}
