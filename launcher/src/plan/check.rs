//! What is refused before anything starts: a run that cannot fit where it is to run.

use std::fmt;

use coxswain_proto::{human, run_spec::RunSpec};
use coxswain_worker::memory::prediction::fit::Fit;

use super::{Basis, Question, capacity::Memory, sizes, threads};
use crate::exit::{Exit, Failed};

/// A run that does not fit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Shortfall {
    /// The rank that lacks most.
    pub rank: u64,
    /// Bytes it lacks.
    pub missing: u64,
    /// Where.
    pub memory: String,
    /// The micro-batch asked for.
    pub micro_batch: u64,
    /// The largest power of two that fits on every rank.
    pub largest: Option<u64>,
}

impl fmt::Display for Shortfall {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { rank, missing, memory, micro_batch, largest } = self;
        write!(
            f,
            "train.micro_batch={micro_batch} does not fit: short by {} on rank {rank} ({memory}); ",
            human::bytes(*missing)
        )?;
        match largest {
            Some(largest) => write!(f, "the largest micro-batch that fits is {largest}"),
            None => f.write_str("not even one sample fits: `cox plan` shows what each setting would save"),
        }
    }
}

impl Shortfall {
    /// As a command's end: bad usage where a smaller micro-batch helps, out of memory where none does.
    pub fn refusal(&self) -> Failed {
        let exit = if self.largest.is_some() { Exit::Usage } else { Exit::OutOfMemory };
        Failed::new(exit, self)
    }
}

/// Lays the run against `memories`, one for each local rank in turn; one for all ranks if there is only one.
pub fn shortfall(question: &Question, memories: &[Memory]) -> Option<Shortfall> {
    let ranks = if memories.len() > 1 { question.world.min(memories.len() as u64) } else { 1 };
    let outlooks = (0..ranks).zip(memories).map(|(rank, memory)| (rank, question.outlook(memory)));
    let outlooks: Vec<_> = outlooks.collect();
    let lacks = |peak: u64, memory: &Memory| peak.saturating_sub(memory.capacity());
    let worst = outlooks.iter().max_by_key(|(_, outlook)| lacks(outlook.current.peak, &outlook.memory))?;
    let missing = lacks(worst.1.current.peak, &worst.1.memory);
    let largest = |fit: &Fit| fit.maximum;
    let smallest = outlooks.iter().map(|(_, outlook)| largest(&outlook.fit)).min().flatten();
    (missing > 0).then(|| Shortfall {
        rank: worst.0,
        missing,
        memory: worst.1.memory.name.clone(),
        micro_batch: question.micro_batch(),
        largest: smallest,
    })
}

/// What a submission checks: `memory.capacity`, which bounds every rank on the CPU. The host's memory is not a bound: the system
/// swaps, and other programs come and go.
pub fn submission(spec: &RunSpec, world: u64, local: u64) -> Result<Option<Shortfall>, Failed> {
    let Some(bound) = Memory::of_spec(spec) else { return Ok(None) };
    let subject = sizes(spec)?;
    let question = Question { subject, world, threads: threads(spec, local) };
    Ok(shortfall(&question, &[bound]))
}

impl Shortfall {
    /// Whether no micro-batch fits, by more than a prediction may be off. `cox run` is refused only then: short of that, it lowers
    /// its micro-batch by itself when a step runs out of memory.
    pub fn is_certain(&self, capacity: u64) -> bool {
        self.largest.is_none() && self.missing > capacity / 100 * Basis::Analytic.tolerance_percent()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shortfall_names_rank_bytes_and_what_would_fit() {
        let mut short = Shortfall {
            rank: 3,
            missing: (18 << 30) / 10,
            memory: "A100-40".into(),
            micro_batch: 8,
            largest: Some(4),
        };
        assert_eq!(
            short.to_string(),
            "train.micro_batch=8 does not fit: short by 1.8 GiB on rank 3 (A100-40); the largest micro-batch that fits is 4"
        );
        assert_eq!(short.refusal().exit, Exit::Usage);
        assert!(!short.is_certain(40 << 30));
        short.largest = None;
        assert_eq!(short.refusal().exit, Exit::OutOfMemory);
        assert!(!short.is_certain(40 << 30) && short.is_certain(10 << 30));
    }
}
