//! The end of a run whose state is intact: before it, the ranks that are left write a checkpoint.
//!
//! A run whose budget is spent, that makes no progress, whose successors do not come, or of which a rank
//! cannot use its input any more, has lost nothing of what it has learned: survivors hold it, with replicas
//! of what the lost ones held. They form one last generation, as many as they are, in a fixed world, too. It
//! settles like any other, trains no step, and writes what no checkpoint has yet.
//!
//! ```text
//! such a fault ─▶ is_worth_it ─▶ Gathering ─▶ Connecting, of the survivors ─▶ checkpoint ─▶ Over
//!                      │             │                 │                          ▲
//!                      └─────────────┴─ none is left ──┴─ one is lost, all late, ─┘
//!                                                         or their state is an older one
//! ```
//!
//! Whatever comes of it, the run has failed with the fault that began it.

use coxswain_proto::ids::Step;

use super::run::Run;
use crate::core::{failure::Failure, roster::Worker};

/// Whether survivors have learned something that no checkpoint has.
pub(super) fn is_worth_it(run: &Run) -> bool {
    let unsaved = run.progress.committed > run.progress.checkpoints.newest_complete();
    let ended = run.phase.is_over() || run.faults.closing().is_some();
    unsaved && !ended && holders(run).next().is_some()
}

/// Whether a run that ends now has something to go on from, and learned nothing beyond it.
pub(super) fn is_saved(run: &Run) -> bool {
    let newest = run.progress.checkpoints.newest_complete();
    let ended = run.phase.is_over() || run.faults.closing().is_some();
    !ended && newest > Step(0) && newest >= run.progress.committed
}

/// Workers that were in a generation, and may hold a part of its state: the members of the last one.
pub(super) fn holders(run: &Run) -> impl Iterator<Item = &Worker> {
    let living = run.fleet.roster.living();
    living.filter(|worker| {
        let has_part = worker.generation.0 > 0 && worker.generation == run.generation;
        has_part && !run.may_go(worker.slot())
    })
}

/// The failure of the run, with where to go on from; `hindrance` says why the last checkpoint is not there,
/// if it is not.
pub(super) fn told(run: &Run, failure: &Failure, hindrance: &str) -> Failure {
    let (newest, committed) = (run.progress.checkpoints.newest_complete(), run.progress.committed);
    let from = match newest {
        Step(0) => "there is no checkpoint to resume from".to_owned(),
        newest => format!("start again to resume from checkpoints/{}", newest.checkpoint_dir()),
    };
    let missed = match newest >= committed {
        true => String::new(),
        false => format!("the run's last checkpoint was not written ({hindrance}); "),
    };
    Failure { message: format!("{}; {missed}{from}", failure.message), ..failure.clone() }
}
