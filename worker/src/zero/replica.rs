//! The optimizer's part of surviving a lost rank: every part of the flat parameter buffer exists twice, in
//! two versions.
//!
//! A *version* is the state after so many steps: weights, the update rule's state of them and, where one is
//! kept, their average. While a step is under way, ranks are in the version before it or in the one after
//! it. To go on without a lost rank, all of them must agree on one version of which every part is still
//! somewhere. One step:
//!
//! ```text
//! reduce-scatter, norm
//! shift        each rank's reduced chunk goes to the rank that keeps its replica, too: a rank that has both
//!              chunks and the norm is *prepared*: it can take the step on its own part and on its replica
//!              without any other rank's help
//! barrier      passed: everybody is prepared
//! update       of the own part and of the replica, in place
//! all-gather   of the new weights
//! ```
//!
//! If any rank has passed the barrier, all were prepared, and every part exists in the version after the
//! step: taken already, or still to be taken from the chunks in the gradient buffer. If no living rank
//! has passed it, none has changed anything, and every part exists in the version before. The replica repeats
//! the owner's arithmetic on the owner's numbers, so it holds the same bits, and the network carries 4 bytes
//! an element and no state. It costs weights and state of one part (12 bytes an element with AdamW, 16 with
//! an average as well), and a barrier a step.
//!
//! It survives the loss of any ranks of which none keeps another's replica: those of a node, since the
//! replicas are so far along the ring ([`Placement`](coxswain_proto::replicas::Placement)) that they are on
//! another one. Choosing the version and moving the parts is [`train::recovery`](crate::train::recovery)'s
//! affair.

mod digests;
mod parts;

use std::{borrow::Cow, io::Write, ops::Range};

use coxswain_proto::ids::{Bytes, Rank};

pub use self::{
    digests::{Digests, PartDigests},
    parts::{Copy, ShardState, Versions},
};
use super::{
    loss_scale::ScaleState,
    optimizer::{RunRule, ShardedOptimizer, StepInput, Update, ZeroBytes},
    outcome::{StepError, StepOutcome},
    partition::{Partition, intersect, shifted},
    state::StateError,
};
use crate::clock;
use crate::collective::{Collective, Cuts};
use coxswain_nn::{
    kernels::flat::Flat,
    params::TrainableLayout,
    rules::{self, StateValues},
    tensor_file::ReadAt,
};

/// [`ShardedOptimizer`], and what is kept in store for a lost rank.
#[derive(Debug)]
pub struct ReplicatedOptimizer<F: Flat = Vec<f32>> {
    pub(super) own: ShardedOptimizer<F>,
    /// Absent in a world of one, and where it is switched off.
    replica: Option<Replica<F>>,
    /// How the chunks in the gradient buffer are applied, from the shift of a step until it is taken.
    prepared: Option<Update>,
    /// The newest step was left out, so that the version before it is there, too: a rank that was disturbed
    /// when all found that out may still be in it.
    left_out: bool,
}

/// What a rank keeps beside the weights that train, and where.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Keeps {
    /// If there is another rank, a replica of the part of the rank so many before this one.
    pub replica: Option<u32>,
    /// State and replica in host memory between steps, wherever the weights are.
    pub offloaded: bool,
}

/// The part of another rank.
#[derive(Debug)]
struct Replica<F: Flat> {
    /// How far this rank comes after the one whose part it is.
    distance: usize,
    shard: ShardedOptimizer<F>,
    weights: F,
}

impl<F: Flat> Replica<F> {
    fn range(&self) -> Range<usize> {
        self.shard.partition().own()
    }
}

impl ReplicatedOptimizer {
    /// State of zero, in host memory, for `rank`'s part in a world of `world`; with a
    /// [`replica`](Keeps::replica) or without.
    pub fn new(
        layout: &TrainableLayout,
        world: usize,
        rank: Rank,
        rule: impl Into<RunRule<Vec<f32>>>,
        replica: Option<u32>,
    ) -> Self {
        let (rule, keeps) = (rule.into(), Keeps { replica, offloaded: false });
        Self::at(&(), layout, rule.partition(layout, world, rank), rule, keeps)
    }
}

