//! Parameter sets and slice heads of H.264, as far as they decide what is decoded here and how much memory it
//! takes.
//!
//! rusty_h264 parses them again for itself. What it takes from them unchecked is bounded here: the size of
//! the picture, how many pictures are kept, and how long reference lists are.

use std::collections::BTreeMap;

use rusty_h264_common::BitReader;
use rusty_h264_common::bit_reader::OutOfData;
use rusty_h264_common::nal::emulation_unprevent;

use crate::boxes::Cursor;
use crate::error::{Fault, container, picture, refused};
use crate::limits::{MAX_LIST_ENTRIES, MAX_REFERENCES};
use crate::picture::Colour;

/// Profiles whose SPS says chroma format and bit depth (H.264 7.3.2.1.1).
const HIGH_PROFILES: [u32; 13] = [100, 110, 122, 244, 44, 83, 86, 118, 128, 138, 139, 134, 135];

/// What `avcC` holds.
#[derive(Debug, Clone)]
pub(crate) struct ParameterSets {
    /// Bytes of the length before each NAL unit.
    pub length_bytes: usize,
    /// SPS and PPS units, as they go to the decoder.
    pub units: Vec<Vec<u8>>,
    pub known: SetTable,
}

impl ParameterSets {
    /// `size` is the track's; the pictures' must be the same.
    pub fn from_avcc(avcc: &[u8], size: (usize, usize)) -> Result<Self, Fault> {
        let mut cursor = Cursor::new(avcc);
        cursor.take(4)?;
        let length_bytes = usize::from(cursor.u8()? & 3) + 1;
        let mut sets =
            Self { length_bytes, units: Vec::new(), known: SetTable { size, ..SetTable::default() } };
        for mask in [0x1f, 0xff] {
            for _ in 0..cursor.u8()? & mask {
                let length = cursor.u16()?;
                let unit = cursor.take(length.into())?;
                sets.known.learn(unit).map_err(|fault| match fault {
                    Fault::Picture(what) => container(format!("`avcC`: {what}")),
                    other => other,
                })?;
                sets.units.push(unit.to_vec());
            }
        }
        Ok(sets)
    }

    /// What the stream itself says of its colours.
    pub fn colour(&self) -> Option<Colour> {
        self.known.sps.values().find_map(|sps| sps.colour)
    }
}

/// The sets a slice may name.
#[derive(Debug, Clone, Default)]
pub(crate) struct SetTable {
    size: (usize, usize),
    sps: BTreeMap<u32, Sps>,
    pps: BTreeMap<u32, Pps>,
}

impl SetTable {
    /// Takes in a unit of type 7 (SPS) or 8 (PPS), or refuses it.
    pub fn learn(&mut self, unit: &[u8]) -> Result<(), Fault> {
        let (&head, payload) = unit.split_first().ok_or_else(|| picture("an empty NAL unit"))?;
        let rbsp = emulation_unprevent(payload);
        let mut bits = Bits(BitReader::new(&rbsp));
        match head & 31 {
            7 => {
                let sps = Sps::parse(&mut bits)?;
                if sps.size != self.size {
                    let ((w, h), (tw, th)) = (sps.size, self.size);
                    return Err(picture(format!("it is {w} x {h} pixels, but the track says {tw} x {th}")));
                }
                self.sps.insert(sps.id, sps);
            }
            8 => {
                let pps = Pps::parse(&mut bits)?;
                self.pps.insert(pps.id, pps);
            }
            _ => {}
        }
        Ok(())
    }

