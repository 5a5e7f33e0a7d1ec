//! Newtypes for ids and quantities, so that a rank is never passed where a step is meant.

use std::fmt;

use serde::{Deserialize, Serialize};

macro_rules! id {
    ($(#[$doc:meta])* $name:ident($inner:ty)) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        #[serde(transparent)]
        pub struct $name(pub $inner);

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.fmt(f)
            }
        }
    };
}

id!(
    /// A worker's position in a generation, `0..world`.
    Rank(u32)
);
id!(
    /// A worker's place as its launcher gave it: `node rank * workers per node + place on the node`, the
    /// worker's `RANK`. In a fixed world equal to its [`Rank`]; in an elastic one ranks are dense over the
    /// slots that are taken.
    Slot(u32)
);
id!(
    /// One membership: a fixed set of workers with ranks. Grows by one whenever the membership changes.
    Generation(u64)
);
id!(
    /// An optimizer step, counted from 0 over the whole run.
    Step(u64)
);
id!(
    /// One life of one worker process; never reused within a run.
    WorkerId(u64)
);
id!(
    /// A lease on the samples of a range of steps.
    LeaseId(u64)
);
id!(
    /// A number of bytes.
    Bytes(u64)
);
