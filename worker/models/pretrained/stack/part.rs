//! What a rank holds of blocks that are shared out.

use std::sync::Arc;

use coxswain_nn::sharded::{Cut, Peers};

/// What a rank holds of a tower, and whom it asks for the rest.
pub(super) struct TowerShare {
    pub cut: Cut,
    pub parts: Vec<Arc<Part>>,
    pub peers: Arc<dyn Peers>,
    /// Number of the tower's first block among all that are shared out.
    pub first: usize,
}

/// A part of a block, aligned for every element.
pub(super) struct Part {
    words: Vec<u32>,
    len: usize,
}

impl Part {
    pub fn zeros(len: usize) -> Self {
        Self { words: vec![0; len.div_ceil(size_of::<u32>())], len }
    }

    pub fn bytes_mut(&mut self) -> &mut [u8] {
        &mut bytemuck::cast_slice_mut::<u32, u8>(&mut self.words)[..self.len]
    }
}

impl AsRef<[u8]> for Part {
    fn as_ref(&self) -> &[u8] {
        &bytemuck::cast_slice::<u32, u8>(&self.words)[..self.len]
    }
}

/// Keeps a part alive for as long as a tensor borrows from it.
pub(super) struct PartOwner(pub Arc<Part>);

impl AsRef<[u8]> for PartOwner {
    fn as_ref(&self) -> &[u8] {
        (*self.0).as_ref()
    }
}
