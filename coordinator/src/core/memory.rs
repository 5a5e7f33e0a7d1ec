//! The memory ledger: peaks of every rank by phase, and each rank's prediction beside them.

use std::collections::BTreeMap;

use coxswain_proto::{
    ids::{Bytes, Slot},
    memory::Comparison,
};

use super::report::{PhaseMemory, WorkerPhase};

/// Peaks of every rank.
#[derive(Clone, Debug, Default)]
pub struct MemoryLedger {
    slots: BTreeMap<Slot, BTreeMap<WorkerPhase, PhaseMemory>>,
    comparisons: BTreeMap<Slot, Comparison>,
}

/// What a rank says of its memory.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct MemoryReport {
    /// Peaks by phase.
    pub peaks: Vec<PhaseMemory>,
    /// Predicted beside measured, where there is something to compare.
    pub comparison: Option<Comparison>,
}

/// Peaks of one rank, in phase order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RankMemory {
    /// Whose.
    pub slot: Slot,
    /// On which machine.
    pub host: String,
    /// By phase.
    pub phases: Vec<PhaseMemory>,
    /// Predicted beside measured.
    pub comparison: Option<Comparison>,
}

impl RankMemory {
    /// The largest peak in use of any phase, and which phase that was.
    pub fn peak(&self) -> Option<&PhaseMemory> {
        self.phases.iter().max_by_key(|peak| peak.in_use)
    }
}

impl MemoryLedger {
    /// Takes a report: the last one of a (rank, phase) counts, and the last comparison.
    pub fn record_report(&mut self, slot: Slot, report: MemoryReport) {
        if let Some(comparison) = report.comparison {
            self.comparisons.insert(slot, comparison);
        }
        let phases = self.slots.entry(slot).or_default();
        phases.extend(report.peaks.into_iter().map(|peak| (peak.phase, peak)));
    }

    /// The largest peak in use of a rank.
    pub fn peak(&self, slot: Slot) -> Bytes {
        let phases = self.slots.get(&slot).into_iter().flat_map(BTreeMap::values);
        phases.map(|peak| peak.in_use).max().unwrap_or_default()
    }

    /// What a rank has reported, in phase order, but for phases it has not been in since peaks began anew.
    pub fn phases(&self, slot: Slot) -> Vec<PhaseMemory> {
        let phases = self.slots.get(&slot).into_iter().flat_map(BTreeMap::values);
        phases.filter(|peak| peak.in_use.max(peak.driver) > Bytes(0)).copied().collect()
    }

    /// What a rank has laid beside its prediction.
    pub fn comparison(&self, slot: Slot) -> Option<Comparison> {
        self.comparisons.get(&slot).cloned()
    }

    /// True when no rank has reported.
    pub fn is_empty(&self) -> bool {
        self.slots.is_empty()
    }
}
