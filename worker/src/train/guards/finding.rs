//! What ranks find when they compare what they hold.

use std::fmt;

use coxswain_proto::ids::Rank;

/// What ranks find when they compare.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Comparison {
    /// All agree.
    Sound,
    /// These ranks are wrong; the others are not.
    Wrong(Vec<Rank>),
    /// A rank's part and the replica of it on another rank differ, or all ranks do, and it cannot be told
    /// which is right.
    Unclear(Rank, Rank),
}

impl fmt::Display for Comparison {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Sound => f.write_str("all ranks hold the same state"),
            Self::Wrong(ranks) => {
                let ranks: Vec<_> = ranks.iter().map(Rank::to_string).collect();
                write!(f, "the weights of rank {} differ from those of the others", ranks.join(" and rank "))
            }
            Self::Unclear(one, other) => {
                write!(f, "the optimizer shard of rank {one} differs from its replica on rank {other}")
            }
        }
    }
}
