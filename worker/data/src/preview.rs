//! An episode for people: some of its pictures, and its numbers.

use crate::pixels::Pixels;

/// Some frames of an episode, and numbers of all of them.
#[derive(Clone, Debug, PartialEq)]
pub struct Preview {
    /// What the episode is: its number, its task.
    pub title: String,
    /// Frames whose pictures are shown, by their number in the episode.
    pub frames: Vec<u64>,
    /// A strip for each camera.
    pub strips: Vec<Strip>,
    /// A plot for each feature of numbers.
    pub plots: Vec<Plot>,
}

/// What a camera shows.
#[derive(Clone, Debug, PartialEq)]
pub struct Strip {
    /// The camera, and what has been done to its pictures.
    pub title: String,
    /// One for each frame shown.
    pub pictures: Vec<Pixels>,
}

/// Numbers over the frames of the episode.
#[derive(Clone, Debug, PartialEq)]
pub struct Plot {
    /// The feature, and in which units.
    pub title: String,
    /// By dimension: a value for each frame.
    pub series: Vec<Vec<f32>>,
}

/// So many of `length` frames, evenly spread, the first and the last among them.
pub fn spread(length: u64, frames: usize) -> Vec<u64> {
    let (last, frames) = (length.saturating_sub(1), (frames.max(1) as u64).min(length));
    let mut spread: Vec<u64> = (0..frames).map(|n| n * last / (frames - 1).max(1)).collect();
    spread.dedup();
    spread
}

#[cfg(test)]
mod tests {
    #[test]
    fn frames_are_spread_from_the_first_to_the_last() {
        assert_eq!(super::spread(10, 4), [0, 3, 6, 9]);
        assert_eq!(super::spread(3, 8), [0, 1, 2]);
        assert_eq!((super::spread(1, 8), super::spread(9, 1)), (vec![0], vec![0]));
    }
}
