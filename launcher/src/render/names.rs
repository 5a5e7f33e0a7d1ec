//! Enumerations of the wire contract in plain words.

use coxswain_proto::v1::{
    CacheMode, CacheState, CheckpointState, FailureKind, RunEnd, RunPhase, StateSource, WorkerPhase,
};

/// A run's phase.
pub fn run_phase(phase: i32) -> String {
    word(RunPhase::try_from(phase).ok().map(|phase| phase.as_str_name()), "RUN_PHASE_")
}

/// A worker's phase.
pub fn worker_phase(phase: i32) -> String {
    word(WorkerPhase::try_from(phase).ok().map(|phase| phase.as_str_name()), "WORKER_PHASE_")
}

/// A checkpoint's state.
pub fn checkpoint_state(state: i32) -> String {
    word(CheckpointState::try_from(state).ok().map(|state| state.as_str_name()), "CHECKPOINT_STATE_")
}

/// How features are kept.
pub fn cache_mode(mode: i32) -> String {
    word(CacheMode::try_from(mode).ok().map(|mode| mode.as_str_name()), "CACHE_MODE_")
}

/// How far a generation of the feature cache is.
pub fn cache_state(state: i32) -> String {
    word(CacheState::try_from(state).ok().map(|state| state.as_str_name()), "CACHE_STATE_")
}

/// A kind of failure.
pub fn failure_kind(kind: i32) -> String {
    word(FailureKind::try_from(kind).ok().map(|kind| kind.as_str_name()), "FAILURE_KIND_")
}

/// How a run ended, if it did.
pub fn run_end(end: i32) -> String {
    plain(&word(RunEnd::try_from(end).ok().map(|end| end.as_str_name()), "RUN_END_"))
}

/// Where the ranks of a generation had their state from.
pub fn state_source(source: i32) -> String {
    word(StateSource::try_from(source).ok().map(|source| source.as_str_name()), "STATE_SOURCE_")
}

/// A name as people write it: `waiting for workers`.
pub fn plain(name: &str) -> String {
    name.replace('_', " ")
}

/// `RUN_PHASE_WAITING_FOR_WORKERS` is `waiting_for_workers`; a value of a newer version is `unknown`.
fn word(name: Option<&'static str>, prefix: &str) -> String {
    match name.and_then(|name| name.strip_prefix(prefix)) {
        None | Some("UNSPECIFIED") => "unknown".to_owned(),
        Some(name) => name.to_ascii_lowercase(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_words_and_strangers_unknown() {
        assert_eq!(run_phase(RunPhase::WaitingForWorkers as i32), "waiting_for_workers");
        assert_eq!(plain(&run_phase(RunPhase::WaitingForWorkers as i32)), "waiting for workers");
        assert_eq!(worker_phase(WorkerPhase::CacheBuild as i32), "cache_build");
        assert_eq!(checkpoint_state(CheckpointState::Complete as i32), "complete");
        assert_eq!(failure_kind(FailureKind::OutOfMemory as i32), "out_of_memory");
        assert_eq!(run_end(RunEnd::NotOver as i32), "not over");
        assert_eq!(state_source(StateSource::Replica as i32), "replica");
        assert_eq!(run_phase(99), "unknown");
        assert_eq!(run_phase(0), "unknown");
    }
}
