//! What learns: the objective, its trainables, the sums of their gradients, and the optimizer's state.

use coxswain_nn::{
    kernels::{
        Tape,
        flat::{Flat, FlatOn},
    },
    params::{FlatGrads, Trainables},
};
use coxswain_proto::{
    ids::{Bytes, Generation, Rank},
    report::Metric,
    run_spec::{LossScale, Offload, Optimizer, RunSpec},
};
use coxswain_task::Objective;

use super::{GradientWatch, Members, checkpoint, recovery::Holding};
use crate::{
    memory::{self, Category},
    zero::{Keeps, LearningRateSchedule, ReplicatedOptimizer, RunRule, ScaleState},
};

/// What learns.
pub(super) struct Learner<B: Tape<Base = B>> {
    pub objective: Box<dyn Objective<B>>,
    pub trainables: Trainables<B>,
    pub grads: FlatGrads<B::Flat>,
    pub rates: LearningRateSchedule,
    /// The optimizer of the newest generation that has begun; none before the first.
    pub held: Option<GenerationState<B::Flat>>,
    /// The state that was being taken over when a rank was lost in the last moment.
    pub coming: Option<GenerationState<B::Flat>>,
    /// Watches in the first steps that everything that should train does.
    pub gradients: GradientWatch,
    /// How the loss is scaled: as the run says, or as its products want it.
    pub loss_scale: LossScale,
}

/// The optimizer, and the generation whose partition it follows.
pub(super) struct GenerationState<F: Flat> {
    pub generation: Generation,
    pub optimizer: ReplicatedOptimizer<F>,
    /// Weights of that state; none if they are the ones that train.
    pub weights: Option<Vec<f32>>,
    /// Whether other ranks may go on from it.
    pub trusted: bool,
}

impl<F: Flat> GenerationState<F> {
    /// What this rank brings into a new generation; nothing if that is not to be trusted.
    pub fn holding(&self) -> Option<Holding> {
        let (own, replica) = self.optimizer.versions();
        let (skipped, left_out) = self.optimizer.skipped();
        let (world, rank) = (self.optimizer.world() as u32, self.optimizer.rank());
        let loss_scale = self.optimizer.loss_scales();
        let (generation, distance) = (self.generation, self.optimizer.distance());
        let held = Holding { generation, world, rank, own, replica, distance, skipped, left_out, loss_scale };
        self.trusted.then_some(held)
    }
}

impl<B: Tape<Base = B>> Learner<B> {
    /// The optimizer of the generation that trains.
    pub fn optimizer(&self) -> &ReplicatedOptimizer<B::Flat> {
        &self.held.as_ref().expect("a generation begins with a state").optimizer
    }

    /// An optimizer for this generation's partition, without a state.
    pub fn empty_optimizer(&self, spec: &RunSpec, members: &Members) -> ReplicatedOptimizer<B::Flat> {
        let offloaded = spec.memory.offload == Offload::Optimizer;
        let (place, layout) = (B::Flat::place(&self.trainables.device()), self.trainables.layout());
        let replica = spec.faults.replica.then_some(members.assignment.replica_distance);
        let keeps = Keeps { replica, offloaded };
        let settings = Optimizer { loss_scale: self.loss_scale, ..spec.optimizer.clone() };
        let rule = RunRule::from(&settings);
        let partition = rule.partition(layout, members.comm.world(), members.rank());
        ReplicatedOptimizer::at(&place, layout, partition, rule, keeps)
    }

    /// From now on this is the state, in the generation of these members.
    pub fn hold(&mut self, optimizer: ReplicatedOptimizer<B::Flat>, members: &Members) {
        let generation = members.assignment.generation;
        self.held = Some(GenerationState { generation, optimizer, weights: None, trusted: true });
        self.coming = None;
    }

    /// Sums of gradients begin anew, scaled as in the next step.
    pub fn begin_gradients(&mut self) {
        self.grads.zero();
        let scale = self.optimizer().loss_scale();
        self.grads.scale_loss(scale.map(ScaleState::scale));
    }

    /// What this rank holds may be wrong: it brings nothing into the next generation.
    pub fn distrust(&mut self) {
        self.held.iter_mut().for_each(|held| held.trusted = false);
        self.coming = None;
    }

    /// Whether the loss is scaled, and by more than the least.
    pub fn may_lower_loss_scale(&self) -> bool {
        self.optimizer().loss_scale().is_some_and(|scale| !scale.is_least())
    }

    /// What the next step's loss is multiplied by, if the loss is scaled; rank 0 speaks for all.
    pub fn loss_scale_metric(&self, rank: Rank) -> Option<Metric> {
        let scale = self.optimizer().loss_scale().filter(|_| rank.0 == 0)?;
        Some(Metric::same("loss_scale", scale.scale()))
    }

    /// What this rank holds from the first step to the last, for messages; `cache` is what features take.
    pub fn holdings(&self, members: &Members, cache: Bytes) -> Vec<memory::HeldBytes> {
        let rows = self.objective.modules(self.trainables.layout());
        let frozen = rows.iter().filter(|row| !row.trains).map(|row| row.bytes).sum();
        let optimizer = self.optimizer().bytes(members.comm.as_ref());
        [
            (Category::FrozenWeights, Bytes(frozen)),
            (Category::Trainables, optimizer.weights),
            (Category::Gradients, optimizer.grads),
            (Category::OptimizerShard, optimizer.state),
            (Category::Replica, optimizer.redundancy),
            (Category::CollectiveBuffers, optimizer.comm_buffers),
            (Category::Cache, cache),
        ]
        .map(|(what, bytes)| memory::HeldBytes { what, bytes })
        .into()
    }

    /// Bytes of one checkpoint.
    pub fn checkpoint_bytes(&self) -> Bytes {
        let state = self.held.as_ref().map_or(0, |held| held.optimizer.whole_state_bytes());
        Bytes(checkpoint::bytes(self.trainables.layout(), state))
    }
}
