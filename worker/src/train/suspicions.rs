//! Whose gradients were wrong in a step that was run by others, too.

use std::collections::BTreeSet;

use coxswain_proto::ids::Rank;

/// What a step's attempts have shown.
#[derive(Debug, Default)]
pub(super) struct Suspicions {
    /// Ranks that were wrong in the attempt before.
    pub wrong: BTreeSet<Rank>,
    /// Nothing can be concluded: the step is not replayed again.
    pub given_up: bool,
}
