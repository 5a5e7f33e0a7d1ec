//! Peaks by phase, and the bound on them.
//!
//! The meter is told which phase begins and keeps the peaks of the one that ended, over the run and since the
//! last step. A phase that went over `memory.capacity` leaves an [`OutOfMemory`] with the meter; the step
//! asks for it ([`Meter::take_overrun`]) before it votes. Evaluation and the filling of the feature cache are
//! left out of that: they halve their own batches, without the others; and checkpoints are: one that does not
//! fit is given up. So is what moving state to another generation takes, where the old and the new one are
//! held at once: a smaller micro-batch would not change that; it is said once. It also keeps what the step
//! wants to know before it runs a micro-batch ([`Demand`]), and writes the [`Timeline`].

use std::path::Path;

use coxswain_nn::memory::ceiling;
use coxswain_proto::{
    human,
    ids::{Bytes, Rank, Step},
};

use super::{
    Demand, Gauge, HeldBytes, OutOfMemory, Overrun, PhasePeak, Pressure, Resident,
    fault::MemoryFault,
    peaks::Peaks,
    timeline::{Line, Timeline},
};
use crate::link::{Phase, PhaseMemory};

/// A micro-batch about to run.
#[derive(Clone, Copy, Debug)]
pub struct Attempt {
    /// On which rank.
    pub rank: Rank,
    /// For which step.
    pub step: Step,
    /// Rows.
    pub samples: usize,
    /// Rows times padded length.
    pub cells: usize,
    /// Whether a smaller micro-batch is possible: if not, it runs whatever is predicted.
    pub divisible: bool,
    /// Whether it does what micro-batches do, so that what it takes says something about others. One whose
    /// features are kept and whose adapter rests takes a fraction.
    pub representative: bool,
}

/// Keeps the peaks of every phase of one worker. Lives on the trainer thread, whose ceiling it sets.
#[derive(Debug)]
pub struct Meter {
    phase: Phase,
    began: u64,
    peaks: Peaks,
    capacity: Option<u64>,
    held: Vec<HeldBytes>,
    overrun: Option<OutOfMemory>,
    /// Whether it was logged that moving state went over.
    moving_told: bool,
    demand: Demand,
    pressure: Pressure,
    pressed: bool,
    timeline: Option<Timeline>,
    attempt: Option<Attempt>,
    last_took: u64,
    most_took: u64,
    injected: MemoryFault,
}

impl Meter {
    /// Begins in `phase`. `capacity` bounds the bytes in use; none means that only the machine does.
    pub fn new(phase: Phase, capacity: Option<Bytes>) -> Self {
        let peaks = Peaks::of_host();
        let capacity = capacity.map(|bytes| bytes.0);
        ceiling::set(capacity);
        Self {
            phase,
            began: peaks.in_use(),
            peaks,
            capacity,
            held: Vec::new(),
            overrun: None,
            moving_told: false,
            demand: Demand::default(),
            pressure: Pressure::default(),
            pressed: false,
            timeline: None,
            attempt: None,
            last_took: 0,
            most_took: 0,
            injected: MemoryFault::from_environment(),
        }
    }

    /// Keeps records of a GPU instead of the host. `memory.capacity` then bounds what the GPU's allocator has
    /// handed out.
    pub fn on_gpu(self, gauge: Box<dyn Gauge>) -> Self {
        // The host's allocations are not what may not grow.
        ceiling::set(None);
        let peaks = self.peaks.on_gpu(gauge);
        Self { began: peaks.in_use(), peaks, ..self }
    }

    /// What the maker of the GPU that records are kept of calls it.
    pub fn gpu(&self) -> Option<String> {
        self.peaks.gpu()
    }

    /// Says what holds memory through the whole run, for messages, and where the timeline goes.
    pub fn begin_run(&mut self, held: Vec<HeldBytes>, run_dir: &Path, rank: Rank) {
        self.held = held;
        self.held.sort_by_key(|held| std::cmp::Reverse(held.bytes));
        self.timeline = Some(Timeline::append_to(run_dir, rank));
    }

    /// Whether [`begin_run`](Self::begin_run) has been called for this rank.
    pub fn accounts_for(&self, rank: Rank) -> bool {
        self.timeline.as_ref().is_some_and(|timeline| timeline.rank() == rank)
    }

