//! One optimizer step over a partitioned flat parameter buffer.
//!
//! ```text
//! gradients, full length, different on every rank
//!   -> reduce-scatter in place        this rank's chunk is the sum over ranks (`exchange`)
//!   -> norm over all chunks           one f64 around the ring, and one a group; not finite: an error,
//!                                     nothing has changed
//!   -> AdamW on this rank's chunk     of the flat weights, which is their master copy; then their average
//!                                     follows, where one is kept
//!   -> all-gather in place            everyone has all weights
//! ```
//!
//! In a world of one the collectives do nothing and this is plain AdamW, without a copy.
//!
//! Gradients, weights and moments are buffers of one kind ([`Flat`]), in host memory or in a device's;
//! nothing here looks at an element but the search for one that is not finite. On a device work is ordered
//! and not waited for: what a step's times call computing is then found in whatever waits next.
//!
//! A step can let a group rest ([`StepInput::resting`]): it is treated as parameters whose gradient is `None`
//! are in torch. Its weights and moments keep their bits, by decay as little as by momentum, and the norm is
//! that of what moves. One thing differs: torch counts steps for each parameter, and here one count, that of
//! the bias correction, goes on for everyone (docs/decisions/lora-rests.md says what that comes to).

use std::time::Duration;

use coxswain_proto::{
    ids::{Bytes, Rank},
    run_spec::{Optimizer, PerGroup},
};

use super::{
    average::Average,
    exchange::Exchange,
    loss_scale::LossScaler,
    outcome::{GroupNorm, StepError, StepOutcome},
    partition::{Partition, Segment, intersect, shifted},
    schedule::Rates,
};
use crate::clock;
use crate::collective::{BufMut, Collective, Reduce};
use coxswain_nn::{
    kernels::flat::{Coefficients, Flat, Part, Run},
    params::{Group, TrainableLayout},
};

