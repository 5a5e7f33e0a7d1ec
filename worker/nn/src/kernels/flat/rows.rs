//! Gradients of a table whose rows are looked up, as a token embedding's are: of each lookup one row, to be
//! added to the row it has read.
//!
//! A row that is looked up often gets its gradients in the order of lookups, one addition after another, on
//! every backend and on any number of threads: the sum is the same bits wherever it is made.
//!
//! What this file does not do: write the sums ([`FlatOn::add_rows`](super::FlatOn::add_rows)).

use std::ops::Range;

use burn::tensor::{Tensor, backend::Backend};

/// Which rows of a table were looked up, and where, by row.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Lookups {
    rows: Vec<u32>,
    /// Where each row's places begin; behind the last row the number of places.
    starts: Vec<u32>,
    places: Vec<u32>,
}

impl Lookups {
    /// Lookups by their rows, made of ones in the order of their places: the place, and the table's row.
    pub fn new(lookups: impl Iterator<Item = (u32, u32)>) -> Self {
        let mut lookups: Vec<_> = lookups.collect();
        lookups.sort_by_key(|&(_, row)| row);
        let mut found = Self::default();
        for (number, (place, row)) in lookups.into_iter().enumerate() {
            if found.rows.last() != Some(&row) {
                found.rows.push(row);
                found.starts.push(number as u32);
            }
            found.places.push(place);
        }
        found.starts.push(found.places.len() as u32);
        found
    }

    /// Rows that were looked up, ascending.
    pub fn rows(&self) -> &[u32] {
        &self.rows
    }

    /// Where each row's places begin among [`Lookups::places`], and their number at the end.
    pub fn starts(&self) -> &[u32] {
        &self.starts
    }

    /// The places of all rows, one row's after another's.
    pub fn places(&self) -> &[u32] {
        &self.places
    }

    /// Each row with its places.
    pub fn iter(&self) -> impl Iterator<Item = (u32, &[u32])> {
        let spans = self.starts.windows(2).map(|span| &self.places[span[0] as usize..span[1] as usize]);
        self.rows.iter().copied().zip(spans)
    }

    /// Lookups in rounds in which no row comes twice: the first lookups of all rows, the second ones, and so
    /// on, as rows and places.
    pub fn rounds(&self) -> impl Iterator<Item = [Vec<u32>; 2]> {
        let rounds = self.iter().map(|(_, places)| places.len()).max().unwrap_or(0);
        (0..rounds).map(|round| {
            let of_round = self.iter().filter_map(|(row, places)| Some((row, *places.get(round)?)));
            let (rows, places) = of_round.unzip();
            [rows, places]
        })
    }
}

/// The gradients of a table's lookups on their way to their sums.
pub struct RowGradients<'a, B: Backend> {
    /// Where the table lies, `[rows, d]`.
    pub range: Range<usize>,
    /// Whether they are the first of their table, and what is there means nothing.
    pub first: bool,
    /// Which rows were looked up.
    pub lookups: &'a Lookups,
    /// A gradient for each place, `[places, d]`.
    pub values_nd: Tensor<B, 2>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lookups_are_sorted_by_row_and_keep_their_order_within_one() {
        let lookups = Lookups::new([(0, 7), (1, 2), (3, 7), (4, 2), (5, 7), (6, 0)].into_iter());
        let by_row: Vec<_> = lookups.iter().map(|(row, places)| (row, places.to_vec())).collect();
        assert_eq!(by_row, [(0, vec![6]), (2, vec![1, 4]), (7, vec![0, 3, 5])]);
        let rounds: Vec<_> = lookups.rounds().collect();
        assert_eq!(rounds[0], [vec![0, 2, 7], vec![6, 1, 0]]);
        assert_eq!(rounds[1..], [[vec![2, 7], vec![4, 3]], [vec![7], vec![5]]]);
        let none = Lookups::new(std::iter::empty());
        assert_eq!((none.iter().count(), none.rounds().count(), none.starts()), (0, 0, &[0][..]));
    }
}