    /// Ends the current phase and begins another. Fails if loading went over capacity, since there is nothing
    /// to make smaller then; any other phase that did leaves that for [`take_overrun`](Self::take_overrun).
    pub fn enter(&mut self, next: Phase) -> Result<(), OutOfMemory> {
        if next == self.phase {
            return Ok(());
        }
        let (ended, before) = (self.phase, self.began);
        self.injected.release();
        let peak = self.settle();
        (self.phase, self.began) = (next, self.peaks.in_use());
        self.injected.enter(next, self.attempt.map_or(1, |attempt| attempt.samples));
        if self.capacity.is_none_or(|capacity| peak <= capacity) {
            return Ok(());
        }
        let found = self.out_of_memory(ended, peak, before);
        match ended {
            Phase::Loading => return Err(found),
            Phase::Evaluation | Phase::Checkpoint | Phase::CacheBuild => {}
            Phase::Joining | Phase::Connecting => self.tell_of_moving(peak),
            _ => {
                self.overrun.get_or_insert(found);
            }
        }
        Ok(())
    }

    fn tell_of_moving(&mut self, peak: u64) {
        if !std::mem::replace(&mut self.moving_told, true) {
            let (peak, capacity) = (human::bytes(peak), human::bytes(self.capacity.unwrap_or_default()));
            tracing::warn!(
                "loading the state after a change of membership peaked at {peak}, above memory.capacity \
                 ({capacity}), because the old and the new state were in memory together; the micro-batch \
                 stays the same"
            );
        }
    }

    /// Sets another bound, until the next call.
    pub fn bound(&mut self, capacity: Option<u64>) {
        self.capacity = capacity;
        ceiling::set(capacity.filter(|_| !self.peaks.are_of_gpu()));
    }

    /// Before a micro-batch: refuses it if what earlier ones took says that it will not fit.
    pub fn expect(&mut self, attempt: Attempt) -> Result<(), OutOfMemory> {
        self.attempt = Some(attempt);
        self.injected.goes_on(attempt.rank, attempt.step);
        self.settle();
        self.peaks.begin_attempt(attempt.cells);
        let now = self.peaks.in_use();
        match (self.capacity, self.demand.predict(attempt.cells)) {
            (Some(capacity), Some(more))
                if attempt.divisible && attempt.representative && now + more > capacity =>
            {
                let found = self.out_of_memory(Phase::Forward, now + more, now);
                Err(OutOfMemory { predicted: true, ..found })
            }
            _ => Ok(()),
        }
    }

    /// After a micro-batch, in a phase of its own: learns what it took, or says how it ran out of memory.
    pub fn passed(&mut self, before: u64, overrun: Option<Overrun>) -> Result<(), OutOfMemory> {
        let attempt = self.attempt.take();
        self.peaks.end_attempt();
        let booked = self.overrun.take();
        match (overrun, booked) {
            (None, None) => {
                let cells =
                    attempt.filter(|attempt| attempt.representative).map_or(0, |attempt| attempt.cells);
                self.last_took = self.peaks.of_attempt().saturating_sub(before);
                self.most_took = self.most_took.max(self.last_took);
                self.demand.observe(cells, self.last_took);
                Ok(())
            }
            (Some(Overrun { in_use, device: Some(device) }), _) => {
                let found = self.out_of_memory(Phase::Backward, in_use, before);
                Err(OutOfMemory { capacity: None, device: Some(device), ..found })
            }
            (_, Some(booked)) => Err(booked),
            (Some(overrun), None) => Err(self.out_of_memory(Phase::Backward, overrun.in_use, before)),
        }
    }

    /// Instead of [`passed`](Self::passed) for a micro-batch that was given up: what it took so far says
    /// nothing of what one takes. Fails if it had gone over by then.
    pub fn given_up(&mut self) -> Result<(), OutOfMemory> {
        self.attempt = None;
        self.peaks.end_attempt();
        self.overrun.take().map_or(Ok(()), Err)
    }

    /// Bytes that the last micro-batch that fitted took on top of what was in use before it.
    pub fn last_took(&self) -> u64 {
        self.last_took
    }

