//! What one rank will hold and compute, at one micro-batch.

use coxswain_models::{pretrained::frozen::FrozenBytes, vision_language::streamed_during};
use coxswain_proto::{memory::Category, run_spec::CacheMode};
use coxswain_task::memory::{Ask, Place, Prediction};

use super::{Subject, framework};

impl Subject {
    /// Predicts one rank.
    pub fn predict(&self, ask: Ask) -> Prediction {
        let (mut prediction, scratch) = self.micro(ask);
        let fetched = self.fetched(ask).map_or(0, FrozenBytes::two_blocks);
        let held = self.frozen(ask.place).in_memory(self.blocks(ask)) - self.table_elsewhere(ask.place);
        prediction.set(Category::FrozenWeights, held + 4 * self.counts.frozen_expert);
        if ask.place != Place::Gpu {
            prediction.set(Category::Cache, self.cache_bytes(ask));
        }
        // The step holds blocks that are fetched when they run; two of them are booked as weights.
        let activations = prediction.forward.max(prediction.backward);
        prediction.set(Category::Activations, activations.saturating_sub(fetched));
        prediction.set(Category::Input, framework::input_bytes(self, ask));
        if let Place::Host { threads } = ask.place {
            let process = framework::of_process(self.outline.tokenizer_bytes, threads, scratch);
            prediction.set(Category::Framework, process);
        }
        prediction
    }

    /// What is the same for every task.
    pub(super) fn engine(&self, ask: Ask) -> Prediction {
        Prediction::of_engine(&self.spec, &self.trained, ask)
    }

    /// This rank's part of the optimizer's state and its copy of another's, as far as they are in the memory
    /// in question.
    pub(super) fn shards(&self, ask: Ask) -> u64 {
        let engine = self.engine(ask);
        engine.of(Category::OptimizerShard) + engine.of(Category::Replica)
    }

    /// What is held in host memory beside a GPU: this rank's optimizer state and its copy of
    /// another's where they are offloaded, a table that is and does not lie in its file as it is kept, and
    /// what kept features take.
    pub fn beside_gpu(&self, ask: Ask) -> u64 {
        let table = self.frozen(Place::Host { threads: 1 }).table;
        self.cache_bytes(ask)
            + Prediction::of_engine_beside_gpu(&self.spec, &self.trained, ask)
            + if self.table_elsewhere(ask.place) > 0 { table } else { 0 }
    }

    /// What a GPU's allocator reserves: pages for what passes take, and what stays to its size.
    pub fn reserved(&self, ask: Ask, gpu: u64) -> u64 {
        let exact = self.spec.cache.mode == CacheMode::Exact;
        let pass = self.pass(ask.micro_batch, self.tap().filter(|_| exact), ask.place);
        let prediction = self.predict(ask);
        let stays = [
            Category::FrozenWeights,
            Category::Trainables,
            Category::Gradients,
            Category::OptimizerShard,
            Category::Replica,
        ];
        stays.into_iter().map(|category| prediction.of(category)).sum::<u64>()
            + pass.allocations.reserved(gpu)
    }

    /// The engine's part with the pass that takes most, fetched blocks included, and the largest buffer that
    /// a compute thread keeps for itself: where a cache is exact every step begins with kept features, once
    /// they have been computed.
    fn micro(&self, ask: Ask) -> (Prediction, u64) {
        let exact = self.spec.cache.mode == CacheMode::Exact;
        let (entry, fetched) = (self.tap().filter(|_| exact), self.fetched(ask));
        let pass = self.pass(ask.micro_batch, entry, ask.place);
        let beside = |stage: &str| fetched.map_or(0, |frozen| streamed_during(stage, frozen));
        let filling = entry.map_or(0, |_| self.fill_peak(ask) + fetched.map_or(0, FrozenBytes::two_blocks));
        let mut prediction = self.engine(ask).with_pass(&pass, beside);
        prediction.forward = prediction.forward.max(filling);
        (prediction, pass.scratch)
    }
}
