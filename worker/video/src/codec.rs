//! The sample description: which codec, how large, which colours, and what its decoder needs before the first
//! picture. Codecs that are not decoded are refused here, by name.

use crate::av1;
use crate::boxes::{Boxes, Cursor, name};
use crate::error::{Fault, container, refused};
use crate::h264::params::ParameterSets;
use crate::limits::MAX_PIXELS;
use crate::picture::Colour;

/// What decodes a video.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Codec {
    /// AV1, 8 bit, by rav1d.
    Av1,
    /// H.264, 8 bit 4:2:0 progressive, by rusty_h264.
    H264,
}

/// What stands in the container for the decoder.
#[derive(Debug)]
pub(crate) enum Stream {
    /// OBUs (the sequence header) that come before the first picture.
    Av1 {
        header: Vec<u8>,
    },
    H264(ParameterSets),
}

impl Stream {
    pub fn codec(&self) -> Codec {
        match self {
            Self::Av1 { .. } => Codec::Av1,
            Self::H264(_) => Codec::H264,
        }
    }
}

#[derive(Debug)]
pub(crate) struct Description {
    pub stream: Stream,
    pub width: usize,
    pub height: usize,
    pub colour: Colour,
}

impl Description {
    /// Reads the `number`th entry of `stsd`.
    pub fn read(stsd: &[u8], number: usize) -> Result<Self, Fault> {
        let mut cursor = Cursor::new(stsd);
        cursor.version()?;
        cursor.u32()?;
        let entry =
            Boxes::new(cursor.rest()).nth(number).ok_or_else(|| container("no sample description"))??;
        let kind = entry.kind;
        if let Some(what) = not_decoded(&kind, is_depth(entry.body.get(78..).unwrap_or(&[]))) {
            return Err(refused(what));
        }
        let mut entry = Cursor::new(entry.body);
        entry.take(24)?;
        let (width, height) = (usize::from(entry.u16()?), usize::from(entry.u16()?));
        entry.take(50)?;
        let boxes = entry.rest();
        if width == 0 || height == 0 {
            return Err(container(format!("frames of {width} x {height} pixels")));
        }
        let value = (width * height) as u64;
        if value > MAX_PIXELS {
            return Err(Fault::Limit { what: "pixels per frame", value, limit: MAX_PIXELS });
        }
        let mut colour = colour(boxes)?;
        let stream = match &kind {
            b"av01" => Stream::Av1 { header: av1::header(Boxes::need(boxes, b"av1C")?)? },
            b"avc1" | b"avc3" => {
                let sets = ParameterSets::from_avcc(Boxes::need(boxes, b"avcC")?, (width, height))?;
                colour = sets.colour().unwrap_or(colour);
                Stream::H264(sets)
            }
            other => return Err(refused(format!("video of type `{}`", name(other)))),
        };
        Ok(Self { stream, width, height, colour })
    }
}

/// `hvcC` of what LeRobot writes for depth: no chroma, more than eight bits.
fn is_depth(boxes: &[u8]) -> bool {
    let hvcc = Boxes::find(boxes, b"hvcC").ok().flatten().unwrap_or(&[]);
    matches!(hvcc.get(16..18), Some(&[chroma, depth]) if chroma & 3 == 0 && depth & 7 > 0)
}

fn not_decoded(kind: &[u8; 4], is_depth: bool) -> Option<&'static str> {
    Some(match kind {
        b"hvc1" | b"hev1" | b"dvh1" | b"dvhe" if is_depth => "a depth map (HEVC, 12 bit grey)",
        b"hvc1" | b"hev1" | b"dvh1" | b"dvhe" => "HEVC (H.265)",
        b"vp08" => "VP8",
        b"vp09" => "VP9",
        b"mp4v" => "MPEG-4 part 2",
        b"vvc1" | b"vvi1" => "VVC (H.266)",
        b"jpeg" | b"mjpa" | b"mjpb" => "Motion JPEG",
        b"apcn" | b"apch" | b"apcs" | b"apco" | b"ap4h" => "ProRes",
        b"FFV1" => "FFV1",
        b"encv" => "encrypted video",
        _ => return None,
    })
}

/// The container's word on colours (`colr` of type `nclx` or QuickTime's `nclc`); a stream that says
/// something itself overrules it.
fn colour(boxes: &[u8]) -> Result<Colour, Fault> {
    let mut colour = Colour::default();
    if let Some(colr) = Boxes::find(boxes, b"colr")? {
        let mut cursor = Cursor::new(colr);
        let kind = cursor.array::<4>()?;
        if &kind == b"nclx" || &kind == b"nclc" {
            cursor.take(4)?;
            colour.matrix = cursor.u16()?;
            colour.full_range = &kind == b"nclx" && cursor.u8()? & 0x80 != 0;
        }
    }
    Ok(colour)
}
