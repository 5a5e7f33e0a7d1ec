//! Memory pressure on purpose, for tests of what happens then.
//!
//! `COX_FAULT_MEMORY="rank=2 step=3 phase=backward mib=256"` lets rank 2, from step 3 on, hold 256 MiB more
//! for every sample of a micro-batch while it runs backward: an allocation like any other, counted and never
//! touched, so it takes no pages. With `memory.capacity` set this is a real overrun, and a smaller
//! micro-batch is a real remedy. `phase` may be `forward`, too, or `checkpoint`, which counts as one sample.
//! Fields may come in any order; all are needed.
//!
//! It is part of the program because the program is what is tested: the counted allocations, the vote and the
//! smaller micro-batch of several real processes, of which one has less room than the others. No setting of a
//! run does that to one rank, and no other program has this allocator. Nothing else reads the variable, and
//! no run depends on it.

use coxswain_proto::ids::{Rank, Step};

use crate::link::Phase;

const VARIABLE: &str = "COX_FAULT_MEMORY";

/// The fault that this process was given, if any, and what it holds for that.
#[derive(Debug)]
pub(super) struct MemoryFault {
    fault: Option<Fault>,
    /// Place of the newest micro-batch.
    place: Option<(Rank, Step)>,
    ballast: Vec<u8>,
}

impl MemoryFault {
    /// What the variable says. A value that cannot be read is said so and ignored.
    pub fn from_environment() -> Self {
        Self { fault: Fault::from_environment(), place: None, ballast: Vec::new() }
    }

    /// A micro-batch of this step begins.
    pub fn goes_on(&mut self, rank: Rank, step: Step) {
        self.place = Some((rank, step));
    }

    /// A phase ends.
    pub fn release(&mut self) {
        self.ballast = Vec::new();
    }

    /// A phase of a micro-batch of so many samples begins.
    pub fn enter(&mut self, phase: Phase, samples: usize) {
        if let (Some(fault), Some((rank, step))) = (&self.fault, self.place) {
            self.ballast = fault.ballast(rank, step, phase, samples);
        }
    }
}

/// What one rank should hold for nothing.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Fault {
    rank: Rank,
    from: Step,
    phase: Phase,
    bytes_per_sample: usize,
}

impl Fault {
    fn from_environment() -> Option<Self> {
        let text = std::env::var(VARIABLE).ok().filter(|text| !text.is_empty())?;
        let fault = Self::parse(&text);
        if fault.is_none() {
            tracing::error!("{VARIABLE}={text:?} is ignored: write `rank=2 step=3 phase=backward mib=256`");
        }
        fault
    }

    fn parse(text: &str) -> Option<Self> {
        let field = |name: &str| {
            text.split_whitespace().find_map(|field| field.strip_prefix(name)?.strip_prefix('='))
        };
        let phase = match field("phase")? {
            "forward" => Phase::Forward,
            "backward" => Phase::Backward,
            "checkpoint" => Phase::Checkpoint,
            _ => return None,
        };
        Some(Self {
            rank: Rank(field("rank")?.parse().ok()?),
            from: Step(field("step")?.parse().ok()?),
            phase,
            bytes_per_sample: field("mib")?.parse::<usize>().ok()?.checked_mul(1 << 20)?,
        })
    }

    /// What to hold in a phase of a micro-batch of so many samples.
    fn ballast(&self, rank: Rank, step: Step, phase: Phase, samples: usize) -> Vec<u8> {
        if rank == self.rank && step >= self.from && phase == self.phase {
            Vec::with_capacity(self.bytes_per_sample.saturating_mul(samples))
        } else {
            Vec::new()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fault_is_for_one_rank_one_phase_and_later_steps() {
        let fault = Fault::parse("mib=2 rank=2 phase=backward step=3").expect("complete");
        let held = |rank, step, phase| fault.ballast(Rank(rank), Step(step), phase, 3).capacity() >> 20;
        assert_eq!(held(2, 3, Phase::Backward), 6);
        assert_eq!(held(2, 9, Phase::Backward), 6);
        assert_eq!(
            [held(2, 2, Phase::Backward), held(1, 3, Phase::Backward), held(2, 3, Phase::Forward)],
            [0; 3]
        );
        assert_eq!(Fault::parse("rank=2 step=3 phase=backward"), None);
        assert_eq!(Fault::parse("rank=2 step=3 phase=tea mib=1"), None);
    }
}
