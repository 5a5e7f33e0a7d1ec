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
impl Step {
    /// The directory, below `checkpoints`, of the state after this many steps: `step-00000020`.
    pub fn checkpoint_dir(self) -> String {
        format!("{CHECKPOINT}{self:08}")
    }

    /// Whose checkpoint a directory of this name is; none if it is nobody's, such as a copy that somebody has
    /// put there.
    pub fn of_checkpoint_dir(name: &str) -> Option<Self> {
        let step = Self(name.strip_prefix(CHECKPOINT)?.parse().ok()?);
        (step.checkpoint_dir() == name).then_some(step)
    }
}

const CHECKPOINT: &str = "step-";

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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_checkpoint_is_known_by_its_whole_name() {
        for step in [0, 7, 20, 99_999_999, 100_000_000, u64::MAX] {
            assert_eq!(Step::of_checkpoint_dir(&Step(step).checkpoint_dir()), Some(Step(step)));
        }
        assert_eq!(Step(20).checkpoint_dir(), "step-00000020");
        let strange = [
            "step-best",
            "step-20",
            "step-00000020-copy",
            "step-000000020",
            "step-+0000020",
            "step-",
            "notes",
        ];
        for name in strange {
            assert_eq!(Step::of_checkpoint_dir(name), None, "{name}");
        }
    }
}
