//! A micro-batch as the model sees it.

use std::{iter, ops::Range, sync::Arc};

use super::pictures::ImageShape;

/// What the model reads of a micro-batch.
#[derive(Clone, Copy, Debug)]
pub struct Prompts<'b> {
    /// Tokens of all rows, `[n]`.
    pub input_ids: &'b [u32],
    /// Which of them are a row.
    pub rows: Rows<'b>,
    /// One for each image, in order of rows, then of prompts.
    pub images: &'b [ImageShape],
    /// `[patches, patch values]` of all images, in that order, in pieces of whole images. They are their
    /// samples' own, so that a batch that is put together is not there twice.
    pub pixel_values: &'b [Arc<Vec<f32>>],
}

impl<'b> Prompts<'b> {
    /// The pieces of `pixel_values`.
    pub fn pieces(&self) -> Vec<&'b [f32]> {
        self.pixel_values.iter().map(|piece| &piece[..]).collect()
    }
}

/// What keys the draws of adapters' dropout in a training pass, besides a row's place in its sample.
#[derive(Clone, Copy, Debug)]
pub struct DropoutKeys<'b> {
    /// The run's.
    pub seed: u64,
    /// Optimizer step.
    pub step: u64,
    /// Samples of the micro-batch's rows.
    pub samples: &'b [u64],
    /// Images of each row; empty for models of text alone.
    pub images_per_row: &'b [u32],
}

/// How rows lie in the tokens of a micro-batch. No row sees another.
#[derive(Clone, Copy, Debug)]
pub enum Rows<'b> {
    /// `[b, s]`: of each row its valid tokens, a range within `0..s`; the others are padding.
    Padded(&'b [Range<u32>]),
    /// One after another without padding: `[0, e1, e2, .., n]` (`cu_seqlens`).
    SideBySide(&'b [u32]),
}

impl Rows<'_> {
    /// How many there are.
    pub fn count(&self) -> usize {
        match self {
            Self::Padded(valid) => valid.len(),
            Self::SideBySide(ends) => ends.len().saturating_sub(1),
        }
    }

    /// Batch axis and sequence axis of tensors of `tokens`.
    pub fn axes(&self, tokens: usize) -> [usize; 2] {
        match self {
            Self::Padded(valid) => [valid.len(), tokens.checked_div(valid.len()).unwrap_or(0)],
            Self::SideBySide(_) => [1, tokens],
        }
    }

    /// The valid tokens of each row, among so many of all rows.
    pub fn cells(&self, tokens: usize) -> Vec<Range<usize>> {
        let [_, seq] = self.axes(tokens);
        match self {
            Self::Padded(valid) => {
                let row = |(row, valid): (usize, &Range<u32>)| {
                    row * seq + valid.start as usize..row * seq + valid.end as usize
                };
                valid.iter().enumerate().map(row).collect()
            }
            Self::SideBySide(ends) => ends.windows(2).map(|of| of[0] as usize..of[1] as usize).collect(),
        }
    }

    /// Row and place in its valid tokens of every token; padding has places below 0.
    pub fn places(&self, tokens: usize) -> impl Iterator<Item = (usize, i64)> {
        let [_, seq] = self.axes(tokens);
        let padded = matches!(self, Self::Padded(_));
        self.cells(tokens).into_iter().enumerate().flat_map(move |(row, cells)| {
            let all = if padded { row * seq..(row + 1) * seq } else { cells.clone() };
            iter::repeat(row).zip(all.map(move |cell| cell as i64 - cells.start as i64))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_lie_where_padding_leaves_them_or_one_after_another() {
        let rows = Rows::Padded(&[1..3, 0..2]);
        assert_eq!((rows.count(), rows.axes(6)), (2, [2, 3]));
        assert_eq!(rows.cells(6), [1..3, 3..5]);
        let places: Vec<_> = rows.places(6).collect();
        assert_eq!(places, [(0, -1), (0, 0), (0, 1), (1, 0), (1, 1), (1, 2)]);
        let rows = Rows::SideBySide(&[0, 2, 2, 5]);
        assert_eq!((rows.count(), rows.axes(5)), (3, [1, 5]));
        assert_eq!(rows.cells(5), [0..2, 2..2, 2..5]);
        assert_eq!(rows.places(5).collect::<Vec<_>>(), [(0, 0), (0, 1), (2, 0), (2, 1), (2, 2)]);
    }
}
