//! One optimizer step over a partitioned flat parameter buffer.
//!
//! ```text
//! gradients, full length, different on every rank
//!   -> reduce-scatter in place        this rank's chunk is the sum over ranks (`exchange`)
//!   -> norm over all chunks           one f64 around the ring, and one a group; not finite: an error,
//!                                     nothing has changed
//!   -> the update rule, on this       of the flat weights, which is their master copy; then their average
//!      rank's chunk                   follows, where one is kept
//!   -> all-gather in place            everyone has all weights
//! ```
//!
//! In a world of one the collectives do nothing and this is the plain rule, without a copy. Which rule it is
//! ([`UpdateRule`]) decides what state there is, where chunks may be cut, and what an update does.
//!
//! Gradients, weights and float32 state are buffers of one kind ([`Flat`]), in host memory or in a device's;
//! nothing here looks at an element but the search for one that is not finite. On a device work is ordered
//! and not waited for: what a step's times call computing is then found in whatever waits next.
//!
//! A step can let a group rest ([`StepInput::resting`]): it is treated as parameters whose gradient is `None`
//! are in torch. Its weights and their state keep their bits, by decay as little as by momentum, and the norm
//! is that of what moves. One thing differs: torch counts steps for each parameter, and here one count, that
//! of the bias correction, goes on for everyone (docs/decisions/feature-cache.md says what that comes to).

use std::{sync::Arc, time::Duration};

use coxswain_proto::{
    ids::{Bytes, Rank},
    run_spec::{Optimizer, PerGroup},
};

use super::{
    average::Average,
    exchange::Exchange,
    loss_scale::LossScaler,
    outcome::{GroupNorm, StepError, StepOutcome},
    partition::{Partition, Segment, intersect},
    schedule::Rates,
};
use crate::clock;
use crate::collective::{BufMut, Collective, Reduce};
use coxswain_nn::{
    kernels::flat::{self, Flat, Part},
    params::{Group, ParamSpec, TrainableLayout},
    rules::{self, Hyperparameters, ParamPiece, ParamUpdate, StateValues, UpdateRule, rule_of},
};

/// A run's update rule and everything else that is said of its optimizer.
#[derive(Clone, Debug)]
pub struct RunRule<F: Flat> {
    /// Section `optimizer`. Its name of a rule counts where the rule was made from it.
    pub settings: Optimizer,
    /// The rule.
    pub rule: Arc<dyn UpdateRule<F>>,
}

impl<F: Flat> RunRule<F> {
    /// The part of a rank, cut where the rule allows it.
    pub fn partition(&self, layout: &TrainableLayout, world: usize, rank: Rank) -> Partition {
        Partition::new(self.rule.grain().cuts(layout, world), rank)
    }
}

impl<F: Flat> From<&Optimizer> for RunRule<F> {
    fn from(settings: &Optimizer) -> Self {
        Self { settings: settings.clone(), rule: rule_of(settings) }
    }
}

/// An optimizer whose state exists only for this rank's part of the flat parameter buffer.
#[derive(Clone, Debug)]
pub struct ShardedOptimizer<F: Flat = Vec<f32>> {
    pub(super) place: F::Place,
    pub(super) layout: TrainableLayout,
    pub(super) partition: Partition,
    segments: Vec<Segment>,
    pub(super) rule: RunRule<F>,
    pub(super) exchange: Exchange<F>,
    /// What of each parameter is in this rank's part.
    pub(super) pieces: Vec<ParamPiece>,
    /// What the rule keeps of them, in the order of its buffers.
    pub(super) state: Vec<StateValues<F>>,
    /// The average of the weights, if the run keeps one.
    pub(super) average: Option<Average<F>>,
    /// Steps of the run that are done.
    pub(super) steps: u64,
    /// Steps left out among those done: bias correction counts the others.
    pub(super) skipped: u64,
    /// Norm of the global gradient of the last of them.
    pub(super) last_norm: f64,
    /// What the loss is multiplied by, if the run scales it.
    pub(super) loss_scaler: Option<LossScaler>,
}

/// What one step needs besides its buffers.
#[derive(Clone, Debug, PartialEq)]
pub struct StepInput {
    /// Applied to the summed gradients before anything else: one over the valid elements of the global batch.
    pub scale: f64,
    /// Learning rates of this step ([`LearningRateSchedule::rates`](super::LearningRateSchedule::rates)).
    pub rates: Rates,
    /// A group that stays as it is in this step, whatever its gradients hold.
    pub resting: Option<Group>,
}

