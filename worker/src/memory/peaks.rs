//! Peaks by phase, as they are seen: of this process, or of the GPU that it computes on.

use std::{collections::BTreeMap, mem};

use coxswain_nn::memory::allocator;

use super::{Gauge, PhasePeak, Resident};
use crate::link::Phase;

/// Micro-batches at the beginning within which a GPU's peaks are looked for: kernels are compiled in the
/// first, and buffers that stay are made.
const WATCHED_FIRST: u64 = 3;
/// And one of so many later: looking takes as long as a step's kernels take to be asked for.
const WATCHED_EVERY: u64 = 64;

/// What was seen so far: over the run, in the step, in the micro-batch.
#[derive(Debug)]
pub(super) struct Peaks {
    run: BTreeMap<Phase, PhasePeak>,
    /// Since people let peaks begin anew.
    recent: BTreeMap<Phase, PhasePeak>,
    step: BTreeMap<Phase, PhasePeak>,
    most_of_step: u64,
    most_of_attempt: u64,
    /// Micro-batches so far, and the cells of the largest.
    attempts: u64,
    most_cells: usize,
    /// The resident set's, when it was looked at last.
    high_water: u64,
    gauge: Option<Box<dyn Gauge>>,
}

impl Peaks {
    /// Peaks of this process, from now on.
    pub fn of_host() -> Self {
        allocator::restart_peak();
        Self {
            run: BTreeMap::new(),
            recent: BTreeMap::new(),
            step: BTreeMap::new(),
            most_of_step: 0,
            most_of_attempt: 0,
            attempts: 0,
            most_cells: 0,
            high_water: Resident::now().high_water,
            gauge: None,
        }
    }

    /// Peaks of a GPU instead.
    pub fn on_gpu(self, gauge: Box<dyn Gauge>) -> Self {
        Self { gauge: Some(gauge), ..self }
    }

    pub fn are_of_gpu(&self) -> bool {
        self.gauge.is_some()
    }

    /// What its maker calls the GPU.
    pub fn gpu(&self) -> Option<String> {
        self.gauge.as_ref()?.gpu()
    }

    /// Bytes in use now.
    pub fn in_use(&self) -> u64 {
        self.gauge.as_ref().map_or_else(allocator::in_use, |gauge| gauge.read().in_use)
    }

    /// Bytes that the GPU can still give; none on the host.
    pub fn room(&self) -> Option<u64> {
        self.gauge.as_ref()?.room()
    }

    /// Bytes that the GPU's allocator has reserved; none on the host. It keeps what it once needed: after a
    /// pass, that is the peak within it.
    pub fn reserved(&self) -> Option<u64> {
        self.gauge.as_ref().map(|gauge| gauge.read().reserved)
    }

    /// The GPU's allocator keeps no more than is in use.
    pub fn release(&self) {
        if let Some(gauge) = &self.gauge {
            gauge.release();
        }
    }

    /// Records what this phase took since the last call. Returns its peak in use.
    pub fn settle(&mut self, phase: Phase) -> u64 {
        let on_gpu = self.gauge.as_ref().map(|gauge| {
            let now = gauge.read();
            PhasePeak { in_use: now.in_use.max(gauge.take_most()), ..now }
        });
        let peak = on_gpu.unwrap_or_else(|| self.on_host());
        for peaks in [&mut self.run, &mut self.recent, &mut self.step] {
            let booked = peaks.entry(phase).or_default();
            *booked = booked.or(peak);
        }
        self.most_of_attempt = self.most_of_attempt.max(peak.in_use);
        // Without the counting allocator the resident set is the best that is known.
        self.most_of_step = self.most_of_step.max(if peak.in_use > 0 { peak.in_use } else { peak.driver });
        allocator::restart_peak();
        peak.in_use
    }

    /// The host's peaks since the last call.
    fn on_host(&mut self) -> PhasePeak {
        let in_use = allocator::peak();
        let seen = Resident::now();
        let raised = seen.high_water > self.high_water;
        let driver = if raised { seen.high_water } else { seen.total };
        // Pages beyond the resident set at the end were anonymous: files stay mapped through a phase. (Of one
        // that is converted, loading lets go of 16 MiB at a time.)
        let reserved = seen.anonymous + (driver - seen.total.min(driver));
        self.high_water = seen.high_water;
        PhasePeak { in_use, reserved, driver }
    }

    /// A micro-batch of so many cells begins. On a GPU peaks within it are looked for in the first ones, in
    /// one that is larger than all before, and now and then.
    pub fn begin_attempt(&mut self, cells: usize) {
        self.most_of_attempt = 0;
        if let Some(gauge) = &self.gauge {
            let due = self.attempts < WATCHED_FIRST || self.attempts.is_multiple_of(WATCHED_EVERY);
            gauge.watch(due || cells > self.most_cells);
            self.attempts += 1;
            self.most_cells = self.most_cells.max(cells);
        }
    }

    /// It has ended.
    pub fn end_attempt(&self) {
        if let Some(gauge) = &self.gauge {
            gauge.watch(false);
        }
    }

    /// Most in use since it began.
    pub fn of_attempt(&self) -> u64 {
        self.most_of_attempt
    }

    /// Most in use since the last call: once a step.
    pub fn take_most_of_step(&mut self) -> u64 {
        mem::take(&mut self.most_of_step)
    }

    /// Peaks of every phase since the last call.
    pub fn take_step(&mut self) -> BTreeMap<Phase, PhasePeak> {
        mem::take(&mut self.step)
    }

    /// Peaks of every phase so far.
    pub fn of_run(&self) -> impl Iterator<Item = (Phase, PhasePeak)> {
        self.run.iter().map(|(phase, peak)| (*phase, *peak))
    }

    /// Peaks of the same phases since the last [`Peaks::forget_recent`]; 0 of those not entered since.
    pub fn recent(&self) -> impl Iterator<Item = (Phase, PhasePeak)> {
        self.run.keys().map(|phase| (*phase, self.recent.get(phase).copied().unwrap_or_default()))
    }

    /// They begin anew.
    pub fn forget_recent(&mut self) {
        self.recent.clear();
    }
}
