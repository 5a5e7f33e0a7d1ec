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
        #[cfg(target_arch = "x86_64")]
        if is_x86_feature_detected!("avx2") {
            // SAFETY: the processor has what this is compiled for.
            return unsafe { self.write_wide(rgb) };
        }
        self.write_rows(rgb);
    }

    /// Writes the bits of [`write_rgb`](Self::write_rgb) by wider instructions: builds for any x86-64 have no
    /// others than these to weave three colours together with, which took longer than all the arithmetic.
    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx2")]
    fn write_wide(&self, rgb: &mut [u8]) {
        self.write_rows(rgb);
    }

    #[inline(always)]
    fn write_rows(&self, rgb: &mut [u8]) {
        let width = self.width;
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

/// What a row of chroma adds to red, green and blue of each pixel; used for one or two rows of luma. Colours
/// are computed plane by plane, which compilers turn into vector instructions, and woven together at the end.
struct Terms {
    /// Two pixels for each of chroma.
    colours: [Vec<i16>; 3],
    luma: Vec<i16>,
    planes: [Vec<u8>; 3],
}

impl Terms {
    fn new(chroma_width: usize) -> Self {
        let pixels = 2 * chroma_width;
        let colours = std::array::from_fn(|_| vec![0; pixels]);
        Self { colours, luma: vec![0; pixels], planes: std::array::from_fn(|_| vec![0; pixels]) }
    }

    #[inline(always)]
    fn fill(&mut self, u: &[u8], v: &[u8], c: Coefficients) {
        let [red, green, blue] = self.colours.each_mut().map(|colour| colour.chunks_exact_mut(2));
        for (((red, green), blue), (&u, &v)) in red.zip(green).zip(blue).zip(u.iter().zip(v)) {
            let (u, v) = (centred(u), centred(v));
            red.fill(high(v, c.red_v));
            green.fill(high(u, c.green_u).wrapping_add(high(v, c.green_v)));
            blue.fill(high(u, c.blue_u));
        }
    }

    #[inline(always)]
    fn row(&mut self, luma: &[u8], c: Coefficients, out: &mut [u8]) {
        for (y, &luma) in self.luma.iter_mut().zip(luma) {
            *y = high((i16::from(luma) * 8).wrapping_sub(c.offset), c.luma);
        }
        for (plane, terms) in self.planes.iter_mut().zip(&self.colours) {
            for ((out, &y), &term) in plane.iter_mut().zip(&self.luma).zip(terms) {
                // Below 1,024 either way: nothing wraps, and nothing is checked at every pixel.
                *out = saturate(y.wrapping_add(term));
            }
        }
        let [red, green, blue] = &self.planes;
        let pixels = out.as_chunks_mut::<3>().0;
        for (((out, &red), &green), &blue) in pixels.iter_mut().zip(red).zip(green).zip(blue) {
            *out = [red, green, blue];
        }
    }
}

#[inline(always)]
fn centred(chroma: u8) -> i16 {
    i16::from(chroma) * 8 - 1024
}

/// The high half of a product, rounded down (`pmulhw`).
#[inline(always)]
fn high(a: i16, b: i16) -> i16 {
    ((i32::from(a) * i32::from(b)) >> 16) as i16
}

#[inline(always)]
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