/// How reduced gradients are applied, the same on all ranks.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Update {
    input: StepInput,
    /// Norm of the scaled global gradient.
    norm: f64,
    clips: Clips,
}

/// Factors that bring norms down to `clip_norm`; 1 where they need not be.
#[derive(Clone, Debug, PartialEq)]
enum Clips {
    /// The factor of the global norm.
    All(f64),
    /// The factor of each group's own norm.
    Groups(Vec<(Group, f64)>),
}

impl Clips {
    /// And whether anything is scaled down.
    fn new(clip_norm: &PerGroup<f64>, norm: f64, groups: &[GroupNorm]) -> (Self, bool) {
        if let PerGroup::All(most) = clip_norm {
            let (clip, clipped) = clip_coefficient(*most, norm);
            return (Self::All(clip), clipped);
        }
        let mut any = false;
        let each = groups.iter().map(|GroupNorm { group, norm }| {
            let (clip, clipped) = clip_coefficient(clip_norm.of(group.0), *norm);
            any |= clipped;
            (*group, clip)
        });
        (Self::Groups(each.collect()), any)
    }

    fn of(&self, group: Group) -> f64 {
        match self {
            Self::All(clip) => *clip,
            Self::Groups(clips) => {
                clips.iter().find(|(known, _)| *known == group).map_or(1.0, |(_, clip)| *clip)
            }
        }
    }
}

impl Update {
    /// Norm of the scaled global gradient, before clipping.
    pub fn norm(&self) -> f64 {
        self.norm
    }
}

/// What the first half of a step came to.
pub(super) struct ReducedGradients {
    group_norms: Vec<GroupNorm>,
    clipped: bool,
    pub compute: Duration,
    pub update: Update,
}

impl ReducedGradients {
    /// The step's outcome, given the time of its computations and of all of it.
    pub fn outcome(self, compute: Duration, total: Duration) -> StepOutcome {
        let Self { group_norms, clipped, update, .. } = self;
        let communication = total.saturating_sub(compute);
        StepOutcome { grad_norm: update.norm, group_norms, clipped, compute, communication }
    }
}

/// What the optimizer and its buffers take on one rank.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ZeroBytes {
    /// The flat weights, full length; this rank's part of them is the master copy.
    pub weights: Bytes,
    /// The rule's state and, where one is kept, the average of the weights: this rank's part.
    pub state: Bytes,
    /// The flat gradients, full length.
    pub grads: Bytes,
    /// What the communicator holds for itself, and what gradients travel in where that is not their own
    /// buffer.
    pub comm_buffers: Bytes,
    /// What these take when they are not partitioned, for comparison.
    pub state_unpartitioned: Bytes,
    /// What is kept in store for a lost rank ([`ReplicatedOptimizer`](super::ReplicatedOptimizer)).
    pub redundancy: Bytes,
}

impl ShardedOptimizer {
    /// State of zero, in host memory, for `rank`'s part of `layout` in a world of `world`.
    pub fn new(
        layout: &TrainableLayout,
        world: usize,
        rank: Rank,
        rule: impl Into<RunRule<Vec<f32>>>,
    ) -> Self {
        let rule = rule.into();
        Self::at(&(), layout, rule.partition(layout, world, rank), rule, false)
    }
}

impl<F: Flat> ShardedOptimizer<F> {
    /// State of zero for one rank's part of `layout`; in host memory between steps if `offloaded`, wherever
    /// the rest is.
    pub fn at(
        place: &F::Place,
        layout: &TrainableLayout,
        partition: Partition,
        rule: impl Into<RunRule<F>>,
        offloaded: bool,
    ) -> Self {
        let rule = rule.into();
        let zeros = |len| if offloaded { F::offloaded(place, len) } else { F::zeros(place, len) };
        let (own, buffers, settings) = (partition.own(), rule.rule.state(), &rule.settings);
        let counts = rules::counts(buffers, layout, &own);
        let state = buffers.iter().zip(counts);
        Self {
            place: place.clone(),
            layout: layout.clone(),
            segments: partition.segments(layout),
            exchange: Exchange::new(settings.reduce_dtype),
            pieces: rules::pieces(buffers, layout, &own),
            state: state.map(|(buffer, len)| StateValues::zeros(buffer.element, len, zeros)).collect(),
            average: Average::wanted(settings, || zeros(own.len())),
            steps: 0,
            skipped: 0,
            last_norm: 0.0,
            loss_scaler: LossScaler::wanted(&settings.loss_scale),
            partition,
            rule,
        }
    }

    /// This rank's place.
    pub fn partition(&self) -> &Partition {
        &self.partition
    }