impl<F: Flat> ReplicatedOptimizer<F> {
    /// State of zero for one rank's part, with all buffers at `place`.
    pub fn at(
        place: &F::Place,
        layout: &TrainableLayout,
        partition: Partition,
        rule: impl Into<RunRule<F>>,
        keeps: Keeps,
    ) -> Self {
        let (rule, Keeps { replica, offloaded }) = (rule.into(), keeps);
        let zeros = if offloaded { F::offloaded } else { F::zeros };
        let replica = replica.filter(|_| partition.world() > 1).map(|distance| {
            let distance = distance as usize;
            let before = partition.before(distance);
            let shard = ShardedOptimizer::at(place, layout, before, rule.clone(), offloaded);
            let len = shard.partition().own().len();
            Replica { distance, shard, weights: zeros(place, len) }
        });
        let own = ShardedOptimizer::at(place, layout, partition, rule, offloaded);
        Self { own, replica, prepared: None, left_out: false }
    }

    /// Declares that the rule's state (of all parts of this rank) and `weights`, full length, are the state
    /// after `steps` steps, of which so many were left out.
    pub fn begin(&mut self, steps: u64, skipped: u64, weights: &[f32]) {
        (self.own.steps, self.own.skipped) = (steps, skipped);
        (self.prepared, self.left_out) = (None, false);
        if let Some(replica) = &mut self.replica {
            (replica.shard.steps, replica.shard.skipped) = (steps, skipped);
            let part = &weights[replica.range()];
            replica.weights.edit(|values| values.copy_from_slice(part));
        }
    }

    /// Takes over state from the files of a checkpoint ([`ShardedOptimizer::import`]), whose weights are
    /// `weights`, full length. An average that is kept and not in the files begins with these weights;
    /// whether it had to.
    pub fn import<S: ReadAt>(&mut self, files: &[S], weights: &[f32]) -> Result<bool, StateError> {
        let mut found = self.own.import(files)?;
        if let Some(replica) = &mut self.replica {
            found &= replica.shard.import(files)?;
        }
        if !found {
            self.begin_average(weights);
        }
        self.begin(self.own.steps(), self.own.skipped, weights);
        Ok(!found)
    }

    /// The average, where one is kept, begins with these weights, full length.
    pub fn begin_average(&mut self, weights: &[f32]) {
        self.own.begin_average(weights);
        self.replica.iter_mut().for_each(|replica| replica.shard.begin_average(weights));
    }

    /// This rank's part of the flat parameter buffer, and the average of its weights; none if none is kept.
    pub fn average(&self) -> Option<(Range<usize>, &F)> {
        Some((self.own.partition().own(), &self.own.average.as_ref()?.values))
    }

    /// Puts the average of this rank's part in its place in `weights`, and that part where the average was;
    /// or back; whether one is kept. In between this rank has no state to give away.
    pub fn exchange_average(&mut self, weights: &mut F) -> bool {
        let start = self.own.partition().own().start;
        let Some(average) = &mut self.own.average else { return false };
        weights.exchange(start, &mut average.values);
        true
    }

    /// Whether some of the elements `range` of the flat parameter buffer are in a part that this rank keeps.
    pub fn keeps_of(&self, range: &Range<usize>) -> bool {
        let replicated = self.replica.as_ref().map(Replica::range);
        [Some(self.own.partition().own()), replicated]
            .into_iter()
            .flatten()
            .any(|part| !intersect(&part, range).is_empty())
    }

    /// Takes the rule's state (and the average) of the elements `range` of the flat parameter buffer, as far
    /// as they are in a part that this rank keeps.
    pub fn adopt(&mut self, range: &Range<usize>, state: &ShardState) {
        let shards = [Some(&mut self.own), self.replica.as_mut().map(|replica| &mut replica.shard)];
        for shard in shards.into_iter().flatten() {
            let part = shard.partition().own();
            let shared = intersect(&part, range);
            if shared.is_empty() {
                continue;
            }
            let counts = |range: Range<usize>| rules::counts(shard.rule.rule.state(), &shard.layout, &range);
            let (lens, ours) = (counts(shared.clone()), counts(part.start..shared.start));
            let places = lens.into_iter().zip(ours.into_iter().zip(counts(range.start..shared.start)));
            for (to, (from, (len, (here, there)))) in
                shard.state.iter_mut().zip(state.state.iter().zip(places))
            {
                to.copy_from(here..here + len, from, there);
            }
            let (to, from) = (shifted(&shared, part.start), shifted(&shared, range.start));
            if let Some(average) = &mut shard.average {
                average.values.edit(|values| values[to].copy_from_slice(&state.average[from]));
            }
        }
    }

