//! What the engine sees of a task. A task is a folder of `worker/tasks`; the engine (`worker/src`) trains
//! whatever implements these traits, and neither knows the other.
//!
//! ```text
//! Task, TaskOn   by name in a registry: opens a run's samples; builds, on a backend, what trains on them
//! Samples        the opened data of a run: samples by index, side by side as batches, apart again
//! Objective      loss and gradients of a batch, evaluation, what is exported, which features may be kept
//! Extractor      the frozen part of an objective, whose answers the engine keeps
//! Responder      what training has left, answering requests
//! ```
//!
//! Samples and batches are opaque to the engine, which asks them for their sizes only. So the training loop
//! is compiled once for each backend, not once for each task; a task finds its own types again with [`dyn
//! Batch::content`](batch::Batch) and its like.

pub mod answers;
pub mod batch;
pub mod clock;
pub mod dry_run;
pub mod error;
pub mod examples;
pub mod features;
pub mod generation;
pub mod memory;
pub mod objective;
pub mod samples;
mod sampling;
pub mod selftest;
pub mod task;
pub mod tools;

pub use self::{
    answers::{Array, BadRequest, NamedValues, RequestReader, Responder, Value},
    batch::{Batch, CachedFeatures, CopySample, Inputs, Opaque, Sample},
    clock::{Figures, Pass, StageClock, StageTimes},
    error::{Fault, TaskError},
    examples::{CurvePair, Example, ExamplePicture, TextPair},
    features::{Extractor, FeatureShape, FrozenWeights},
    generation::{ConvertJob, GenerateJob, Prompt, Reply, Sampling},
    objective::{Artifact, Assembly, Evaluation, MicroLoss, Module, Objective, PartSum},
    samples::{InputIngredients, Readable, SampleKeys, Samples, TextFile},
    selftest::{Losses, Width},
    task::{Float16, Task, TaskOn},
    tools::{CheckpointSummary, ForwardJob, RandomJob, StarterFile, StarterJob},
};
