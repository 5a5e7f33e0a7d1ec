//! What a rank can give of its parts: which of them, in which versions, and what is in one.

/// One part of the flat parameter buffer in one version.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ShardState {
    /// Weights.
    pub weights: Vec<f32>,
    /// First moments.
    pub exp_avg: Vec<f32>,
    /// Second moments.
    pub exp_avg_sq: Vec<f32>,
    /// The average of the weights; empty if none is kept.
    pub average: Vec<f32>,
}

impl ShardState {
    /// Zeros for a part of `len` elements, with an average of the weights or without one.
    pub fn zeros(len: usize, averaged: bool) -> Self {
        let zeros = || vec![0.0; len];
        let average = if averaged { zeros() } else { Vec::new() };
        Self { weights: zeros(), exp_avg: zeros(), exp_avg_sq: zeros(), average }
    }

    /// All of it, in one order.
    pub fn buffers(&mut self) -> [&mut Vec<f32>; 4] {
        [&mut self.weights, &mut self.exp_avg, &mut self.exp_avg_sq, &mut self.average]
    }
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
    /// Its own.
    Own,
    /// The other rank's.
    Replica,
}
