//! What a pass holds and computes, counted by running it on the backend that knows sizes alone
//! ([`kernels::sizes`](coxswain_nn::kernels::sizes)).

use std::{
    cell::RefCell,
    collections::HashMap,
    hash::Hash,
    sync::{Arc, Mutex, PoisonError},
};

use burn::tensor::Tensor;
use coxswain_nn::{
    kernels::{
        GradientSlot, LinearOps,
        flat::{Lookups, WAITING},
        sizes::{Account, Sizes, pages::Allocations},
    },
    params::{GradientSums, ParamSpec},
    profile,
};
use serde::Serialize;

use crate::{Pass, StageClock};

/// What a profile calls such a run: it is done once for each size of a micro-batch.
const COUNTING: &str = "counting of matmuls";

/// The most that one stage of a pass holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StagePeak {
    /// The direction.
    pub pass: Pass,
    /// As its time is shown; empty for what follows the last stage of a direction.
    pub stage: &'static str,
    /// Bytes beyond what is there before the micro-batch.
    pub bytes: u64,
}

/// Multiplications and additions of products, by direction. What is computed again in the backward pass
/// counts there.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Flops {
    /// Forward.
    pub forward: u64,
    /// Backward.
    pub backward: u64,
}

impl Flops {
    /// Both.
    pub fn total(self) -> u64 {
        self.forward + self.backward
    }

    /// Operations of so many alike.
    pub fn times(self, count: u64) -> Self {
        Self { forward: count * self.forward, backward: count * self.backward }
    }
}

/// What one micro-batch holds, in bytes beyond what is there before it, and what it computes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PassCost {
    /// Stages in the order in which they run.
    pub stages: Vec<StagePeak>,
    /// What the forward pass leaves for the backward pass.
    pub kept: u64,
    /// The largest buffer that a compute thread keeps for itself.
    pub scratch: u64,
    /// Products.
    pub flops: Flops,
    /// On a GPU, what it takes and gives back.
    pub allocations: Arc<Allocations>,
}

impl PassCost {
    /// Runs a forward and a backward pass, which tells its clock of both and of its stages.
    pub fn of<E>(
        account: &Account,
        run: impl FnOnce(&mut dyn GradientSums<Sizes>, &mut StageClock<'_>) -> Result<(), E>,
    ) -> Result<Self, E> {
        account.restart();
        let before = account.in_use();
        let found = RefCell::new((Self::default(), Pass::Forward));
        let leave = |stage| {
            let (found, pass) = &mut *found.borrow_mut();
            found.stages.push(StagePeak { pass: *pass, stage, bytes: account.peak() - before });
            account.restart_peak();
        };
        let mut clock = StageClock::new(|pass| {
            if pass == Pass::Backward {
                leave("");
                let (found, now) = &mut *found.borrow_mut();
                (found.kept, *now) = (account.in_use() - before, pass);
                found.flops.forward = account.flops();
            }
        })
        .on_lap(leave);
        let mut sums = Forget { on_gpu: account.is_gpu() };
        profile::closed(COUNTING, || run(&mut sums, &mut clock))?;
        drop(clock);
        leave("");
        let (mut found, pass) = found.into_inner();
        match pass {
            Pass::Forward => found.flops.forward = account.flops(),
            Pass::Backward => found.flops.backward = account.flops() - found.flops.forward,
        }
        Ok(Self { scratch: account.scratch(), allocations: Arc::new(account.take_allocations()), ..found })
    }

    /// The most that a direction holds, with `beside(stage)` bytes more in each stage.
    pub fn peak(&self, pass: Pass, beside: impl Fn(&str) -> u64) -> u64 {
        let stages = self.stages.iter().filter(|stage| stage.pass == pass);
        stages.map(|stage| stage.bytes + beside(stage.stage)).max().unwrap_or(0)
    }

    /// Runs what is a forward pass alone.
    pub fn of_forward<R>(account: &Account, run: impl FnOnce() -> R) -> (R, Self) {
        account.restart();
        let before = account.in_use();
        let result = profile::closed(COUNTING, run);
        let stage = StagePeak { pass: Pass::Forward, stage: "", bytes: account.peak() - before };
        let flops = Flops { forward: account.flops(), backward: 0 };
        let allocations = Arc::new(account.take_allocations());
        (result, Self { stages: vec![stage], kept: 0, scratch: account.scratch(), flops, allocations })
    }

    /// This cost, its stages under this name.
    pub fn named(mut self, stage: &'static str) -> Self {
        self.stages.iter_mut().for_each(|peak| peak.stage = stage);
        self
    }

    /// This, and then another one, whose own peak stays its own: of two that follow each other, which holds
    /// more may change with the number of samples.
    pub fn followed_by(mut self, next: Self) -> Self {
        self.stages.extend(next.stages);
        self.flops = Flops {
            forward: self.flops.forward + next.flops.forward,
            backward: self.flops.backward + next.flops.backward,
        };
        Self { kept: self.kept.max(next.kept), scratch: self.scratch.max(next.scratch), ..self }
    }

    /// The cost at `micro_batch` samples, on the line through what was found at two smaller micro-batches:
    /// what a pass holds and computes grows by the sample.
    fn beyond(one: (u64, &Self), other: (u64, &Self), micro_batch: u64) -> Self {
        let (apart, further) = ((other.0 - one.0).max(1), micro_batch.saturating_sub(other.0));
        let line = |from: u64, to: u64| to + to.saturating_sub(from) / apart * further;
        let proportion = |bytes: u64| bytes * micro_batch / other.0.max(1);
        let stages = one.1.stages.iter().zip(&other.1.stages);
        Self {
            stages: stages.map(|(a, b)| StagePeak { bytes: line(a.bytes, b.bytes), ..*b }).collect(),
            kept: line(one.1.kept, other.1.kept),
            scratch: other.1.scratch,
            flops: Flops {
                forward: line(one.1.flops.forward, other.1.flops.forward),
                backward: line(one.1.flops.backward, other.1.flops.backward),
            },
            allocations: Arc::new(Allocations::beyond(
                &one.1.allocations,
                &other.1.allocations,
                line,
                proportion,
            )),
        }
    }
}

/// Micro-batches up to here are run as they are; what larger ones take is on the line through this one and
/// half of it. Their inputs are host memory, which a search for the largest that fits must not take; a few
/// samples more show where attention is cut into tiles.
const LARGEST_RUN: u64 = 8;

/// What passes of one model were found to take, by kind (settings that a pass depends on among it) and
/// micro-batch. Copies share it.
#[derive(Clone, Debug)]
pub struct Passes<K>(Arc<Mutex<HashMap<(K, u64), PassCost>>>);

impl<K: Clone + Eq + Hash> Passes<K> {
    /// What a pass of this kind takes; `run` runs one with so many samples.
    pub fn at<E>(
        &self,
        kind: &K,
        micro_batch: u64,
        run: impl Fn(u64) -> Result<PassCost, E>,
    ) -> Result<PassCost, E> {
        let found = |samples| {
            let at = (kind.clone(), samples);
            let known = self.0.lock().unwrap_or_else(PoisonError::into_inner).get(&at).cloned();
            if let Some(known) = known {
                return Ok(known);
            }
            let bytes = run(samples)?;
            let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
            Ok(all.entry(at).or_insert(bytes).clone())
        };
        if micro_batch <= LARGEST_RUN {
            return found(micro_batch);
        }
        let (half, whole) = (found(LARGEST_RUN / 2)?, found(LARGEST_RUN)?);
        Ok(PassCost::beyond((LARGEST_RUN / 2, &half), (LARGEST_RUN, &whole), micro_batch))
    }
}

impl<K> Default for Passes<K> {
    fn default() -> Self {
        Self(Arc::default())
    }
}

/// Gradients have no values to add up; those that are products still to be made are made.
struct Forget {
    on_gpu: bool,
}

impl GradientSums<Sizes> for Forget {
    fn add(&mut self, _: Vec<(&ParamSpec, Tensor<Sizes, 2>)>) {}