    /// Steps of the run that are done, including those before the state was imported, and those left out.
    pub fn steps(&self) -> u64 {
        self.steps
    }

    /// A step of the run is done without this optimizer: state and bias correction are as before it, and
    /// the loss scale too, unless the gradient overflowed.
    pub(super) fn skip(&mut self, overflows: bool) {
        self.steps += 1;
        self.skipped += 1;
        self.loss_scaler.iter_mut().for_each(|scaler| scaler.left_out(overflows));
    }

    /// Takes one step. `grads` holds this rank's summed gradients and is scratch afterwards; `weights` must
    /// be as the last step left them and are the same on all ranks afterwards. Both have the layout's length.
    pub fn step(
        &mut self,
        grads: &mut F,
        weights: &mut F,
        input: &StepInput,
        comm: &mut dyn Collective,
    ) -> Result<StepOutcome, StepError> {
        let begin = clock::now();
        let reduced = self.reduce(grads, weights.len(), input, comm)?;
        let (updating, own) = (clock::now(), self.partition.own());
        self.advance(grads, weights, own.start, &reduced.update);
        let compute = reduced.compute + updating.elapsed();
        comm.all_gather_parts(weights.lend().into(), self.partition.cuts())?;
        Ok(reduced.outcome(compute, begin.elapsed()))
    }

    /// First half of a step: this rank's chunk of `grads` becomes the sum over ranks, and the norm of all
    /// chunks says how to apply it. Changes neither weights nor state.
    pub(super) fn reduce(
        &mut self,
        grads: &mut F,
        weights: usize,
        input: &StepInput,
        comm: &mut dyn Collective,
    ) -> Result<ReducedGradients, StepError> {
        self.check(grads.len(), weights, comm)?;
        self.exchange.reduce_scatter(grads, &self.partition, comm)?;
        let begin = clock::now();
        // The whole first: an element's sum over ranks does not depend on those behind it.
        let mut groups = self.layout.groups();
        groups.retain(|group| input.resting != Some(*group));
        let mut sums = self.sums_of_squares(grads, input.resting, &groups);
        let compute = begin.elapsed();
        comm.all_reduce(BufMut::F64(&mut sums), Reduce::Sum)?;
        let grad_norm = sums[0].sqrt() * input.scale;
        if !grad_norm.is_finite() {
            let (rank, parameter) = (self.partition.rank(), self.first_non_finite(grads, input.resting));
            return Err(StepError::NonFinite { norm: grad_norm, rank, parameter });
        }
        let norms = groups.into_iter().zip(&sums[1..]);
        let group_norms: Vec<_> =
            norms.map(|(group, sum)| GroupNorm { group, norm: sum.sqrt() * input.scale }).collect();
        let (clips, clipped) = Clips::new(&self.rule.settings.clip_norm, grad_norm, &group_norms);
        let update = Update { input: input.clone(), norm: grad_norm, clips };
        Ok(ReducedGradients { group_norms, clipped, compute, update })
    }

    /// Second half: the update rule on this rank's part. Gradients are full length; in `weights` the part
    /// begins at `weights_from`.
    pub(super) fn advance(&mut self, grads: &F, weights: &mut F, weights_from: usize, how: &Update) {
        self.steps += 1;
        self.loss_scaler.iter_mut().for_each(LossScaler::taken);
        self.last_norm = how.norm;
        let taken = self.steps - self.skipped;
        let param = |piece: &ParamPiece| &self.layout.params()[piece.param];
        let moving = self.pieces.iter().filter(|piece| how.input.resting != Some(param(piece).group));
        let update = |piece| {
            let param = param(piece);
            ParamUpdate { param, piece, with: hyperparameters(&self.rule.settings, taken, param, how) }
        };
        let updates: Vec<_> = moving.map(update).collect();
        let average = self.average.as_mut().map(|average| {
            let share = average.share(taken);
            flat::Average { values: &mut average.values, share }
        });
        let (grads_from, state) = (self.partition.own().start, &mut self.state[..]);
        let part = Part { weights, weights_from, state, grads, grads_from };
        self.rule.rule.update(part, &updates, average);
    }

    /// Bytes of everything that is kept of this rank's part besides its weights.
    pub(super) fn state_bytes(&self) -> u64 {
        let average = self.average.as_ref().map_or(0, |of| 4 * of.values.len());
        (self.state.iter().map(StateValues::bytes).sum::<usize>() + average) as u64
    }

