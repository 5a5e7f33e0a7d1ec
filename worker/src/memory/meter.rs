//! Peaks by phase.

use std::collections::BTreeMap;

use coxswain_proto::ids::Bytes;

use super::{Resident, allocator};
use crate::link::{Phase, PhaseMemory};

/// This rank holds more than it may.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "out of memory in {phase:?}: {wanted} bytes in use, capacity {capacity}; lower train.micro_batch, use train.recompute: full, or raise memory.capacity"
)]
pub struct OutOfMemory {
    /// Where.
    pub phase: Phase,
    /// Most bytes in use.
    pub wanted: Bytes,
    /// `memory.capacity`.
    pub capacity: Bytes,
}

/// Keeps the peak of every phase of one worker. Lives on the trainer thread.
#[derive(Debug)]
pub struct Meter {
    phase: Phase,
    peaks: BTreeMap<Phase, PhaseMemory>,
    high_water: u64,
    step_peak: u64,
    capacity: Option<u64>,
}

impl Meter {
    /// Begins in `phase`. `capacity` bounds the bytes in use; none means that only the machine does.
    pub fn new(phase: Phase, capacity: Option<Bytes>) -> Self {
        allocator::restart_peak();
        Self {
            phase,
            peaks: BTreeMap::new(),
            high_water: Resident::now().high_water,
            step_peak: 0,
            capacity: capacity.map(|bytes| bytes.0),
        }
    }

    /// Ends the current phase and begins another. Fails if the one that ended went over capacity.
    pub fn enter(&mut self, next: Phase) -> Result<(), OutOfMemory> {
        if next == self.phase {
            return Ok(());
        }
        let ended = self.phase;
        let in_use = self.settle();
        self.phase = next;
        match self.capacity {
            Some(capacity) if in_use > capacity => {
                Err(OutOfMemory { phase: ended, wanted: Bytes(in_use), capacity: Bytes(capacity) })
            }
            _ => Ok(()),
        }
    }

    /// Books the peaks of the current phase so far, and starts it again. Returns its peak in use.
    fn settle(&mut self) -> u64 {
        let in_use = allocator::peak();
        let seen = Resident::now();
        let raised = seen.high_water > self.high_water;
        let driver = if raised { seen.high_water } else { seen.total };
        // Pages beyond the resident set at the end were anonymous: files stay mapped through a phase.
        let reserved = seen.anonymous + (driver - seen.total.min(driver));
        self.high_water = seen.high_water;
        let zero = Bytes(0);
        let peak = self.peaks.entry(self.phase).or_insert(PhaseMemory {
            phase: self.phase,
            in_use: zero,
            reserved: zero,
            driver: zero,
        });
        peak.in_use = peak.in_use.max(Bytes(in_use));
        peak.reserved = peak.reserved.max(Bytes(reserved));
        peak.driver = peak.driver.max(Bytes(driver));
        // Without the counting allocator the resident set is the best that is known.
        self.step_peak = self.step_peak.max(if in_use > 0 { in_use } else { driver });
        allocator::restart_peak();
        in_use
    }

    /// Peak bytes in use since the last call: once a step.
    pub fn take_step_peak(&mut self) -> Bytes {
        self.settle();
        Bytes(std::mem::take(&mut self.step_peak))
    }

    /// Peaks of every phase so far.
    pub fn report(&mut self) -> Vec<PhaseMemory> {
        self.settle();
        self.peaks.values().copied().collect()
    }

    /// The phase that runs.
    pub fn phase(&self) -> Phase {
        self.phase
    }

    /// Bytes in use now.
    pub fn in_use(&self) -> Bytes {
        Bytes(allocator::in_use())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn resident_peaks_are_booked_to_the_phase_that_raised_them() {
        let mut meter = Meter::new(Phase::Loading, None);
        meter.enter(Phase::Forward).expect("no capacity, no bound");
        let mut held = vec![0u8; 96 << 20];
        held.iter_mut().step_by(4096).for_each(|byte| *byte = 1);
        meter.enter(Phase::Backward).expect("no capacity, no bound");
        drop(std::hint::black_box(held));
        let peaks = meter.report();
        let driver = |phase| peaks.iter().find(|p| p.phase == phase).expect("phase was entered").driver.0;
        assert!(driver(Phase::Forward) >= driver(Phase::Loading) + (64 << 20), "{peaks:?}");
    }
}
