//! What one rank will hold, at one micro-batch.

use coxswain_models::qwen2_5_vl::modules::FrozenBytes;
use coxswain_nn::params::chunk;
use coxswain_proto::{memory::Category, run_spec::CacheMode};
use coxswain_task::memory::{Ask, Place, Prediction, REPLICA_BYTES};

use super::{Subject, framework, meta, shape};

impl Subject {
    /// Predicts one rank.
    pub fn predict(&self, ask: Ask) -> Prediction {
        let n = self.counts.trainable();
        let micro = self.micro(ask);
        let meta::Micro { forward, kept, backward, .. } = micro;
        let mut prediction = Prediction::of_pass(forward, kept, backward);
        let streamed = self.streamed(ask.place).map_or(0, FrozenBytes::two_blocks);
        let held = self.frozen(ask.place).in_memory(self.streamed(ask.place).is_some());
        prediction.set(Category::FrozenWeights, held);
        prediction.set(Category::Trainables, 4 * n);
        prediction.set(Category::Gradients, 4 * n);
        if !self.offloaded(ask.place) {
            self.shards(ask).into_iter().for_each(|(category, bytes)| prediction.set(category, bytes));
        }
        if ask.place != Place::Gpu {
            prediction.set(Category::Cache, self.cache_bytes(ask));
        }
        // The step holds streamed blocks when they run; two of them are booked as weights.
        prediction.set(Category::Activations, micro.forward.max(micro.backward).saturating_sub(streamed));
        prediction.set(Category::CollectiveBuffers, framework::collective_bytes(self, ask));
        prediction.set(Category::Input, framework::input_bytes(self, ask));
        prediction.set(Category::Framework, framework::framework_bytes(self, ask, &micro));
        prediction
    }

    /// What is held in host memory beside a GPU: this rank's moments and its copy of the neighbour's part
    /// where they are offloaded, and what kept features take.
    pub fn beside_gpu(&self, ask: Ask) -> u64 {
        let shards: u64 = self.shards(ask).into_iter().map(|(_, bytes)| bytes).sum();
        self.cache_bytes(ask) + if self.offloaded(ask.place) { shards } else { 0 }
    }

    /// This rank's moments, and its copy of the neighbour's part.
    pub(super) fn shards(&self, ask: Ask) -> [(Category, u64); 2] {
        let n = self.counts.trainable() as usize;
        let shard = chunk(n, ask.world.max(1) as usize, ask.rank as usize).len() as u64;
        let replica = if self.replicated(ask.world) { REPLICA_BYTES * shard } else { 0 };
        [(Category::OptimizerShard, 8 * shard), (Category::Replica, replica)]
    }

    /// The step that takes most, streamed blocks included: where a cache is exact every step begins with kept
    /// features, once they have been computed.
    fn micro(&self, ask: Ask) -> meta::Micro {
        let exact = self.spec.cache.mode == CacheMode::Exact;
        let (entry, streamed) = (self.tap().filter(|_| exact), self.streamed(ask.place));
        let mut step = shape::step(self, ask.micro_batch, entry);
        if let Some(FrozenBytes { towers: [text, vision], .. }) = streamed {
            let blocks = step.vl.text.iter_mut().chain(&mut step.vl.vision);
            blocks.zip(text.iter().chain(vision)).for_each(|(block, bytes)| block.streamed = *bytes);
        }
        let micro = meta::run(&step);
        match entry {
            None => micro,
            Some(tap) => {
                let two_blocks = streamed.map_or(0, FrozenBytes::two_blocks);
                let fill = self.fill_peak(tap, ask.micro_batch) + two_blocks;
                meta::Micro { forward: micro.forward.max(fill), ..micro }
            }
        }
    }
}
