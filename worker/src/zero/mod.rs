//! The optimizer, partitioned over the ranks: stage 2 of ZeRO (Rajbhandari et al., arXiv 1910.02054) for a
//! flat fp32 parameter buffer.
//!
//! ```text
//! partition   which elements of the flat parameter buffer are this rank's, and which learning rate and decay
//!             apply to them
//! optimizer   one step: reduce-scatter, norm, clip, the update rule on the shard, all-gather
//! exchange    what gradients travel in
//! outcome     what a step did, or why it was not taken
//! replica     a copy of another rank's part, so that a lost rank, or a lost node, loses no step
//! average     the average of the weights, where a run keeps one
//! loss_scale  what the loss is multiplied by where products are of float16
//! schedule    the learning rate of a step, as a pure function
//! soundness   whether it is a state that training can go on from
//! unsound     the first value of a rank that is not
//! state       the rule's state as bytes, by parameter name and offset, readable at any world size
//! ```
//!
//! # What it is
//!
//! Data-parallel training repeats the same update on every rank. ZeRO lets each rank own `1/W` of the
//! trainables: gradients are reduced only to their owner (reduce-scatter), the owner updates its part, and
//! the results are passed to everyone (all-gather). The traffic is that of an all-reduce; the rule's state is
//! kept once instead of `W` times.
//!
//! The flat parameter buffer of `n` elements is cut into `W` parts, as equal as the rule allows it
//! ([`Grain`](coxswain_nn::params::Grain)): AdamW's may end anywhere, those of a rule of blocks or of whole
//! matrices only between these. The trainables are fp32, so the owner's part of the flat weights *is* the
//! master copy; there is no second one.
//!
//! # What it saves
//!
//! Bytes on each rank, with `n` trainables and AdamW's two float32 moments:
//!
//! ```text
//!              weights   gradients             moments   buffers
//! replicated   4 n       4 n (+ 4 n buckets)   8 n       -           16 n to 20 n
//! here         4 n       4 n                   8 n / W   128 KiB     8 n + 8 n / W
//! replicated   4 n       4 n                   8 n / W   12 n / W    8 n + 20 n / W
//! bfloat16     as above, and 2 n that gradients travel in (`optimizer.reduce_dtype`)
//! average      as above, and 4 n / W, twice where replicated (`optimizer.ema_decay`)
//! ```
//!
//! The gradient row is honest: the backward pass sums micro-batches into one full-length buffer, which is
//! kept for the next step. Gradients are reduced in place, so no buckets are added; after the reduce-scatter
//! only this rank's chunk means anything.
//!
//! Under LoRA this is small change: 30 M trainables over 4 ranks save 180 MB a rank beside gigabytes of
//! frozen weights. With an head of 0.5 B trained in full it is 3 GB. [`ZeroBytes`] has the figures of a run.
//!
//! # What it does not do
//!
//! It knows neither models nor files nor devices: it sees buffers
//! ([`kernels::flat`](coxswain_nn::kernels::flat)), an update rule
//! ([`rules`](coxswain_nn::rules), where the arithmetic is) and a
//! [`Collective`](crate::collective::Collective). It does not partition what trains (ZeRO-3; frozen
//! weights are `coxswain_nn::sharded`), and does not overlap communication with the backward pass.

mod average;
mod exchange;
mod loss_scale;
mod optimizer;
mod outcome;
mod partition;
mod replica;
mod schedule;
mod soundness;
mod state;
mod unsound;

pub use loss_scale::{LossScaler, ScaleState};
pub use optimizer::{RunRule, ShardedOptimizer, StepInput, ZeroBytes};
pub use outcome::{GroupNorm, StepError, StepOutcome};
pub use partition::{Partition, Segment};
pub use replica::{Copy, Digests, Keeps, PartDigests, ReplicatedOptimizer, ShardState, Versions};
pub use schedule::{LearningRateSchedule, Rates};
pub use soundness::are_sound_weights;
pub use state::{StateError, read_average};
pub use unsound::UnsoundValue;