    /// Checks the head of a slice and gives the SPS it is decoded by.
    pub fn check_slice(&self, unit: &[u8]) -> Result<&Sps, Fault> {
        let head = unit.first().copied().unwrap_or(0);
        // The fields read here need far fewer bytes.
        let rbsp = emulation_unprevent(&unit[1.min(unit.len())..unit.len().min(64)]);
        let mut bits = Bits(BitReader::new(&rbsp));
        bits.ue()?;
        let kind = bits.ue()?;
        let missing = || picture("a slice names a missing parameter set");
        let pps = self.pps.get(&bits.ue()?).ok_or_else(missing)?;
        let sps = self.sps.get(&pps.sps).ok_or_else(missing)?;
        bits.u(sps.frame_num_bits)?;
        if !sps.frames_only && bits.flag()? {
            return Err(refused("interlaced H.264"));
        }
        if head & 31 == 5 {
            bits.ue()?;
        }
        if sps.order_type == 0 {
            bits.u(sps.order_bits)?;
            if pps.field_order_present {
                bits.se()?;
            }
        } else if sps.order_type == 1 && !sps.order_always_zero {
            bits.se()?;
            if pps.field_order_present {
                bits.se()?;
            }
        }
        if pps.redundant_count_present {
            bits.ue()?;
        }
        let (is_p, is_b) = (matches!(kind, 0 | 5), matches!(kind, 1 | 6));
        if is_b {
            bits.flag()?;
        }
        if (is_p || is_b) && bits.flag()? {
            list_entries(bits.ue()?)?;
            if is_b {
                list_entries(bits.ue()?)?;
            }
        }
        Ok(sps)
    }
}

#[derive(Debug, Clone)]
pub(crate) struct Sps {
    id: u32,
    frame_num_bits: u32,
    pub order_type: u32,
    order_bits: u32,
    order_always_zero: bool,
    frames_only: bool,
    size: (usize, usize),
    colour: Option<Colour>,
}

impl Sps {
    fn parse(bits: &mut Bits<'_>) -> Result<Self, Fault> {
        let profile = bits.u(8)?;
        bits.u(16)?;
        let id = bits.ue()?;
        if HIGH_PROFILES.contains(&profile) {
            read_format(bits)?;
        }
        let frame_num_bits = small(bits.ue()?, 12)? + 4;
        let order_type = bits.ue()?;
        let (mut order_bits, mut order_always_zero) = (0, false);
        match order_type {
            0 => order_bits = small(bits.ue()?, 12)? + 4,
            1 => {
                order_always_zero = bits.flag()?;
                bits.se()?;
                bits.se()?;
                for _ in 0..small(bits.ue()?, 255)? {
                    bits.se()?;
                }
            }
            _ => {}
        }
        let references = bits.ue()?;
        if references > MAX_REFERENCES {
            let (what, value, limit) = ("reference pictures", references.into(), MAX_REFERENCES.into());
            return Err(Fault::Limit { what, value, limit });
        }
        bits.flag()?;
        let (columns, rows) = (small(bits.ue()?, 1 << 12)? + 1, small(bits.ue()?, 1 << 12)? + 1);
        let frames_only = bits.flag()?;
        if !frames_only && bits.flag()? {
            return Err(refused("interlaced H.264"));
        }
        bits.flag()?;
        let unit = if frames_only { 2 } else { 4 };
        let mut edges = [0; 4];
        if bits.flag()? {
            for edge in &mut edges {
                *edge = small(bits.ue()?, 1 << 15)? as usize;
            }
        }
        let cut = |whole: u32, before: usize, after: usize| {
            (whole as usize * 16).checked_sub(before + after).filter(|&left| left > 0)
        };
        let [left, right, top, bottom] = [edges[0] * 2, edges[1] * 2, edges[2] * unit, edges[3] * unit];
        let rows = if frames_only { rows } else { 2 * rows };
        let (Some(width), Some(height)) = (cut(columns, left, right), cut(rows, top, bottom)) else {
            return Err(picture("the picture is cropped to nothing"));
        };
        // rusty_h264 crops at the right and bottom only, FFmpeg not to the pixel; no camera's encoder writes
        // it.
        if left + top > 0 {
            return Err(refused("H.264 with a picture cropped at the left or top"));
        }
        let colour = if bits.flag()? { read_colour(bits)? } else { None };
        let size = (width, height);
        Ok(Self { id, frame_num_bits, order_type, order_bits, order_always_zero, frames_only, size, colour })
    }
}

