//! Features that are kept instead of computed again, as training sees them: a memo of the model below the
//! tap.
//!
//! ```text
//! setup      where features are kept, in which form, of which samples
//! owner      memo, drift watch and cache phase as one, for training
//! memo       the generation that serves, and what is still to be stored
//! cache_phase  where the next step takes its features from; a generation begins, or an older one goes on
//! fill       computes what micro-batches lack, and rounds it as the store does
//! store_writer  appends it to parts and publishes these, on a thread of its own
//! drift_watch  when drift is measured, a few probes at a time, and what comes of it
//! measuring  such a measurement while it goes on
//! probes     compares the features of some samples with those of an older generation
//! drift      what adds up over probes and ranks
//! adapter    a generation's adapter, in the store and back
//! desk       what the owners of everything else lend for all this
//! account    hits, misses, times
//! words      what the run's summary and its log say of all that
//! ```
//!
//! What is kept changes the time of a step, never its result: a feature that is missing, damaged or evicted
//! is computed from the same weights and rounded in the same way. So nothing here waits for a build, and no
//! fault of the store ends a run that has begun: what cannot be read is computed, what cannot be written is
//! told once and computed again next time. A store that may only be read is read. Only one that cannot be
//! opened at all is refused, before the first step.
//!
//! What this module does not do: decide about cache phases (the link), know files (`vl_cache`), or know what
//! lies below a tap (the task).

mod account;
mod adapter;
mod cache_phase;
mod claim;
mod desk;
mod drift;
mod drift_watch;
mod fill;
mod measuring;
mod memo;
mod owner;
mod probes;
mod serving;
mod setup;
mod store_writer;
#[cfg(test)]
mod tests;
mod words;

pub use self::{
    account::{CacheSummary, DriftRecord},
    claim::{FeatureVersion, Mark},
    setup::CACHE_DIR,
};
pub(super) use self::{claim::Claim, desk::Desk, owner::Features, setup::store_dir};