/// AdamW whose moments exist only for this rank's part of the flat parameter buffer.
#[derive(Clone, Debug)]
pub struct ShardedAdamW<F: Flat = Vec<f32>> {
    pub(super) place: F::Place,
    pub(super) layout: TrainableLayout,
    pub(super) partition: Partition,
    segments: Vec<Segment>,
    settings: Optimizer,
    pub(super) exchange: Exchange<F>,
    pub(super) exp_avg: F,
    pub(super) exp_avg_sq: F,
    /// That of the weights, if the run keeps one.
    pub(super) average: Option<Average<F>>,
    /// Steps of the run that are done.
    pub(super) steps: u64,
    /// Of these, steps that were left out: bias correction counts the others.
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
    /// That of the global norm.
    All(f64),
    /// That of each group's own.
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
pub(super) struct Reduced {
    group_norms: Vec<GroupNorm>,
    clipped: bool,
    pub compute: Duration,
    pub update: Update,
}

impl Reduced {
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
    /// Both moments and, where one is kept, the average of the weights: this rank's part.
    pub moments: Bytes,
    /// The flat gradients, full length.
    pub grads: Bytes,
    /// What the communicator holds for itself, and what gradients travel in where that is not their own
    /// buffer.
    pub comm_buffers: Bytes,
    /// What these take when they are not partitioned, for comparison.
    pub moments_unpartitioned: Bytes,
    /// What is kept in store for a lost rank ([`ReplicatedAdamW`](super::ReplicatedAdamW)).
    pub redundancy: Bytes,
}

impl ShardedAdamW {
    /// Moments of zero, in host memory, for `rank`'s part of `layout` in a world of `world`.
    pub fn new(layout: &TrainableLayout, world: usize, rank: Rank, settings: &Optimizer) -> Self {
        Self::at(&(), layout, Partition::new(layout.len(), world, rank), settings, false)
    }
}

impl<F: Flat> ShardedAdamW<F> {
    /// Moments of zero for one rank's part of `layout`; in host memory between steps if `offloaded`, wherever
    /// the rest is.
    pub fn at(
        place: &F::Place,
        layout: &TrainableLayout,
        partition: Partition,
        settings: &Optimizer,
        offloaded: bool,
    ) -> Self {
        let zeros = if offloaded { F::offloaded } else { F::zeros };
        let own = partition.own().len();
        Self {
            place: place.clone(),
            layout: layout.clone(),
            segments: partition.segments(layout),
            partition,
            settings: settings.clone(),
            exchange: Exchange::new(settings.reduce_dtype),
            exp_avg: zeros(place, own),
            exp_avg_sq: zeros(place, own),
            average: Average::wanted(settings, || zeros(place, own)),
            steps: 0,
            skipped: 0,
            last_norm: 0.0,
            loss_scaler: LossScaler::wanted(&settings.loss_scale),
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

    /// A step of the run is done without this optimizer: moments and bias correction are as before it, and
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
        comm.all_gather_in_place(weights.lend().into())?;
        Ok(reduced.outcome(compute, begin.elapsed()))
    }

    /// First half of a step: this rank's chunk of `grads` becomes the sum over ranks, and the norm of all
    /// chunks says how to apply it. Changes neither weights nor moments.
    pub(super) fn reduce(
        &mut self,
        grads: &mut F,
        weights: usize,
        input: &StepInput,
        comm: &mut dyn Collective,
    ) -> Result<Reduced, StepError> {
        self.check(grads.len(), weights, comm)?;
        self.exchange.reduce_scatter(grads, self.partition.own(), comm)?;
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
        let (clips, clipped) = Clips::new(&self.settings.clip_norm, grad_norm, &group_norms);
        let update = Update { input: input.clone(), norm: grad_norm, clips };
        Ok(Reduced { group_norms, clipped, compute, update })
    }

    /// Second half: AdamW on this rank's part. Gradients are full length; in `weights` the part begins at
    /// `weights_from`.
    pub(super) fn advance(&mut self, grads: &F, weights: &mut F, weights_from: usize, how: &Update) {
        self.steps += 1;
        self.loss_scaler.iter_mut().for_each(LossScaler::taken);
        self.last_norm = how.norm;
        let (settings, begin) = (&self.settings, self.partition.own().start);
        let taken = self.steps - self.skipped;
        let moving = self.segments.iter().filter(|segment| how.input.resting != Some(segment.group));
        let runs = moving.map(|segment| Run {
            range: shifted(&segment.range, begin),
            coefficients: coefficients(settings, taken, segment, how),
        });
        let runs: Vec<_> = runs.collect();
        let (exp_avg, exp_avg_sq) = (&mut self.exp_avg, &mut self.exp_avg_sq);
        let part = Part { weights, weights_from, exp_avg, exp_avg_sq, grads, grads_from: begin };
        match &mut self.average {
            Some(average) => {
                let share = average.share(taken);
                F::adamw_averaging(part, &runs, &mut average.values, share);
            }
            None => F::adamw(part, &runs),
        }
    }

    /// Everything that is kept of this rank's part besides its weights.
    pub(super) fn buffers(&self) -> impl Iterator<Item = &F> {
        [&self.exp_avg, &self.exp_avg_sq].into_iter().chain(self.average.iter().map(|of| &of.values))
    }

    /// The same, to be changed.
    pub(super) fn buffers_mut(&mut self) -> impl Iterator<Item = &mut F> {
        let average = self.average.as_mut().map(|of| &mut of.values);
        [&mut self.exp_avg, &mut self.exp_avg_sq].into_iter().chain(average)
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
        let buffers = self.buffers().count();
        ZeroBytes {
            weights: floats(whole),
            moments: floats(buffers * self.partition.own().len()),
            grads: floats(whole),
            comm_buffers: Bytes(comm.buffer_bytes() as u64 + self.exchange.bytes()),
            moments_unpartitioned: floats(buffers * whole),
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
        let bad = |p: &&coxswain_nn::params::ParamSpec| {
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

fn coefficients(
    settings: &Optimizer,
    steps: u64,
    segment: &Segment,
    Update { input, clips, .. }: &Update,
) -> Coefficients {
    let lr = input.rates.of(segment.group);
    let [beta1, beta2] = settings.betas;
    let decay = if segment.decay { settings.weight_decay.of(segment.group.0) } else { 0.0 };
    let power = |beta: f64| beta.powf(steps as f64);
    Coefficients {
        factor: (input.scale * clips.of(segment.group)) as f32,
        one_minus_beta1: (1.0 - beta1) as f32,
        beta2: beta2 as f32,
        one_minus_beta2: (1.0 - beta2) as f32,
        keep: (1.0 - lr * decay) as f32,
        step_size: (lr / (1.0 - power(beta1))) as f32,
        root_factor: (1.0 / (1.0 - power(beta2)).sqrt()) as f32,
        eps: settings.eps as f32,
    }
}

#[cfg(test)]
mod tests;
