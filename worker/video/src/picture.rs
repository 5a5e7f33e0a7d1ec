//! A decoded picture: planes as the codec made them, and what its colours mean.

/// How many luma samples share a chroma sample.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Layout {
    /// 4:2:0, one chroma sample for 2 x 2.
    Yuv420,
    /// 4:2:2, one for 2 x 1.
    Yuv422,
    /// 4:4:4, one for each.
    Yuv444,
}

impl Layout {
    /// Width of a chroma plane for a width of the picture.
    pub fn chroma_width(self, width: usize) -> usize {
        if self == Self::Yuv444 { width } else { width.div_ceil(2) }
    }

    /// Height of a chroma plane for a height of the picture.
    pub fn chroma_height(self, height: usize) -> usize {
        if self == Self::Yuv420 { height.div_ceil(2) } else { height }
    }
}

/// What luma and chroma mean, in the code points of ISO/IEC 23091-2 (H.273).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Colour {
    /// `MatrixCoefficients`; 2 is "unspecified".
    pub matrix: u16,
    /// Whether samples use all of 0..=255 instead of 16..=235 (luma) and 16..=240 (chroma).
    pub full_range: bool,
}

impl Default for Colour {
    /// Unspecified, limited range.
    fn default() -> Self {
        Self { matrix: 2, full_range: false }
    }
}

/// Samples of one plane; rows may be longer than the picture is wide.
#[derive(Debug, Clone, Copy)]
pub struct Plane<'a> {
    /// Rows one after another.
    pub samples: &'a [u8],
    /// From one row to the next.
    pub stride: usize,
}

impl<'a> Plane<'a> {
    /// The first `width` samples of a row.
    pub fn row(&self, row: usize, width: usize) -> &'a [u8] {
        &self.samples[row * self.stride..][..width]
    }
}

/// One decoded picture, borrowed from its decoder.
#[derive(Debug, Clone, Copy)]
pub struct Picture<'a> {
    /// Pixels of a row.
    pub width: usize,
    /// Rows.
    pub height: usize,
    /// Chroma sampling.
    pub layout: Layout,
    /// What the samples mean.
    pub colour: Colour,
    /// Luma, blue difference, red difference.
    pub planes: [Plane<'a>; 3],
}

/// Receives a wanted picture.
pub(crate) type Show<'a> = &'a mut dyn FnMut(&Picture<'_>);

impl Picture<'_> {
    /// Whether the planes hold what width, height and layout say.
    pub(crate) fn is_whole(&self) -> bool {
        let (cw, ch) = (self.layout.chroma_width(self.width), self.layout.chroma_height(self.height));
        let holds = |plane: &Plane<'_>, w: usize, h: usize| {
            plane.stride >= w && plane.samples.len() >= plane.stride * h.saturating_sub(1) + w
        };
        holds(&self.planes[0], self.width, self.height)
            && self.planes[1..].iter().all(|plane| holds(plane, cw, ch))
    }
}