    /// Takes one step, as [`ShardedOptimizer::step`]. If it fails, `grads` must stay as it is until
    /// [`ReplicatedOptimizer::state`] has been asked for what is needed of it.
    pub fn step(
        &mut self,
        grads: &mut F,
        weights: &mut F,
        input: &StepInput,
        comm: &mut dyn Collective,
    ) -> Result<StepOutcome, StepError> {
        // All ranks have voted for this step, so none is before the one that was left out.
        self.left_out = false;
        let Some(replica) = &mut self.replica else { return self.own.step(grads, weights, input, comm) };
        let begin = clock::now();
        let reduced = self.own.reduce(grads, weights.len(), input, comm)?;
        self.own.exchange.shift(grads, &self.own.partition, replica.distance, comm)?;
        self.prepared = Some(reduced.update.clone());
        comm.barrier()?;
        let (updating, own) = (clock::now(), self.own.partition().own());
        self.prepared = None;
        self.own.advance(grads, weights, own.start, &reduced.update);
        replica.shard.advance(grads, &mut replica.weights, 0, &reduced.update);
        let compute = reduced.compute + updating.elapsed();
        comm.all_gather_parts(weights.lend().into(), self.own.partition.cuts())?;
        Ok(reduced.outcome(compute, begin.elapsed()))
    }

    /// All ranks leave a step out: weights and state stay as they are. Of one whose gradient overflows the
    /// loss scale is lowered.
    pub fn skip(&mut self, overflows: bool) {
        self.own.skip(overflows);
        self.replica.iter_mut().for_each(|replica| replica.shard.skip(overflows));
        self.left_out = true;
    }

    /// What the loss is multiplied by; none if it is not scaled.
    pub fn loss_scale(&self) -> Option<ScaleState> {
        self.own.loss_scaler.map(|scaler| scaler.state())
    }

    /// What the loss is multiplied by in the newest of its [`versions`](Self::versions), and in the one
    /// before.
    pub fn loss_scales(&self) -> Option<[ScaleState; 2]> {
        let mut scaler = self.own.loss_scaler?;
        let now = scaler.state();
        if self.prepared.is_some() {
            scaler.taken();
            return Some([scaler.state(), now]);
        }
        Some([now, if self.left_out { scaler.state_before() } else { now }])
    }

    /// Goes on with this scale, if the loss is scaled at all and there is one.
    pub fn restore_loss_scale(&mut self, state: Option<ScaleState>) {
        let Some(state) = state else { return };
        let shards = [Some(&mut self.own), self.replica.as_mut().map(|replica| &mut replica.shard)];
        let scalers = shards.into_iter().flatten().filter_map(|shard| shard.loss_scaler.as_mut());
        scalers.for_each(|scaler| scaler.restore(state));
    }

    /// Steps that were left out, in the newest of its [`versions`](Self::versions), and whether the newest
    /// step is one of them.
    pub fn skipped(&self) -> (u64, bool) {
        (self.own.skipped, self.left_out)
    }

    /// Which versions of its own part and of its replica this rank can give.
    pub fn versions(&self) -> (Versions, Option<Versions>) {
        let prepared = self.prepared.is_some();
        let of = |shard: &ShardedOptimizer<F>| Versions {
            newest: shard.steps() + u64::from(prepared),
            older: prepared || self.left_out,
        };
        (of(&self.own), self.replica.as_ref().map(|replica| of(&replica.shard)))
    }

    /// One of the parts of this rank in one of its [`versions`](Self::versions); `weights` (seen by the host)
    /// and `grads` are full length, as the last step left them. None if it is not there.
    pub fn state(&self, copy: Copy, version: u64, weights: &[f32], grads: &F) -> Option<ShardState> {
        let (shard, weights) = match copy {
            Copy::Own => (&self.own, Cow::Borrowed(&weights[self.own.partition().own()])),
            Copy::Replica => {
                let Replica { shard, weights, .. } = self.replica.as_ref()?;
                (shard, weights.read(0..weights.len()))
            }
        };
        if version == shard.steps() || (self.left_out && version + 1 == shard.steps()) {
            return Some(snapshot(shard, weights.into_owned()));
        }
        let update = self.prepared.as_ref().filter(|_| version == shard.steps() + 1)?;
        let (mut shard, mut weights) = (shard.clone(), F::of(&shard.place, weights.into_owned()));
        shard.advance(grads, &mut weights, 0, update);
        Some(snapshot(&shard, weights.read(0..weights.len()).into_owned()))
    }