/// Chroma format, bit depths and scaling lists of the high profiles.
fn read_format(bits: &mut Bits<'_>) -> Result<(), Fault> {
    let chroma = bits.ue()?;
    if chroma == 3 {
        bits.flag()?;
    }
    match chroma {
        1 => {}
        0 => return Err(refused("monochrome H.264")),
        2 => return Err(refused("H.264 with 4:2:2 chroma")),
        3 => return Err(refused("H.264 with 4:4:4 chroma")),
        _ => return Err(picture("an unknown chroma format")),
    }
    let depth = bits.ue()?.max(bits.ue()?);
    if depth > 0 {
        return Err(refused(format!("{}-bit H.264", depth.saturating_add(8))));
    }
    bits.flag()?;
    if bits.flag()? {
        for list in 0..8 {
            if bits.flag()? {
                let (mut last, mut next) = (8, 8);
                for _ in 0..if list < 6 { 16 } else { 64 } {
                    if next != 0 {
                        next = (last + bits.se()? % 256 + 256) % 256;
                    }
                    last = if next == 0 { last } else { next };
                }
            }
        }
    }
    Ok(())
}

/// The part of the VUI up to the colours (Annex E).
fn read_colour(bits: &mut Bits<'_>) -> Result<Option<Colour>, Fault> {
    if bits.flag()? && bits.u(8)? == 255 {
        bits.u(32)?;
    }
    if bits.flag()? {
        bits.flag()?;
    }
    if !bits.flag()? {
        return Ok(None);
    }
    bits.u(3)?;
    let full_range = bits.flag()?;
    let mut matrix = 2;
    if bits.flag()? {
        bits.u(16)?;
        matrix = bits.u(8)? as u16;
    }
    Ok(Some(Colour { matrix, full_range }))
}

#[derive(Debug, Clone)]
struct Pps {
    id: u32,
    sps: u32,
    field_order_present: bool,
    redundant_count_present: bool,
}

impl Pps {
    fn parse(bits: &mut Bits<'_>) -> Result<Self, Fault> {
        let (id, sps) = (small(bits.ue()?, 255)?, small(bits.ue()?, 31)?);
        bits.flag()?;
        let field_order_present = bits.flag()?;
        if bits.ue()? > 0 {
            return Err(refused("H.264 with slice groups"));
        }
        list_entries(bits.ue()?)?;
        list_entries(bits.ue()?)?;
        bits.u(3)?;
        for _ in 0..3 {
            bits.se()?;
        }
        bits.u(2)?;
        Ok(Self { id, sps, field_order_present, redundant_count_present: bits.flag()? })
    }
}

fn list_entries(minus_one: u32) -> Result<(), Fault> {
    small(minus_one, MAX_LIST_ENTRIES - 1).map(|_| ())
}

fn small(value: u32, limit: u32) -> Result<u32, Fault> {
    if value > limit {
        Err(picture(format!("a header field is {value}, but at most {limit} is allowed")))
    } else {
        Ok(value)
    }
}

/// A bit reader that speaks our errors.
struct Bits<'a>(BitReader<'a>);

impl Bits<'_> {
    fn flag(&mut self) -> Result<bool, Fault> {
        self.0.read_bit().map_err(early)
    }

    fn u(&mut self, bits: u32) -> Result<u32, Fault> {
        self.0.read_bits(bits).map_err(early)
    }

    fn ue(&mut self) -> Result<u32, Fault> {
        self.0.read_ue().map_err(early)
    }

    fn se(&mut self) -> Result<i32, Fault> {
        self.0.read_se().map_err(early)
    }
}

fn early(_: OutOfData) -> Fault {
    picture("a header ends early")
}
