//! The clips and what FFmpeg makes of them.

use std::path::{Path, PathBuf};

use coxswain_video::{Codec, Colour, Moov, Picture, Plane, Video};

/// One frame as FFmpeg gives it.
pub struct Frame {
    pub ticks: i64,
    /// CRC-32 of luma, Cb, Cr, and of swscale's RGB.
    pub crcs: [u32; 4],
}

/// One track of one clip.
pub struct Clip {
    pub file: String,
    pub track: usize,
    pub codec: Codec,
    pub width: usize,
    pub height: usize,
    pub colour: Colour,
    pub timescale: u32,
    pub frames: Vec<Frame>,
}

impl Clip {
    pub fn open(&self) -> Video {
        let bytes = read(&self.file);
        let moov = Moov::read(&bytes).unwrap();
        Video::with(Path::new(&self.file), Box::new(bytes), &moov, self.track).unwrap()
    }
}

pub fn path(file: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(file)
}

pub fn read(file: &str) -> Vec<u8> {
    std::fs::read(path(file)).unwrap()
}

fn golden() -> Vec<Vec<String>> {
    let text = std::fs::read_to_string(path("golden.txt")).unwrap();
    text.lines().map(|line| line.split(' ').map(str::to_owned).collect()).collect()
}

pub fn clips() -> Vec<Clip> {
    let mut clips: Vec<Clip> = Vec::new();
    for line in golden() {
        let number = |n: usize| line[n].parse::<i64>().unwrap();
        match line[0].as_str() {
            "clip" => clips.push(Clip {
                file: line[1].clone(),
                track: number(2) as usize,
                codec: if line[3] == "av1" { Codec::Av1 } else { Codec::H264 },
                width: number(4) as usize,
                height: number(5) as usize,
                colour: Colour { matrix: number(6) as u16, full_range: number(7) == 2 },
                timescale: number(8) as u32,
                frames: Vec::with_capacity(number(9) as usize),
            }),
            "colour" => {}
            _ => clips.last_mut().unwrap().frames.push(Frame {
                ticks: number(0),
                crcs: [1, 2, 3, 4].map(|n: usize| u32::from_str_radix(&line[n], 16).unwrap()),
            }),
        }
    }
    clips
}

pub fn clip(file: &str) -> Clip {
    clips().into_iter().find(|clip| clip.file == file).unwrap()
}

/// The lines about swscale alone.
pub fn colours() -> Vec<Vec<String>> {
    golden().into_iter().filter(|line| line[0] == "colour").collect()
}

/// The CRCs of a picture, as the golden file has them.
pub fn crcs(picture: &Picture<'_>) -> [u32; 4] {
    let (w, h) = (picture.width, picture.height);
    let (cw, ch) = (picture.layout.chroma_width(w), picture.layout.chroma_height(h));
    let crc = |plane: &Plane<'_>, w: usize, h: usize| {
        let mut hasher = crc32fast::Hasher::new();
        (0..h).for_each(|row| hasher.update(plane.row(row, w)));
        hasher.finalize()
    };
    let [y, u, v] = &picture.planes;
    [crc(y, w, h), crc(u, cw, ch), crc(v, cw, ch), crc32fast::hash(&picture.to_rgb())]
}

/// A stream of numbers for tests that try many cases: xorshift64*.
pub struct Numbers(pub u64);

impl Numbers {
    pub fn below(&mut self, limit: usize) -> usize {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 33) as usize % limit
    }
}
