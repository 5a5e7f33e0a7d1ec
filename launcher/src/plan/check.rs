//! What is refused before anything starts: a run that cannot fit where it is to run.

use std::fmt;

use coxswain_proto::{
    human,
    run_spec::{DeviceChoice, RunSpec},
};
use coxswain_worker::{device, memory::prediction::fit::Fit};

use super::{Basis, Outlook, Question, capacity::Memory};
use crate::{
    exit::{CliError, Exit},
    tasks::{accelerator, tasks},
};

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
    /// Bytes that there are, if they are a bound.
    pub bound: Option<u64>,
    /// Whether one sample takes more than twice what the machine has, so that swapping would not help either.
    pub beyond: bool,
}

impl fmt::Display for Shortfall {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { rank, missing, memory, micro_batch, largest, .. } = self;
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
    pub fn refusal(&self) -> CliError {
        let exit = if self.largest.is_some() { Exit::Usage } else { Exit::OutOfMemory };
        CliError::new(exit, self)
    }
}

/// Refuses a run that needs what the device lacks on which this machine would compute it.
pub fn refuse_for_device(spec: &RunSpec, wanted: DeviceChoice) -> Result<(), CliError> {
    let device = device::choose(wanted, 0, accelerator()).ok();
    let chosen = tasks().of(spec).ok().zip(device);
    let refusal = chosen.and_then(|(task, device)| device::refusal(task, spec, device));
    refusal.map_or(Ok(()), |refusal| Err(CliError::new(Exit::BadInput, refusal)))
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
    let least = |outlook: &Outlook| outlook.options.first().map_or(0, |option| option.split.peak);
    let smallest = outlooks.iter().map(|(_, outlook)| largest(&outlook.fit)).min().flatten();
    (missing > 0).then(|| Shortfall {
        rank: worst.0,
        missing,
        memory: worst.1.memory.name.clone(),
        micro_batch: question.micro_batch(),
        largest: smallest,
        bound: worst.1.memory.is_bound.then(|| worst.1.memory.capacity()),
        beyond: least(&worst.1) > worst.1.memory.total.saturating_mul(2),
    })
}

/// A run laid against what this machine offers it, before anything starts.
pub struct Forecast {
    /// The run.
    pub question: Question,
    /// What each kind of memory here means for it.
    pub outlooks: Vec<Outlook>,
    /// What it lacks.
    pub shortfall: Option<Shortfall>,
}

impl Forecast {
    /// Lays `spec` against the memories of this machine, on `world` ranks of which `local` are here.
    pub fn predict(spec: &RunSpec, device: DeviceChoice, world: u64, local: u64) -> Result<Self, CliError> {
        let question = Question::new(spec, world, local)?;
        let memories = Memory::here(spec, device, local);
        let shortfall = shortfall(&question, &memories);
        let outlooks = kinds(memories).iter().map(|memory| question.outlook(memory)).collect();
        Ok(Self { question, outlooks, shortfall })
    }
}

/// One memory of each name: the one with least to give.
fn kinds(mut memories: Vec<Memory>) -> Vec<Memory> {
    memories.sort_by(|one, other| (&one.name, one.capacity()).cmp(&(&other.name, other.capacity())));
    memories.dedup_by(|next, kept| next.name == kept.name);
    memories
}

impl Shortfall {
    /// Whether no micro-batch fits, by more than a prediction may be off. `cox run` is refused only then:
    /// short of that, it lowers its micro-batch by itself when a step runs out of memory.
    pub fn is_certain(&self) -> bool {
        let tolerated = |bound: u64| bound / 100 * Basis::Analytic.tolerance_percent();
        let short = self.bound.is_some_and(|bound| self.missing > tolerated(bound));
        self.largest.is_none() && (short || self.beyond)
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
            bound: Some(40 << 30),
            beyond: false,
        };
        assert_eq!(
            short.to_string(),
            "train.micro_batch=8 does not fit: short by 1.8 GiB on rank 3 (A100-40); the largest micro-batch that fits is 4"
        );
        assert_eq!(short.refusal().exit, Exit::Usage);
        assert!(!short.is_certain());
        short.largest = None;
        assert_eq!(short.refusal().exit, Exit::OutOfMemory);
        assert!(!short.is_certain(), "a prediction may be off by more");
        short.bound = Some(10 << 30);
        assert!(short.is_certain());
        short.bound = None;
        assert!(!short.is_certain(), "the host's memory is no bound");
        short.beyond = true;
        assert!(short.is_certain(), "but no machine swaps that much");
    }

    #[test]
    fn of_each_kind_of_memory_the_fullest_counts() {
        let memory = |name: &str, used| Memory {
            name: name.into(),
            total: 40,
            used,
            is_gpu: true,
            is_here: true,
            is_bound: true,
        };
        let found = kinds(vec![memory("B", 1), memory("A", 2), memory("B", 9)]);
        assert_eq!(found, [memory("A", 2), memory("B", 9)]);
    }
}