    fn add_weight_gradients(&mut self, makings: Vec<(&ParamSpec, [Tensor<Sizes, 2>; 2])>) {
        // On a GPU they are made, and wait for each other.
        let (mut waiting, mut elements) = (Vec::new(), 0);
        for (weight, [dy_no, x_ni]) in makings {
            if !self.on_gpu {
                let sum = GradientSlot { values: &mut [], stale: false };
                Sizes::add_linear_weight_gradient(dy_no, x_ni, sum);
                continue;
            }
            let more = weight.range().len();
            if elements + more > WAITING {
                waiting.clear();
                elements = 0;
            }
            elements += more;
            waiting.push(Sizes::linear_weight_gradient(dy_no, x_ni));
        }
    }

    fn add_rows(&mut self, _: &ParamSpec, _: &Lookups, _: Tensor<Sizes, 2>) {}
}

#[cfg(test)]
mod tests {
    use coxswain_nn::kernels::sizes::pages::Allocation;

    use super::*;

    #[test]
    fn a_pass_of_two_stages_holds_what_its_tensors_take_and_counts_its_products() {
        let account = Account::open();
        let device = account.device();
        let weights = Tensor::<Sizes, 2>::zeros([64, 64], device);
        let cost = PassCost::of(&account, |_, clock| {
            clock.enter(Pass::Forward);
            let x = Tensor::<Sizes, 2>::zeros([8, 64], device);
            let y = x.clone().matmul(weights.clone());
            clock.lap("wide");
            drop(x);
            clock.enter(Pass::Backward);
            let dx = y.matmul(weights.clone().transpose());
            drop(dx);
            clock.lap("back");
            Ok::<_, ()>(())
        });
        let cost = cost.expect("it has no error");
        let one = 4 * 8 * 64;
        assert_eq!(cost.peak(Pass::Forward, |_| 0), 2 * one);
        assert_eq!(cost.kept, one);
        assert_eq!(cost.peak(Pass::Backward, |_| 0), 2 * one);
        let beside = |stage: &str| if stage == "wide" { 100 } else { 0 };
        assert_eq!(cost.peak(Pass::Forward, beside), 2 * one + 100);
        assert_eq!(account.in_use(), 4 * 64 * 64, "the weights alone are left");
        let product = 2 * 8 * 64 * 64;
        assert_eq!(cost.flops, Flops { forward: product, backward: product });
    }

    #[test]
    fn larger_micro_batches_are_on_the_line_through_two_smaller_ones() {
        let at = |rows: u64| PassCost {
            stages: vec![StagePeak { pass: Pass::Forward, stage: "", bytes: 100 + 10 * rows }],
            kept: 7 * rows,
            scratch: 3,
            flops: Flops { forward: 11 * rows, backward: 13 * rows },
            allocations: Arc::new(Allocations(vec![
                Allocation::Taken(1, 17 * rows),
                Allocation::Released(1),
            ])),
        };
        let passes = Passes::default();
        let run = |rows| if rows <= LARGEST_RUN { Ok(at(rows)) } else { Err("too many") };
        assert_eq!(passes.at(&(), 64, run), Ok(at(64)));
        assert_eq!(passes.at(&(), 3, run), Ok(at(3)));
        let forgotten = |_| Err("it is known");
        assert_eq!(passes.at(&(), 4, forgotten), Ok(at(4)));
        assert_eq!(passes.at(&(), 1, forgotten), Err("it is known"), "one was not run");
    }
}
