//! How much memory a run will take, before it is launched: from `config.json`, safetensors headers, the run
//! file and the data set's metadata. No GPU, no weight is read, and tensors are sizes.
//!
//! ```text
//! about        what is predicted about, read once
//! counts       elements by part, exact
//! passes       the policy's own passes on a backend that knows sizes alone
//! predict      one rank at one micro-batch
//! framework    what is neither weights nor activations
//! cache        steps from kept features: what they take, how much faster they can be, what the store takes
//! suggestions  what each setting would save
//! subject      all of it as the engine and `cox plan` see it
//! ```
//!
//! Bytes of each category on a rank, with `n` trainables and `W` ranks:
//!
//! - frozen weights: elements times 4 or 2 (vectors always 4); on a host only what is not used in place in
//!   the mapped files; of blocks that are streamed the two largest neighbours
//! - trainables and gradients: `4 n` each; on a GPU every buffer has 400 kB behind its last element
//! - optimizer shard: with AdamW `8 n / W`, 12 with an average of the weights; beside a GPU in host memory
//!   with `memory.offload: optimizer`
//! - replica: `4 n / W` more than that when another rank's shard is kept; in host memory as the shard is
//! - activations: the peak of those passes
//! - collective buffers: when `W > 1`, on a host the ring's receive buffer; `2 n` where gradients travel as
//!   bfloat16
//! - input: on a host prefetched micro-batches, and the row cache
//! - cache: in host memory, names of all frames, the index of stored ones, adapters of generations, features
//!   that wait to be written
//! - framework: process, tokenizer and scratch of the compute threads; a context on a GPU
//!
//! Frozen and trained weights are never mixed: LoRA's point is that only a hundredth of the model has
//! gradients and moments.

mod about;
mod cache;
mod counts;
mod framework;
mod passes;
mod predict;
mod subject;
mod suggestions;
#[cfg(test)]
mod tests;

pub use about::{PredictionError, Subject};
pub use cache::{CacheOutlook, exact_bytes, stored_bytes};
pub use counts::{Counts, Elements};
// What another task on the same model predicts with.
pub(crate) use about::FrozenStorage;
use coxswain_task::memory::{Ask, Place, Suggestion};
pub(crate) use framework::of_process;
