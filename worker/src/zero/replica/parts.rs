//! What a rank can give of its parts: which of them, in which versions, and what is in one.

use coxswain_nn::rules::StateValues;
use coxswain_proto::ids::Rank;

use crate::collective::{BufMut, Collective, CollectiveError};

/// One part of the flat parameter buffer in one version.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ShardState {
    /// Weights.
    pub weights: Vec<f32>,
    /// The update rule's state of them, in the order of its buffers.
    pub state: Vec<StateValues<Vec<f32>>>,
    /// The average of the weights; empty if none is kept.
    pub average: Vec<f32>,
}

impl ShardState {
    /// Bytes of all of it.
    pub fn bytes(&self) -> u64 {
        let state: usize = self.state.iter().map(StateValues::bytes).sum();
        (4 * (self.weights.len() + self.average.len()) + state) as u64
    }

    /// Every rank ends with that of `from`. Buffers that are empty, which they are on all ranks, are passed
    /// over.
    pub fn broadcast(&mut self, from: Rank, comm: &mut dyn Collective) -> Result<(), CollectiveError> {
        let Self { weights, state, average } = self;
        broadcast_floats(weights, from, comm)?;
        for values in state {
            match values {
                StateValues::Float32(values) => broadcast_floats(values, from, comm)?,
                StateValues::Uint8(values) => {
                    // Nothing is added up on the way: any bits travel as float32.
                    let len = values.len();
                    let mut words = vec![0.0f32; len.div_ceil(size_of::<f32>())];
                    bytemuck::cast_slice_mut(&mut words)[..len].copy_from_slice(values);
                    broadcast_floats(&mut words, from, comm)?;
                    values.copy_from_slice(&bytemuck::cast_slice(&words)[..len]);
                }
            }
        }
        broadcast_floats(average, from, comm)
    }
}

fn broadcast_floats(
    values: &mut [f32],
    from: Rank,
    comm: &mut dyn Collective,
) -> Result<(), CollectiveError> {
    if values.is_empty() { Ok(()) } else { comm.broadcast(BufMut::F32(values), from) }
}

/// Which versions of a part a rank can give: the newest, and perhaps the one before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Versions {
    /// Steps taken in the newest.
    pub newest: u64,
    /// Whether the version one step older is there, too: the newest is then prepared, not taken.
    pub older: bool,
}

impl Versions {
    /// Whether this version is there.
    pub fn contain(&self, version: u64) -> bool {
        version == self.newest || (self.older && version + 1 == self.newest)
    }
}

/// Which of its two parts a rank is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Copy {
    /// Own.
    Own,
    /// The other rank's.
    Replica,
}
