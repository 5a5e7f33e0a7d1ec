//! A picture in memory.

/// A frame in colour.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pixels {
    /// Rows.
    pub height: usize,
    /// Columns.
    pub width: usize,
    /// Red, green and blue, `height * width * 3`.
    pub rgb: Vec<u8>,
}
