//! A rank that is wrong or slow on purpose, for tests of what happens then.
//!
//! | variable | what it does |
//! |---|---|
//! | `COX_FAULT_LOSS="rank=1 step=3 times=1"` | from step 3 on rank 1's next loss is NaN, so many times |
//! | `COX_FAULT_SLOW="rank=1 step=3 until=40 percent=130 part=compute"` | rank 1 is slower in steps 3 to 39 |
//! | `COX_FAULT_WEIGHTS="rank=1 step=7 part=0"` | before step 7 one bit flips in rank 1's weights, once |
//! | `COX_FAULT_GRADIENTS="rank=1 step=7 times=1 slice=own life=0"` | rank 1 makes a slice wrong, in step 7 |
//!
//! With `times=1` a loss is a slip of the machine, which a second attempt does not repeat; with many times it
//! is a run that has diverged. `part` of what is slow is `compute` or `data`; of weights it counts from this
//! rank's own part of the flat parameter buffer on, so that 0 is its own and 1 that of the rank behind it.
//! The slice whose gradients are wrong is rank 1's `own`, or `another` that it runs to compare; `life` is
//! that of its process in its slot, from 0, so that a successor may be sound. The rank that is slow, or
//! makes wrong gradients, is a slot, as people are told of it: the spare that has its place is sound. Fields
//! may come in any order; all are needed. They are part of the program because the program is what is
//! tested, as `COX_FAULT_MEMORY` is. Nothing else reads the variables, and no run depends on them.

use std::{ops::Range, time::Duration};

use crate::train::{Learner, Members};
use coxswain_nn::{
    kernels::{Tape, flat::Flat},
    params::FlatGrads,
};
use coxswain_proto::ids::{Rank, Step};

const LOSS: &str = "COX_FAULT_LOSS";
const SLOW: &str = "COX_FAULT_SLOW";
const WEIGHTS: &str = "COX_FAULT_WEIGHTS";
const GRADIENTS: &str = "COX_FAULT_GRADIENTS";
/// How often the process of this slot has been started again; the launcher says it.
const RESTARTS: &str = "TORCHELASTIC_RESTART_COUNT";
/// The slot of this process; the launcher says it.
const SLOT: &str = "RANK";

