//! The run specification: everything a run is, as one checked value.
//!
//! A YAML file (plus dotted overrides) becomes a [`RunSpec`] in two steps (`config`): unknown keys and wrong
//! types are refused, then values that contradict each other. Coordinator and workers only ever see a checked
//! spec; it travels to workers as JSON inside `coxswain.v1.RunSpecDocument`.
//!
//! The engine's keys are fields here. A task's keys ([`TaskSchema`](crate::config::TaskSchema)) are carried
//! as JSON that only the task reads, through [`RunSpec::settings`].
//!
//! Nothing here touches the file system: whether paths exist and agree with each other is for the worker's
//! own checks.

mod cache;
mod episodes;
mod resources;
mod sections;
mod spec;
mod training;

pub(crate) use self::spec::{EnginePart, MARKS};
pub use self::{
    cache::{Cache, CacheDtype, CacheMode, Span, Tap},
    episodes::{EpisodeRange, episode_numbers},
    resources::{Collectives, DeviceChoice, Faults, Launch, Memory, Offload, Shard},
    spec::{DEFAULT_TASK, Run, RunSpec, Task},
    training::{
        BucketCache, Data, Eval, InitFrom, LossScale, Optimizer, OptimizerName, PerGroup, Recompute,
        ReduceDtype, Schedule, ScheduleOver, Spike, Train,
    },
};
