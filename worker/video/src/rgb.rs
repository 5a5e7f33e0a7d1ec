//! Luma and chroma to RGB, with the bits of swscale at its defaults.
//!
//! LeRobot's pictures went through swscale on their way into the video and go through it on the way out, so
//! its arithmetic is the reference, not the exact formula:
//!
//! ```text
//! R = sat8(Y + V vr)    G = sat8(Y + U ug + V vg)    B = sat8(Y + U ub)
//! Y = (8 luma - offset) cy >> 16,   U vr = (8 cb - 1024) vr >> 16, ...     coefficients times 2^13
//! ```
//!
//! Each product is rounded down, which costs up to three levels against the exact formula (0.7 on average).
//! Chroma is repeated, not interpolated: that is swscale's default for 4:2:0 and 4:2:2 of even height without
//! scaling. For 4:4:4 swscale takes another path that rounds to nearest; so do we. Frames of odd height go
//! through swscale's scaler, which interpolates chroma: those differ from ours.
//!
//! Matrix and range are the stream's. Unspecified is BT.601 (`SWS_CS_DEFAULT`) and limited range. Transfer
//! curve and primaries are left as they are, as in swscale.

use crate::picture::{Colour, Layout, Picture};

/// 65536 times the weights of (red from Cr, blue from Cb, green from Cb, green from Cr): `ff_yuv2rgb_coeffs`.
fn weights(matrix: u16) -> [i64; 4] {
    match matrix {
        1 => [117_489, 138_438, 13_975, 34_925],
        4 => [104_448, 132_798, 24_759, 53_109],
        7 => [117_579, 136_230, 16_907, 35_559],
        9 | 10 => [110_013, 140_363, 12_277, 42_626],
        _ => [104_597, 132_201, 25_675, 53_279],
    }
}

/// What `ff_yuv2rgb_c_init_tables` computes, in its 64-bit arithmetic.
#[derive(Debug, Clone, Copy)]
struct Coefficients {
    luma: i16,
    offset: i16,
    red_v: i16,
    green_u: i16,
    green_v: i16,
    blue_u: i16,
}

impl Coefficients {
    fn new(colour: Colour) -> Self {
        let mut weights = weights(colour.matrix);
        weights[2] = -weights[2];
        weights[3] = -weights[3];
        let (mut luma, mut offset) = (1 << 16, 0);
        if colour.full_range {
            weights = weights.map(|weight| weight * 224 / 255);
        } else {
            luma = luma * 255 / 219;
            offset = 16 << 16;
        }
        let round = |value: i64| ((value + (1 << 15)) >> 16) as i16;
        let [red_v, blue_u, green_u, green_v] = weights.map(|weight| round(weight << 13));
        Self { luma: round(luma << 13), offset: round(offset << 3), red_v, green_u, green_v, blue_u }
    }
}

impl Picture<'_> {
    /// Writes RGB, `height x width x 3`, as swscale does at its defaults.
    ///
    /// # Panics
    /// When `rgb` is not `height * width * 3` bytes.
    pub fn write_rgb(&self, rgb: &mut [u8]) {
        let (width, height) = (self.width, self.height);
        assert_eq!(rgb.len(), width * height * 3, "the buffer is height x width x 3");
        let chroma_width = self.layout.chroma_width(width);
        let c = Coefficients::new(self.colour);
        let mut terms = Terms::new(chroma_width);
        let mut filled = usize::MAX;
        for (row, out) in rgb.chunks_exact_mut(width * 3).enumerate() {
            let luma = self.planes[0].row(row, width);
            let chroma_row = if self.layout == Layout::Yuv420 { row / 2 } else { row };
            let [u, v] = [1, 2].map(|plane: usize| self.planes[plane].row(chroma_row, chroma_width));
            if self.layout == Layout::Yuv444 {
                nearest_row(luma, u, v, self.colour, out);
                continue;
            }
            if filled != chroma_row {
                terms.fill(u, v, c);
                filled = chroma_row;
            }
            terms.row(luma, c, out);
        }
    }

    /// The picture as RGB, `height x width x 3`.
    pub fn to_rgb(&self) -> Vec<u8> {
        let mut rgb = vec![0; self.width * self.height * 3];
        self.write_rgb(&mut rgb);
        rgb
    }
}

/// What a row of chroma adds to red, green and blue; used for one or two rows of luma.
struct Terms {
    red: Vec<i16>,
    green: Vec<i16>,
    blue: Vec<i16>,
}

impl Terms {
    fn new(width: usize) -> Self {
        Self { red: vec![0; width], green: vec![0; width], blue: vec![0; width] }
    }

    fn fill(&mut self, u: &[u8], v: &[u8], c: Coefficients) {
        let out = self.red.iter_mut().zip(&mut self.green).zip(&mut self.blue);
        for (((red, green), blue), (&u, &v)) in out.zip(u.iter().zip(v)) {
            let (u, v) = (centred(u), centred(v));
            *red = high(v, c.red_v);
            *green = high(u, c.green_u) + high(v, c.green_v);
            *blue = high(u, c.blue_u);
        }
    }

    fn row(&self, luma: &[u8], c: Coefficients, out: &mut [u8]) {
        let terms = self.red.iter().zip(&self.green).zip(&self.blue);
        for ((luma, out), ((&red, &green), &blue)) in luma.chunks(2).zip(out.chunks_mut(6)).zip(terms) {
            for (&luma, out) in luma.iter().zip(out.chunks_exact_mut(3)) {
                let y = high(i16::from(luma) * 8 - c.offset, c.luma);
                out[0] = saturate(y + red);
                out[1] = saturate(y + green);
                out[2] = saturate(y + blue);
            }
        }
    }
}

fn centred(chroma: u8) -> i16 {
    i16::from(chroma) * 8 - 1024
}

/// The high half of a product, rounded down (`pmulhw`).
fn high(a: i16, b: i16) -> i16 {
    ((i32::from(a) * i32::from(b)) >> 16) as i16
}

fn saturate(value: i16) -> u8 {
    value.clamp(0, 255) as u8
}

/// 4:4:4, rounded to nearest in 16 bits of fraction.
fn nearest_row(luma: &[u8], u: &[u8], v: &[u8], colour: Colour, out: &mut [u8]) {
    let mut weights = weights(colour.matrix);
    let (scale, offset) = if colour.full_range { (1 << 16, 0) } else { ((255 << 16) / 219, 16) };
    if colour.full_range {
        weights = weights.map(|weight| weight * 224 / 255);
    }
    let to_byte = |value: i64| ((value + (1 << 15)) >> 16).clamp(0, 255) as u8;
    for (((&luma, &u), &v), out) in luma.iter().zip(u).zip(v).zip(out.chunks_exact_mut(3)) {
        let y = (i64::from(luma) - offset) * scale;
        let (u, v) = (i64::from(u) - 128, i64::from(v) - 128);
        out[0] = to_byte(y + weights[0] * v);
        out[1] = to_byte(y - weights[2] * u - weights[3] * v);
        out[2] = to_byte(y + weights[1] * u);
    }
}
