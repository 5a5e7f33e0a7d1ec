//! The optimizer's part of surviving a lost rank: every part of the flat space exists twice, in two versions.
//!
//! A *version* is the state after so many steps: weights and both moments. While a step is under way, ranks are in the version
//! before it or in the one after it. To go on without a lost rank, all of them must agree on one version of which every part
//! is still somewhere:
//!
//! ```text
//!                    before the step   after it        kept as
//! own part           undo              live            a copy, 12 bytes an element
//! part of rank r-1   mirror            mirror + log    a copy, 12 bytes, and the reduced gradient, 4 bytes
//! ```
//!
//! One step:
//!
//! ```text
//! vote passed: everyone has finished the step before  -> the mirror takes its log in; the undo is overwritten
//! reduce-scatter, norm
//! shift              each rank's reduced chunk goes to the next rank, too: that rank's log
//! AdamW on the own part, all-gather
//! ```
//!
//! A rank that has finished the all-gather proves that every rank had finished the shift, so all parts exist in the version after
//! the step; if no rank has finished it, all parts exist in the version before. The mirror repeats the owner's arithmetic on the
//! owner's numbers, so it holds the same bits, and the network carries 4 bytes an element instead of 12.
//!
//! It survives the loss of any ranks no two of which are neighbours on the ring. Choosing the version and moving the parts is
//! [`train::recovery`](crate::train::recovery)'s affair.

use std::{io::Write, ops::Range, time::Instant};

use coxswain_proto::{
    ids::{Bytes, Rank},
    run_spec::Optimizer,
};

use super::{
    optimizer::{ShardedAdamW, StepError, StepInput, StepOutcome, Update, ZeroBytes},
    partition::intersect,
    state::StateError,
};
use crate::{
    collective::{BufMut, Collective, chunk},
    params::TrainableLayout,
};

/// One part of the flat space in one version.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ShardState {
    /// Weights.
    pub weights: Vec<f32>,
    /// First moments.
    pub exp_avg: Vec<f32>,
    /// Second moments.
    pub exp_avg_sq: Vec<f32>,
}

impl ShardState {
    /// Zeros for a part of `len` elements.
    pub fn zeros(len: usize) -> Self {
        Self { weights: vec![0.0; len], exp_avg: vec![0.0; len], exp_avg_sq: vec![0.0; len] }
    }
}

/// Which versions of a part a rank has: the newest, and perhaps the one before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Versions {
    /// Steps taken in the newest.
    pub newest: u64,
    /// Whether the version one step older is there, too.
    pub older: bool,
}

impl Versions {
    /// Whether this version is there.
    pub fn contain(&self, version: u64) -> bool {
        version == self.newest || (self.older && version + 1 == self.newest)
    }
}

/// Which of its two parts a rank is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Copy {
    /// Its own.
    Own,
    /// That of the rank before it.
    Mirror,
}

/// [`ShardedAdamW`], and what is kept in store for a lost rank.
#[derive(Debug)]
pub struct MirroredAdamW {
    own: ShardedAdamW,
    undo: Undo,
    /// Absent in a world of one, and where it is switched off.
    mirror: Option<Mirror>,
}

/// This rank's part before its last step.
#[derive(Debug, Default)]
struct Undo {
    /// Steps taken in `state`; none before the first step.
    version: Option<u64>,
    state: ShardState,
}

impl Undo {
    fn keep(&mut self, shard: &ShardedAdamW, weights: &[f32]) {
        let ShardState { weights: kept, exp_avg, exp_avg_sq } = &mut self.state;
        for (kept, now) in [(kept, weights), (exp_avg, &shard.exp_avg), (exp_avg_sq, &shard.exp_avg_sq)] {
            kept.clear();
            kept.extend_from_slice(now);
        }
        self.version = Some(shard.steps());
    }
}

/// The part of the rank before this one.
#[derive(Debug)]
struct Mirror {
    shard: ShardedAdamW,
    weights: Vec<f32>,
    log: Vec<f32>,
    /// How the log is applied; none if it has been, or has not arrived.
    pending: Option<Update>,
}

impl Mirror {
    fn range(&self) -> Range<usize> {
        self.shard.partition().own()
    }

    /// Takes the log in.
    fn settle(&mut self) {
        if let Some(update) = self.pending.take() {
            self.shard.advance(&self.log, &mut self.weights, &update);
        }
    }
}

impl MirroredAdamW {
    /// Moments of zero for `rank`'s part in a world of `world`; with a mirror if `mirrored` and there is another rank.
    pub fn new(
        layout: &TrainableLayout,
        world: usize,
        rank: Rank,
        settings: &Optimizer,
        mirrored: bool,
    ) -> Self {
        let previous = Rank(((rank.0 as usize + world - 1) % world) as u32);
        let mirror = (mirrored && world > 1).then(|| {
            let shard = ShardedAdamW::new(layout, world, previous, settings);
            let len = shard.partition().own().len();
            Mirror { shard, weights: vec![0.0; len], log: Vec::new(), pending: None }
        });
        Self { own: ShardedAdamW::new(layout, world, rank, settings), undo: Undo::default(), mirror }
    }

    /// Declares that moments (all parts of this rank) and `weights`, full length, are the state after `steps` steps.
    pub fn begin(&mut self, steps: u64, weights: &[f32]) {
        self.own.steps = steps;
        self.undo.version = None;
        if let Some(mirror) = &mut self.mirror {
            mirror.shard.steps = steps;
            mirror.pending = None;
            mirror.weights.copy_from_slice(&weights[mirror.shard.partition().own()]);
        }
    }

