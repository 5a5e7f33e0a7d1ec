//! Learned positions of patches: a square table, resampled bilinearly to the grid of each image, corner to
//! corner (`align_corners`).
//!
//! A patch at row `r` of `h` lies at `r (side - 1) / (h - 1)` of the table's rows, likewise in columns, and
//! has the four entries around it by their nearness. Computed in float32 in Transformers' order
//! (`get_vision_interpolation_indices_and_weights`).

use crate::pretrained::pictures::ImageShape;

/// Entries of the table that each patch has, and how much of each.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ResampledPositions {
    /// Numbers in the table of each patch's four neighbours.
    pub entries: [Vec<i32>; 4],
    /// How much of it.
    pub shares: [Vec<f32>; 4],
}

impl ResampledPositions {
    /// Adds a frame of an image, whose patches lie at these rows and columns.
    pub fn add(&mut self, side: usize, [_, h, w]: ImageShape, positions: &[[u32; 2]]) {
        for &[row, column] in positions {
            let (rows, columns) = (neighbours(row, h, side), neighbours(column, w, side));
            for (at, ((row, vertical), (column, horizontal))) in
                rows.iter().flat_map(|row| columns.iter().map(move |column| (row, column))).enumerate()
            {
                self.entries[at].push((row * side + column) as i32);
                self.shares[at].push(vertical * horizontal);
            }
        }
    }
}

/// The two entries of an axis around position `at` of `size`, and how near each is.
fn neighbours(at: u32, size: u32, side: usize) -> [(usize, f32); 2] {
    let source = at as f32 * (side - 1) as f32 / size.saturating_sub(1).max(1) as f32;
    let floor = source.floor();
    [0.0, 1.0].map(|offset| {
        let entry = ((floor + offset) as usize).min(side - 1);
        (entry, (1.0 - (source - floor - offset).abs()).max(0.0))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn corners_meet_corners_and_what_lies_between_is_shared() {
        assert_eq!(neighbours(0, 4, 7), [(0, 1.0), (1, 0.0)]);
        assert_eq!(neighbours(1, 4, 7), [(2, 1.0), (3, 0.0)]);
        assert_eq!(neighbours(3, 4, 7), [(6, 1.0), (6, 0.0)]);
        assert_eq!(neighbours(1, 4, 4), [(1, 1.0), (2, 0.0)]);
        assert_eq!(neighbours(1, 3, 4), [(1, 0.5), (2, 0.5)]);
        assert_eq!(neighbours(0, 1, 48), [(0, 1.0), (1, 0.0)]);
        let mut positions = ResampledPositions::default();
        positions.add(4, [1, 3, 3], &[[1, 1]]);
        assert_eq!(positions.entries, [5, 6, 9, 10].map(|entry| vec![entry]));
        assert_eq!(positions.shares, [0.25; 4].map(|share| vec![share]));
    }
}
