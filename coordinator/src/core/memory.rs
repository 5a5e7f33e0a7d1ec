//! The memory ledger: peaks of every rank by phase.

use std::collections::BTreeMap;

use coxswain_proto::ids::{Bytes, Seat};

use super::report::{PhasePeak, WorkerPhase};

/// Peaks of every rank.
#[derive(Clone, Debug, Default)]
pub struct MemoryLedger {
    seats: BTreeMap<Seat, BTreeMap<WorkerPhase, PhasePeak>>,
}

/// Peaks of one rank, in phase order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RankMemory {
    /// Whose.
    pub seat: Seat,
    /// On which machine.
    pub host: String,
    /// By phase.
    pub phases: Vec<PhasePeak>,
}

impl RankMemory {
    /// The largest peak in use of any phase, and which phase that was.
    pub fn peak(&self) -> Option<&PhasePeak> {
        self.phases.iter().max_by_key(|peak| peak.in_use)
    }
}

impl MemoryLedger {
    /// Takes a report: the last one of a (rank, phase) counts.
    pub fn take(&mut self, seat: Seat, peaks: &[PhasePeak]) {
        let phases = self.seats.entry(seat).or_default();
        for peak in peaks {
            phases.insert(peak.phase, *peak);
        }
    }

    /// The largest peak in use of a rank.
    pub fn peak(&self, seat: Seat) -> Bytes {
        let phases = self.seats.get(&seat).into_iter().flat_map(BTreeMap::values);
        phases.map(|peak| peak.in_use).max().unwrap_or_default()
    }

    /// What a rank has reported, in phase order.
    pub fn phases(&self, seat: Seat) -> Vec<PhasePeak> {
        self.seats.get(&seat).map(|phases| phases.values().copied().collect()).unwrap_or_default()
    }

    /// True when nobody has reported.
    pub fn is_empty(&self) -> bool {
        self.seats.is_empty()
    }
}