    /// Takes over moments from the files of a checkpoint ([`ShardedAdamW::import`]), whose weights are `weights`, full length.
    pub fn import(&mut self, files: &[&[u8]], weights: &[f32]) -> Result<(), StateError> {
        self.own.import(files)?;
        if let Some(mirror) = &mut self.mirror {
            mirror.shard.import(files)?;
        }
        self.begin(self.own.steps(), weights);
        Ok(())
    }

    /// Takes moments of the elements `range` of the flat space, as far as they are in a part that this rank keeps.
    pub fn adopt(&mut self, range: &Range<usize>, state: &ShardState) {
        let shards = [Some(&mut self.own), self.mirror.as_mut().map(|mirror| &mut mirror.shard)];
        for shard in shards.into_iter().flatten() {
            let part = shard.partition().own();
            let shared = intersect(&part, range);
            let (to, from) = (shifted(&shared, part.start), shifted(&shared, range.start));
            shard.exp_avg[to.clone()].copy_from_slice(&state.exp_avg[from.clone()]);
            shard.exp_avg_sq[to].copy_from_slice(&state.exp_avg_sq[from]);
        }
    }

    /// Takes one step, as [`ShardedAdamW::step`]. All ranks must be known to have finished the step before.
    pub fn step(
        &mut self,
        grads: &mut [f32],
        weights: &mut [f32],
        input: &StepInput,
        comm: &mut dyn Collective,
    ) -> Result<StepOutcome, StepError> {
        let Some(mirror) = &mut self.mirror else { return self.own.step(grads, weights, input, comm) };
        let (begin, own) = (Instant::now(), self.own.partition().own());
        mirror.settle();
        self.undo.keep(&self.own, &weights[own.clone()]);
        let mut compute = begin.elapsed();
        let reduced = self.own.reduce(grads, weights.len(), input, comm)?;
        comm.shift_in_place(BufMut::F32(grads))?;
        let updating = Instant::now();
        mirror.log.clear();
        mirror.log.extend_from_slice(&grads[mirror.range()]);
        mirror.pending = Some(reduced.update);
        self.own.advance(&grads[own.clone()], &mut weights[own], &reduced.update);
        compute += reduced.compute + updating.elapsed();
        comm.all_gather_in_place(BufMut::F32(weights))?;
        Ok(reduced.outcome(compute, begin.elapsed()))
    }

    /// Which versions of its own part and of its neighbour's this rank has.
    pub fn versions(&self) -> (Versions, Option<Versions>) {
        let newest = self.own.steps();
        let own = Versions { newest, older: self.undo.version.is_some_and(|version| version + 1 == newest) };
        let mirror = self.mirror.as_ref().map(|mirror| {
            let older = mirror.pending.is_some();
            Versions { newest: mirror.shard.steps() + u64::from(older), older }
        });
        (own, mirror)
    }

    /// One of the parts of this rank in one of its [`versions`](Self::versions); `weights` is full length. None if it is not there.
    pub fn state(&self, copy: Copy, version: u64, weights: &[f32]) -> Option<ShardState> {
        match copy {
            Copy::Own if version == self.own.steps() => {
                Some(snapshot(&self.own, &weights[self.own.partition().own()]))
            }
            Copy::Own => (self.undo.version == Some(version)).then(|| self.undo.state.clone()),
            Copy::Mirror => {
                let mirror = self.mirror.as_ref()?;
                if version == mirror.shard.steps() {
                    return Some(snapshot(&mirror.shard, &mirror.weights));
                }
                let update = mirror.pending.as_ref().filter(|_| version == mirror.shard.steps() + 1)?;
                let (mut shard, mut weights) = (mirror.shard.clone(), mirror.weights.clone());
                shard.advance(&mirror.log, &mut weights, update);
                Some(snapshot(&shard, &weights))
            }
        }
    }

    /// The part of the flat space that is a rank's in a world of another size.
    pub fn part_in(&self, world: usize, rank: usize) -> Range<usize> {
        chunk(self.own.partition().whole_len(), world, rank)
    }

    /// Ranks that share the flat space.
    pub fn world(&self) -> usize {
        self.own.partition().world()
    }

    /// This rank.
    pub fn rank(&self) -> Rank {
        self.own.partition().rank()
    }

    /// Steps taken.
    pub fn steps(&self) -> u64 {
        self.own.steps()
    }

    /// Norm of the global gradient of the last step taken, before clipping.
    pub fn last_norm(&self) -> f64 {
        self.own.last_norm
    }

    /// Writes this rank's moments ([`ShardedAdamW::write_to`]).
    pub fn write_to(&self, out: &mut dyn Write) -> std::io::Result<u64> {
        self.own.write_to(out)
    }

    /// What all of it takes on this rank.
    pub fn bytes(&self, comm: &dyn Collective) -> ZeroBytes {
        let redundancy = self
            .mirror
            .as_ref()
            .map_or(0, |mirror| 12 * self.own.partition().own().len() + 16 * mirror.range().len());
        ZeroBytes { redundancy: Bytes(redundancy as u64), ..self.own.bytes(comm) }
    }
}

fn shifted(range: &Range<usize>, origin: usize) -> Range<usize> {
    match range.is_empty() {
        true => 0..0,
        false => range.start - origin..range.end - origin,
    }
}

fn snapshot(shard: &ShardedAdamW, weights: &[f32]) -> ShardState {
    let (exp_avg, exp_avg_sq) = (shard.exp_avg.clone(), shard.exp_avg_sq.clone());
    ShardState { weights: weights.to_vec(), exp_avg, exp_avg_sq }
}