    /// Most bytes that a micro-batch took beyond what was there before it, its input included there.
    pub fn most_took(&self) -> u64 {
        self.most_took
    }

    /// Leaves micro-batches so far out of [`most_took`](Self::most_took): buffers that stay were made in
    /// them.
    pub fn forget_most(&mut self) {
        self.most_took = 0;
    }

    /// Bytes that the GPU can still give; none on the host.
    pub fn room(&self) -> Option<u64> {
        self.peaks.room()
    }

    /// Bytes that a GPU's allocator has reserved since [`release`](Self::release), which is the most that was
    /// in use within passes; none on the host, whose allocator tells its peaks.
    pub fn reserved(&self) -> Option<u64> {
        self.peaks.reserved()
    }

    /// A GPU's allocator gives back what it does not use.
    pub fn release(&self) {
        self.peaks.release();
    }

    /// A phase since the last call that went over capacity.
    pub fn take_overrun(&mut self) -> Option<OutOfMemory> {
        self.overrun.take()
    }

    /// What the current phase took so far is booked, and counts against nothing.
    pub fn overlook(&mut self) {
        self.settle();
    }

    /// An out-of-memory of a phase, with all that is known of this rank.
    pub fn out_of_memory(&self, phase: Phase, wanted: u64, before: u64) -> OutOfMemory {
        OutOfMemory {
            phase,
            wanted: Bytes(wanted),
            before: Bytes(before),
            capacity: self.capacity.map(Bytes),
            predicted: false,
            device: None,
            held: self.held.clone(),
            peaks: self.peaks.of_run().map(|(phase, peak)| (phase, Bytes(peak.in_use))).collect(),
        }
    }

    /// Records the peaks of the current phase so far, and starts it again. Returns its peak in use.
    fn settle(&mut self) -> u64 {
        self.peaks.settle(self.phase)
    }

    /// Peak bytes in use since the last call: once a step.
    pub fn take_step_peak(&mut self) -> Bytes {
        self.settle();
        Bytes(self.peaks.take_most_of_step())
    }

    /// What was seen so far belongs to no step.
    pub fn begin_step(&mut self) {
        self.take_step_peak();
        self.peaks.take_step();
    }

    /// Ends a step: writes its line of the timeline, looks for thrash, returns the step's peak.
    pub fn end_step(&mut self, step: Step, micro_batch: usize, attempts: u32) -> Bytes {
        let peak = self.take_step_peak();
        let phases = self.peaks.take_step();
        let in_use = self.peaks.in_use();
        if let Some(timeline) = &mut self.timeline {
            let phases = phases.iter().map(|(phase, peak)| (phase.name(), *peak)).collect();
            timeline.write(&Line { micro_batch, attempts, in_use, ..Line::new(step, phases) });
        }
        self.pressed |= self.pressure.step_ended(Resident::now().swapped);
        peak
    }

    /// Whether a step since the last call found the system swapping this rank out.
    pub fn take_pressed(&mut self) -> bool {
        std::mem::take(&mut self.pressed)
    }

    /// Peaks of every phase so far.
    pub fn report(&mut self) -> Vec<PhaseMemory> {
        self.settle();
        self.peaks.of_run().map(|(phase, peak)| row(phase, peak)).collect()
    }

    /// Peaks of every phase so far since [`forget_recent`](Self::forget_recent); 0 of one that has not been
    /// entered since.
    pub fn report_recent(&mut self) -> Vec<PhaseMemory> {
        self.settle();
        self.peaks.recent().map(|(phase, peak)| row(phase, peak)).collect()
    }

    /// What [`report_recent`](Self::report_recent) tells begins anew; all else goes on.
    pub fn forget_recent(&mut self) {
        self.settle();
        self.peaks.forget_recent();
    }

    /// The phase that runs.
    pub fn phase(&self) -> Phase {
        self.phase
    }

    /// Bytes in use now.
    pub fn in_use(&self) -> Bytes {
        Bytes(self.peaks.in_use())
    }
}

fn row(phase: Phase, peak: PhasePeak) -> PhaseMemory {
    PhaseMemory {
        phase,
        in_use: Bytes(peak.in_use),
        reserved: Bytes(peak.reserved),
        driver: Bytes(peak.driver),
    }
}

#[cfg(test)]
mod tests;
