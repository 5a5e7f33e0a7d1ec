//! Tracks on disk as samples: segments of a mixture and of its stems.

mod batch;
mod header;
mod tracks;
mod wav;

pub use self::{
    batch::{CHANNELS, SegmentBatch, SegmentSample},
    tracks::Tracks,
    wav::{Wav, WavPlace},
};
