//! H.264 by rusty_h264: length-prefixed units in, pictures out.

pub(crate) mod params;

use rusty_h264_common::YuvFrame;
use rusty_h264_decoder::{DecodeError, Decoder};

use crate::error::{Fault, picture, refused};
use crate::limits::MAX_UNITS_IN_SAMPLE;
use crate::picture::{Colour, Layout, Picture, Plane, Show};
use params::{ParameterSets, SetTable};

const START: [u8; 4] = [0, 0, 0, 1];

/// One rusty_h264 decoder, which gives a sample's picture as soon as the sample is in, in decode order.
#[derive(Default)]
pub(crate) struct H264 {
    decoder: Decoder,
    known: SetTable,
    length_bytes: usize,
    /// The sample with start codes instead of lengths.
    annex_b: Vec<u8>,
}

impl H264 {
    /// Forgets what came before and takes in the container's parameter sets.
    pub fn restart(&mut self, sets: &ParameterSets) -> Result<(), Fault> {
        self.decoder = Decoder::new();
        self.known = sets.known.clone();
        self.length_bytes = sets.length_bytes;
        self.annex_b.clear();
        for unit in &sets.units {
            self.annex_b.extend_from_slice(&START);
            self.annex_b.extend_from_slice(unit);
        }
        self.decoder.decode(&self.annex_b).map_err(fault).map(|_| ())
    }

    /// See [`crate::decoder::Decoder::decode`].
    pub fn decode(&mut self, sample: &[u8], colour: Colour, show: Option<Show<'_>>) -> Result<bool, Fault> {
        let matters = self.scan(sample)?;
        if show.is_none() && !matters {
            return Ok(false);
        }
        let frame = self.decoder.decode(&self.annex_b).map_err(fault)?;
        let frame = frame.ok_or_else(|| picture("slices are missing"))?;
        if let Some(show) = show {
            hand_over(&frame, colour, show);
        }
        Ok(true)
    }

    /// Splits a sample into units, checks each, and keeps what the decoder needs in `annex_b`. Whether
    /// another picture may refer to this one, or its place in the order counts for later ones.
    fn scan(&mut self, sample: &[u8]) -> Result<bool, Fault> {
        self.annex_b.clear();
        let (mut rest, mut units, mut matters) = (sample, 0, false);
        while !rest.is_empty() {
            let (unit, after) = next_unit(rest, self.length_bytes)?;
            rest = after;
            match unit.first().map_or(0, |head| head & 31) {
                1 | 5 => {
                    let sps = self.known.check_slice(unit)?;
                    // Other ways to number pictures count the ones that nothing refers to as well.
                    matters |= unit[0] & 0x60 != 0 || sps.order_type != 0;
                }
                2..=4 => return Err(refused("H.264 with data partitioning")),
                7 | 8 => {
                    self.known.learn(unit)?;
                    matters = true;
                }
                _ => continue,
            }
            units += 1;
            if units > MAX_UNITS_IN_SAMPLE {
                return Err(picture(format!("more than {MAX_UNITS_IN_SAMPLE} slices in one sample")));
            }
            self.annex_b.extend_from_slice(&START);
            self.annex_b.extend_from_slice(unit);
        }
        if units == 0 { Err(picture("a sample without a slice")) } else { Ok(matters) }
    }
}

fn next_unit(bytes: &[u8], length_bytes: usize) -> Result<(&[u8], &[u8]), Fault> {
    let early = || picture("a NAL unit is longer than its sample");
    let (length, rest) = bytes.split_at_checked(length_bytes).ok_or_else(early)?;
    let length = length.iter().fold(0, |sum, &byte| sum << 8 | usize::from(byte));
    rest.split_at_checked(length).ok_or_else(early)
}

fn hand_over(frame: &YuvFrame, colour: Colour, show: Show<'_>) {
    let chroma = frame.width / 2;
    show(&Picture {
        width: frame.width,
        height: frame.height,
        layout: Layout::Yuv420,
        colour,
        planes: [
            Plane { samples: &frame.y, stride: frame.width },
            Plane { samples: &frame.u, stride: chroma },
            Plane { samples: &frame.v, stride: chroma },
        ],
    });
}

fn fault(error: DecodeError) -> Fault {
    match error {
        DecodeError::Unsupported(what) => refused(format!("H.264 with {what}")),
        other => picture(format!("rusty_h264: {other}")),
    }
}