    /// Bytes of everything that is kept of all ranks' parts together besides their weights.
    pub(super) fn whole_state_bytes(&self) -> u64 {
        let average = if self.average.is_some() { 4 * self.layout.len() as u64 } else { 0 };
        rules::bytes(self.rule.rule.state(), &self.layout, &(0..self.layout.len())) + average
    }

    /// Sums of squares over this rank's part: all that moves, then group by group. Gradients are read once
    /// where nothing rests: they are the most that a step reads besides weights and moments.
    fn sums_of_squares(&self, grads: &F, resting: Option<Group>, groups: &[Group]) -> Vec<f64> {
        if resting.is_some() {
            let of_groups = groups.iter().map(|&group| self.squares_of(grads, |other| other == group));
            return [self.squares(grads, resting)].into_iter().chain(of_groups).collect();
        }
        let runs: Vec<&[Segment]> = self.segments.chunk_by(|one, next| one.group == next.group).collect();
        let ranges: Vec<_> =
            runs.iter().filter_map(|run| Some(run.first()?.range.start..run.last()?.range.end)).collect();
        let (whole, of_runs) = grads.squares_by_run(self.partition.own(), &ranges);
        let of_group = |group: &Group| {
            let its = runs.iter().zip(&of_runs).filter(|(run, _)| run[0].group == *group);
            its.map(|(_, sum)| sum).sum::<f64>()
        };
        [whole].into_iter().chain(groups.iter().map(of_group)).collect()
    }

    /// Sum of squares over this rank's part, as far as it moves.
    fn squares(&self, grads: &F, resting: Option<Group>) -> f64 {
        match resting {
            Some(resting) => self.squares_of(grads, |group| group != resting),
            None => grads.squares(&[self.partition.own()]),
        }
    }

    /// Sum of squares over some groups' elements in this rank's part.
    fn squares_of(&self, grads: &F, of: impl Fn(Group) -> bool) -> f64 {
        let segments = self.segments.iter().filter(|segment| of(segment.group));
        grads.squares(&segments.map(|segment| segment.range.clone()).collect::<Vec<_>>())
    }

    /// What optimizer, gradients and weights take on this rank.
    pub fn bytes(&self, comm: &dyn Collective) -> ZeroBytes {
        let floats = |count: usize| Bytes(4 * count as u64);
        let whole = self.partition.whole_len();
        ZeroBytes {
            weights: floats(whole),
            state: Bytes(self.state_bytes()),
            grads: floats(whole),
            comm_buffers: Bytes(comm.buffer_bytes() as u64 + self.exchange.bytes()),
            state_unpartitioned: Bytes(self.whole_state_bytes()),
            redundancy: Bytes(0),
        }
    }

    fn check(&self, grads: usize, weights: usize, comm: &dyn Collective) -> Result<(), StepError> {
        let whole = self.partition.whole_len();
        for (what, expected, found) in [
            ("elements of the gradients", whole, grads),
            ("elements of the weights", whole, weights),
            ("ranks of the communicator", self.partition.world(), comm.world()),
            ("rank in the communicator", self.partition.rank().0 as usize, comm.rank().0 as usize),
        ] {
            if expected != found {
                return Err(StepError::Shape { what, expected, found });
            }
        }
        Ok(())
    }

    /// The first parameter whose gradient, in this rank's part, is not finite.
    fn first_non_finite(&self, grads: &F, resting: Option<Group>) -> Option<String> {
        let own = self.partition.own();
        let bad = |p: &&ParamSpec| {
            let here = intersect(&p.range(), &own);
            !here.is_empty() && grads.read(here).iter().any(|g| !g.is_finite())
        };
        let mut moving = self.layout.params().iter().filter(|param| resting != Some(param.group));
        moving.find(bad).map(|param| param.name.clone())
    }
}

/// As `torch.nn.utils.clip_grad_norm_`.
fn clip_coefficient(clip_norm: f64, norm: f64) -> (f64, bool) {
    if clip_norm <= 0.0 {
        return (1.0, false);
    }
    let coefficient = clip_norm / (norm + 1e-6);
    (coefficient.min(1.0), coefficient < 1.0)
}

fn hyperparameters(
    settings: &Optimizer,
    step: u64,
    param: &ParamSpec,
    Update { input, clips, .. }: &Update,
) -> Hyperparameters {
    Hyperparameters {
        gradient_factor: input.scale * clips.of(param.group),
        lr: input.rates.of(param.group),
        weight_decay: if param.decay { settings.weight_decay.of(param.group.0) } else { 0.0 },
        step,
    }
}

#[cfg(test)]
mod tests;
