//! What a process is told whose predecessor the kernel killed because memory ran out.
//!
//! A killed process reports nothing, and its successor knows only what it is started with: its launcher has
//! seen why the other one ended.

/// Set for the successor of a process that was killed because memory ran out.
pub const VARIABLE: &str = "COX_AFTER_MEMORY_KILL";

/// Whether the process before this one, in the same place, was killed because memory ran out.
pub(crate) fn predecessor_was() -> bool {
    std::env::var_os(VARIABLE).is_some_and(|set| !set.is_empty())
}
