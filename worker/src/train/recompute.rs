//! This rank's mode of recompute, where the run leaves it to the memory there is: `train.recompute: auto`.
//!
//! It is chosen once, before the model loads, and by each rank for itself: gradients are the same in every
//! mode. A smaller micro-batch, where memory runs out all the same, does not change it.

use std::borrow::Cow;

use coxswain_proto::{
    human,
    run_spec::{Recompute, RunSpec},
};
use coxswain_task::{Task, TaskError};

use crate::memory::{
    Gauge, Resident,
    prediction::{Ask, Place, recompute::RecomputeChoice},
};

/// The run in the mode that fits this rank's memory: `gpu`'s, else the host's.
pub(super) fn resolve_auto<'a>(
    task: &dyn Task,
    spec: &'a RunSpec,
    gpu: Option<&dyn Gauge>,
) -> Result<Cow<'a, RunSpec>, TaskError> {
    if spec.train.recompute != Recompute::Auto {
        return Ok(Cow::Borrowed(spec));
    }
    let workers = spec.launch.nproc_per_node.unwrap_or(1).max(1) as u64;
    let free = match gpu {
        Some(gauge) => gauge.room(),
        None => Some(Resident::free_on_this_machine() / workers),
    };
    let room = spec.memory.capacity.into_iter().chain(free).min().unwrap_or(u64::MAX);
    let place = match gpu {
        Some(_) => Place::Gpu,
        None => Place::Host { threads: rayon::current_num_threads() as u64 },
    };
    // Of however small a world.
    let micro_batch = spec.train.micro_batch.min(spec.train.global_batch) as u64;
    let ask = Ask { micro_batch, world: workers, rank: 0, place };
    let chosen = RecomputeChoice::find(task, &*task.sizes(spec)?, ask, room);
    let RecomputeChoice { mode, peak } = chosen.unwrap_or(RecomputeChoice { mode: Recompute::None, peak: 0 });
    tracing::info!("recompute {mode}: predicted peak {}, limit {}", human::bytes(peak), human::bytes(room));
    let mut spec = spec.clone();
    spec.train.recompute = mode;
    Ok(Cow::Owned(spec))
}
