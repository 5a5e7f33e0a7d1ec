//! Frozen weights that ranks share out: what a model and the engine say to each other about them
//! (`memory.shard: frozen`).
//!
//! Every tensor of a block is cut into as many chunks as there are ranks, each of whole elements
//! ([`chunk`](crate::params::chunk)). A rank's *part* of a block is its chunk of each of the block's tensors,
//! one behind the other: it is what a rank holds, and what it hands to a rank that asks.
//!
//! ```text
//! block      q.weight          k.weight    up.weight            ...
//!            ├ 0 ┼ 1 ┼ 2 ┤     ├0┼1┼2┤     ├ 0 ┼ 1 ┼ 2 ┤
//! part 1         └ 1 ┘ ─────────┴1┴──────────── └ 1 ┘           one piece of memory
//! ```
//!
//! Nobody gathers in step with anybody: a rank asks for what it lacks when it needs it, so ranks may run
//! different numbers of passes, in any order. Frozen weights do not change, so an answer is never out of
//! date; and as every rank can read the files, a part that does not come is read there. That is why a peer
//! that is gone is no error here.
//!
//! What this file does not do: carry bytes (the engine does), or read files (the model does).

use std::sync::Arc;

/// Which chunk of how many.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Cut {
    /// The chunk, and the rank that holds it.
    pub rank: usize,
    /// Chunks, and ranks.
    pub world: usize,
}

impl Cut {
    /// Whether other ranks hold chunks, too.
    pub fn is_shared(self) -> bool {
        self.world > 1
    }
}

/// A part, for as long as somebody reads it.
pub type PartBytes = Arc<dyn AsRef<[u8]> + Send + Sync>;

/// What a rank holds of the blocks that are shared out, for other ranks to ask for.
pub trait HeldParts: Send + Sync {
    /// Names how the blocks are cut up: ranks of one name mean the same bytes by a block and a cut.
    fn digest(&self) -> [u8; 32];

    /// This rank's part of a block; none if it holds another cut, or none yet.
    fn part(&self, block: usize, cut: Cut) -> Option<PartBytes>;
}

/// What is wanted of another rank: its part of a block.
pub struct Fetch<'a> {
    /// The rank.
    pub rank: usize,
    /// Where its chunks of the block's tensors go, in their order.
    pub places: Vec<&'a mut [u8]>,
    /// Whether they are there.
    pub came: bool,
}

impl Fetch<'_> {
    /// Bytes of the part.
    pub fn len(&self) -> usize {
        self.places.iter().map(|place| place.len()).sum()
    }

    /// Whether there is nothing to ask for.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// Where the parts of other ranks are asked for.
pub trait Peers: Send + Sync {
    /// Fills in what comes of a block. `goes_on` hears of every piece that has come, and says whether it is
    /// still waited for; once it is not, nothing more needs to come.
    fn fetch(&self, block: usize, wanted: &mut [Fetch<'_>], goes_on: &dyn Fn() -> bool);
}

/// No other rank, or none that can be asked.
#[derive(Clone, Copy, Debug, Default)]
pub struct NoPeers;

impl Peers for NoPeers {
    fn fetch(&self, _block: usize, _wanted: &mut [Fetch<'_>], _goes_on: &dyn Fn() -> bool) {}
}