/// The faults that this process was given, as far as they are still to come.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(in crate::train) struct InjectedFaults {
    loss: Option<Loss>,
    slow: Option<Slow>,
    flip: Option<Flip>,
    gradient: Option<WrongGradient>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Loss {
    rank: Rank,
    from: Step,
    times: u32,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Slow {
    slot: u32,
    steps: Range<Step>,
    /// Percent of its usual time.
    percent: u32,
    /// Whether the rest of the time is spent waiting for data.
    in_data: bool,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Flip {
    rank: Rank,
    step: Step,
    part: usize,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct WrongGradient {
    rank: Rank,
    step: Step,
    times: u32,
    /// Whether it is in the rank's own slice, or in one that it runs to compare.
    own: bool,
    life: u32,
}

impl InjectedFaults {
    /// What the variables say. A value that cannot be read is said so and ignored.
    pub fn from_environment() -> Self {
        Self {
            loss: read(LOSS, "rank=1 step=3 times=1", Loss::parse),
            slow: read(SLOW, "rank=1 step=3 until=40 percent=130 part=compute", Slow::parse)
                .filter(|slow| slow.slot == slot()),
            flip: read(WEIGHTS, "rank=1 step=7 part=0", Flip::parse),
            gradient: read(GRADIENTS, "rank=1 step=7 times=1 slice=own life=0", WrongGradient::parse)
                .filter(|fault| (fault.rank.0, fault.life) == (slot(), life())),
        }
    }

    /// The loss of a micro-batch, or NaN in its place.
    pub fn loss(&mut self, rank: Rank, step: Step, loss: f64) -> f64 {
        match &mut self.loss {
            Some(fault) if fault.times > 0 && rank == fault.rank && step >= fault.from => {
                fault.times -= 1;
                f64::NAN
            }
            _ => loss,
        }
    }

    /// The loss of a micro-batch of that rank's slice, as another rank computes it: what is a slip of the
    /// machine is well there, and what is the samples' fault is not.
    pub fn loss_elsewhere(&mut self, of: Rank, step: Step, loss: f64) -> f64 {
        match &mut self.loss {
            // Both attempts of the rank itself.
            Some(fault) if fault.times > 1 && of == fault.rank && step >= fault.from => {
                fault.times -= 2;
                f64::NAN
            }
            _ => loss,
        }
    }

    /// Makes a pass that took so long take longer; `data` is the time for which the step waited for data.
    pub fn slow_down(&self, step: Step, took: Duration, data: &mut Duration) {
        let Some(fault) = self.slow.as_ref().filter(|slow| slow.steps.contains(&step)) else { return };
        let longer = took * fault.percent.saturating_sub(100) / 100;
        std::thread::sleep(longer);
        if fault.in_data {
            *data += longer;
        }
    }

    /// The part of the weights in which a bit is to flip now, counted from this rank's own.
    pub fn flip(&mut self, rank: Rank, step: Step) -> Option<usize> {
        self.flip.take_if(|flip| (flip.rank, flip.step) == (rank, step)).map(|flip| flip.part)
    }

    /// Whether the gradients of a slice that has run are to be wrong: of the rank's `own`, or of another.
    pub fn flips_gradient(&mut self, rank: Rank, step: Step, own: bool) -> bool {
        let fault =
            self.gradient.as_mut().filter(|fault| (fault.rank, fault.step, fault.own) == (rank, step, own));
        let due = fault.filter(|fault| fault.times > 0);
        due.map(|fault| fault.times -= 1).is_some()
    }

    /// Makes the gradients of a slice that has run wrong, if they are to be. `own`: whether it is this
    /// rank's.
    pub fn flip_a_gradient<F: Flat>(&mut self, rank: Rank, step: Step, own: bool, grads: &mut FlatGrads<F>) {
        if self.flips_gradient(rank, step, own) {
            grads.values_mut().edit(|grads| flip(grads.iter_mut().find(|x| **x != 0.0)));
        }
    }

    /// Makes this rank's weights wrong, if they are to be.
    pub fn flip_a_bit<B: Tape<Base = B>>(&mut self, members: &Members, learner: &mut Learner<B>, step: Step) {
        let Some(part) = self.flip(members.rank(), step) else { return };
        let (world, rank) = (members.world() as usize, members.rank().0 as usize);
        let range = learner.optimizer().part_in(world, (rank + part) % world);
        let mut weights: B::Flat = learner.trainables.take();
        weights.edit(|weights| flip(weights[range].first_mut()));
        learner.trainables.put(weights);
    }
}

fn flip(value: Option<&mut f32>) {
    value.into_iter().for_each(|x| *x = f32::from_bits(x.to_bits() ^ 1 << 20));
}

fn life() -> u32 {
    number(RESTARTS)
}

fn slot() -> u32 {
    number(SLOT)
}

fn number(variable: &str) -> u32 {
    std::env::var(variable).ok().and_then(|number| number.parse().ok()).unwrap_or(0)
}

impl WrongGradient {
    fn parse(text: &str) -> Option<Self> {
        let own = match field(text, "slice")? {
            "own" => true,
            "another" => false,
            _ => return None,
        };
        Some(Self {
            rank: rank(text)?,
            step: Step(field(text, "step")?.parse().ok()?),
            times: field(text, "times")?.parse().ok()?,
            own,
            life: field(text, "life")?.parse().ok()?,
        })
    }
}

impl Loss {
    fn parse(text: &str) -> Option<Self> {
        Some(Self {
            rank: rank(text)?,
            from: Step(field(text, "step")?.parse().ok()?),
            times: field(text, "times")?.parse().ok()?,
        })
    }
}

impl Slow {
    fn parse(text: &str) -> Option<Self> {
        let in_data = match field(text, "part")? {
            "data" => true,
            "compute" => false,
            _ => return None,
        };
        let step = |name| Some(Step(field(text, name)?.parse().ok()?));
        let percent = field(text, "percent")?.parse().ok()?;
        Some(Self { slot: rank(text)?.0, steps: step("step")?..step("until")?, percent, in_data })
    }
}

impl Flip {
    fn parse(text: &str) -> Option<Self> {
        let step = Step(field(text, "step")?.parse().ok()?);
        Some(Self { rank: rank(text)?, step, part: field(text, "part")?.parse().ok()? })
    }
}

fn read<F>(variable: &str, example: &str, parse: impl FnOnce(&str) -> Option<F>) -> Option<F> {
    let text = std::env::var(variable).ok().filter(|text| !text.is_empty())?;
    let fault = parse(&text);
    if fault.is_none() {
        tracing::error!("{variable}={text:?} is ignored: write `{example}`");
    }
    fault
}

fn field<'t>(text: &'t str, name: &str) -> Option<&'t str> {
    text.split_whitespace().find_map(|field| field.strip_prefix(name)?.strip_prefix('='))
}

fn rank(text: &str) -> Option<Rank> {
    Some(Rank(field(text, "rank")?.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    const ONE: Rank = Rank(1);
    const TWO: Rank = Rank(2);

    #[test]
    fn a_loss_is_spoilt_for_one_rank_and_later_steps_and_so_many_times() {
        let mut fault =
            InjectedFaults { loss: Loss::parse("times=2 rank=1 step=3"), ..InjectedFaults::default() };
        assert_eq!(fault.loss(ONE, Step(2), 0.5), 0.5);
        assert_eq!(fault.loss(TWO, Step(3), 0.5), 0.5);
        assert!(fault.loss(ONE, Step(3), 0.5).is_nan() && fault.loss(ONE, Step(9), 0.5).is_nan());
        assert_eq!(fault.loss(ONE, Step(9), 0.5), 0.5);
        assert_eq!(Loss::parse("rank=1 step=3"), None);
    }

    #[test]
    fn a_slip_is_not_seen_elsewhere_and_a_run_that_diverges_is() {
        let elsewhere = |times: &str| {
            let loss = Loss::parse(&format!("times={times} rank=1 step=3"));
            let mut fault = InjectedFaults { loss, ..InjectedFaults::default() };
            [(ONE, 2), (TWO, 3), (ONE, 3), (ONE, 4)]
                .map(|(rank, step)| fault.loss_elsewhere(rank, Step(step), 0.5).is_nan())
        };
        assert_eq!(elsewhere("1"), [false; 4]);
        assert_eq!(elsewhere("2"), [false, false, true, false]);
        assert_eq!(elsewhere("9"), [false, false, true, true]);
    }

    #[test]
    fn a_rank_is_slow_for_some_steps_in_what_is_named() {
        let slow = Slow::parse("rank=1 step=3 until=5 percent=150 part=data");
        assert_eq!(slow.as_ref().map(|slow| slow.slot), Some(1));
        let fault = InjectedFaults { slow, ..InjectedFaults::default() };
        let waited = |step| {
            let mut data = Duration::ZERO;
            fault.slow_down(Step(step), Duration::from_micros(2), &mut data);
            data.as_nanos()
        };
        assert_eq!([waited(2), waited(3), waited(4), waited(5)], [0, 1000, 1000, 0]);
        assert_eq!(Slow::parse("rank=1 step=3 until=5 percent=150 part=tea"), None);
    }

    #[test]
    fn a_bit_flips_once() {
        let mut fault =
            InjectedFaults { flip: Flip::parse("rank=1 step=7 part=0"), ..InjectedFaults::default() };
        assert_eq!([fault.flip(ONE, Step(6)), fault.flip(TWO, Step(7))], [None; 2]);
        assert_eq!([fault.flip(ONE, Step(7)), fault.flip(ONE, Step(7))], [Some(0), None]);
    }

    #[test]
    fn gradients_are_wrong_in_one_step_so_many_times() {
        let gradient = WrongGradient::parse("rank=1 step=7 times=2 slice=own life=0");
        let mut fault = InjectedFaults { gradient, ..InjectedFaults::default() };
        assert!(!fault.flips_gradient(ONE, Step(6), true) && !fault.flips_gradient(TWO, Step(7), true));
        assert!(!fault.flips_gradient(ONE, Step(7), false));
        assert_eq!([0; 3].map(|_| fault.flips_gradient(ONE, Step(7), true)), [true, true, false]);
        assert_eq!(WrongGradient::parse("rank=1 step=7 times=2 slice=left life=0"), None);
    }
}