    /// Zeros for some elements of the flat parameter buffer, which begin and end where parts may.
    pub fn empty_state(&self, range: &Range<usize>) -> ShardState {
        let (buffers, own) = (self.own.rule.rule.state(), &self.own);
        let counts = buffers.iter().zip(rules::counts(buffers, &own.layout, range));
        let zeros = |len: usize| vec![0.0; len];
        ShardState {
            weights: zeros(range.len()),
            state: counts.map(|(buffer, len)| StateValues::zeros(buffer.element, len, zeros)).collect(),
            average: if own.average.is_some() { zeros(range.len()) } else { Vec::new() },
        }
    }

    /// The parts of the flat parameter buffer in a world of any size.
    pub fn cuts_in(&self, world: usize) -> Cuts {
        self.own.rule.rule.grain().cuts(&self.own.layout, world)
    }

    /// The part that is a rank's in a world of any size.
    pub fn part_in(&self, world: usize, rank: usize) -> Range<usize> {
        self.cuts_in(world).part(rank)
    }

    /// The parts in this world.
    pub fn cuts(&self) -> &Cuts {
        self.own.partition().cuts()
    }

    /// Ranks that share the flat parameter buffer.
    pub fn world(&self) -> usize {
        self.own.partition().world()
    }

    /// This rank.
    pub fn rank(&self) -> Rank {
        self.own.partition().rank()
    }

    /// How many ranks before it the rank is whose part its replica is of; 1 without one.
    pub fn distance(&self) -> u32 {
        self.replica.as_ref().map_or(1, |replica| replica.distance as u32)
    }

    /// Steps taken.
    pub fn steps(&self) -> u64 {
        self.own.steps()
    }

    /// Norm of the global gradient, before clipping, of the last step taken or prepared.
    pub fn last_norm(&self) -> f64 {
        self.prepared.as_ref().map_or(self.own.last_norm, Update::norm)
    }

    /// Writes this rank's state ([`ShardedOptimizer::write_to`]).
    pub fn write_to(&self, out: &mut dyn Write) -> std::io::Result<u64> {
        self.own.write_to(out)
    }

    /// Bytes of all ranks' state together.
    pub fn whole_state_bytes(&self) -> u64 {
        self.own.whole_state_bytes()
    }

    /// What all of it takes on this rank.
    pub fn bytes(&self, comm: &dyn Collective) -> ZeroBytes {
        let of_replica =
            |replica: &Replica<F>| 4 * replica.range().len() as u64 + replica.shard.state_bytes();
        let redundancy = Bytes(self.replica.as_ref().map_or(0, of_replica));
        ZeroBytes { redundancy, ..self.own.bytes(comm) }
    }

    /// Digests of the state behind the last step; `weights` are full length, as this rank computes with them.
    pub fn digests(&self, weights: &F) -> Digests {
        let world = self.world();
        let parts: Vec<u64> =
            (0..world).map(|rank| digests::of_floats(weights, self.cuts().part(rank))).collect();
        let of = |rank: Rank| parts[rank.0 as usize];
        Digests {
            weights: digests::joined(&parts),
            own: PartDigests { weights: of(self.rank()), state: digests::of_state(&self.own) },
            replicated: self.replica.as_ref().map_or(0, |replica| of(replica.shard.partition().rank())),
            replica: self.replica.as_ref().map(|replica| PartDigests {
                weights: digests::of_floats(&replica.weights, 0..replica.weights.len()),
                state: digests::of_state(&replica.shard),
            }),
        }
    }
}

fn snapshot<F: Flat>(shard: &ShardedOptimizer<F>, weights: Vec<f32>) -> ShardState {
    let whole = |buffer: &F| buffer.read(0..buffer.len()).into_owned();
    let average = shard.average.as_ref().map_or_else(Vec::new, |average| whole(&average.values));
    ShardState { weights, state: shard.state.iter().map(StateValues::to_host).collect(), average }
}
