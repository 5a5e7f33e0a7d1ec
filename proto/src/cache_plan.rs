//! When features are computed and when they come from the cache: pure integer arithmetic, shared by
//! coordinator and workers.
//!
//! ```text
//! cache.interval  |------------------------|------------------------|---
//! cache.live      |------|                 |------|                 |---
//! steps            live   cached, from      live   cached, from
//!                         generation 1             generation 2, or still 1 if little has changed
//! ```
//!
//! A *generation* of the cache is the features of all samples under one adapter: the adapter as it is when a
//! cached phase begins. [`decide`] says at that point whether a new generation begins or the old one goes on.
//! The coordinator decides and writes it into leases; a worker without a coordinator asks the same functions.
//!
//! Drift is measured after the phase change, a few probes a step: in a cached phase the adapter rests, so the
//! features of then are those of the phase change.
//!
//! ```text
//! step       b         b+1 .. b+n                          b+n+1            b+n+2
//! schedule   begins    a portion of the probes in each     -                -
//! by drift   goes on   a portion of the probes in each     decision heard   begins, or goes on
//! n          an eighth of the cached phase, at most 16; if that is none, all is measured at once: in step b,
//!            or before it where drift decides
//! ```

mod cache_phases;
mod report;
mod schedule;

pub use self::{
    cache_phases::{CacheDecision, CacheGeneration, CachePhaseTable, Cause, Evidence, StepCachePhase},
    report::{CacheDrift, CacheReport, CacheUse},
    schedule::{CachePhaseKind, CacheSchedule, Decision, Drift, decide},
};
