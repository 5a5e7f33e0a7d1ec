//! The spans of a worker's log: run, generation, step and phase, each inside the one before, on the thread
//! that trains.
//!
//! They are of level debug, so `COX_LOG=debug` tells where each line was written, and how long each phase
//! took. At the default level no span is made and no clock is read.

use std::{cell::RefCell, time::Instant};

use coxswain_proto::ids::Step;
use tracing::{Level, debug, debug_span, span::EnteredSpan};

use super::{Assignment, Phase};
use crate::clock;

thread_local! {
    static OPEN: RefCell<Open> = const { RefCell::new(Open { run: None, generation: None, step: None, phase: None }) };
}

/// What this thread is in. Spans are left from the innermost outwards.
struct Open {
    run: Option<EnteredSpan>,
    generation: Option<EnteredSpan>,
    step: Option<(Step, EnteredSpan)>,
    phase: Option<(Phase, Instant, EnteredSpan)>,
}

impl Open {
    fn enter(&mut self, phase: Phase, step: Step) {
        let is_of_a_step = !phase.is_before_steps();
        let is_same_step = self.step.as_ref().is_some_and(|(open, _)| *open == step);
        let is_same_phase = self.phase.as_ref().is_some_and(|(open, ..)| *open == phase);
        if is_same_phase && is_same_step == is_of_a_step {
            return;
        }
        self.leave_phase();
        if !is_same_step || !is_of_a_step {
            self.step = None;
        }
        if is_of_a_step && self.step.is_none() {
            self.step = Some((step, debug_span!("step", step = step.0).entered()));
        }
        self.phase = Some((phase, clock::now(), debug_span!("phase", %phase).entered()));
    }

    fn leave_phase(&mut self) {
        if let Some((phase, since, span)) = self.phase.take() {
            let took_ms = 1e3 * since.elapsed().as_secs_f64();
            debug!("{phase} took {took_ms:.1} ms");
            drop(span);
        }
    }

    fn leave_step(&mut self) {
        self.leave_phase();
        self.step = None;
    }

    fn leave_generation(&mut self) {
        self.leave_step();
        self.generation = None;
    }
}

/// Leaves the run's span when it is dropped, and whatever is open inside.
#[must_use = "the span of the run ends with this"]
pub struct RunSpan(());

impl Drop for RunSpan {
    fn drop(&mut self) {
        OPEN.with_borrow_mut(|open| {
            open.leave_generation();
            open.run = None;
        });
    }
}

/// This thread trains in the run `id` until the value is dropped.
pub fn run(id: &str) -> RunSpan {
    if is_told() {
        OPEN.with_borrow_mut(|open| {
            open.leave_generation();
            open.run = Some(debug_span!("run", run = %id).entered());
        });
    }
    RunSpan(())
}

/// This thread has a place in a generation.
pub fn generation(place: &Assignment) {
    if is_told() {
        OPEN.with_borrow_mut(|open| {
            open.leave_generation();
            let (generation, rank) = (place.generation.0, place.rank.0);
            open.generation = Some(debug_span!("generation", generation, rank).entered());
            debug!("this worker is rank {rank} of {}", place.world);
        });
    }
}

/// This thread enters a phase of `step`.
pub fn phase(phase: Phase, step: Step) {
    if is_told() {
        OPEN.with_borrow_mut(|open| open.enter(phase, step));
    }
}

fn is_told() -> bool {
    tracing::enabled!(Level::DEBUG)
}
