//! Relative positions as buckets (arXiv 1910.10683, 2.1): half of a direction's buckets are single distances,
//! the others grow by a constant factor up to `max_distance`.
//!
//! Computed in float32 as the reference does: where a logarithm falls on a boundary its rounding decides.

use burn::tensor::{Int, Tensor, TensorData, backend::Backend};

/// What is added to the score of a position that must not be seen. Finite, so that a row without any is no
/// NaN.
pub const UNSEEN: f32 = -1e30;

/// How positions fall into buckets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Buckets {
    /// How many.
    pub count: usize,
    /// Distances from here on share the last one.
    pub max_distance: usize,
    /// Whether a query looks ahead: an encoder's does, a decoder's does not.
    pub both_ways: bool,
}

impl Buckets {
    /// The bucket of a key at position `key` for a query at position `query`.
    pub fn bucket(&self, query: usize, key: usize) -> usize {
        let (count, ahead, distance) = match (self.both_ways, key > query) {
            (true, true) => (self.count / 2, self.count / 2, key - query),
            (true, false) => (self.count / 2, 0, query - key),
            (false, _) => (self.count, 0, query.saturating_sub(key)),
        };
        let exact = count / 2;
        if distance < exact {
            return ahead + distance;
        }
        let growth = (self.max_distance as f64 / exact as f64).ln() as f32;
        let beyond = (distance as f32 / exact as f32).ln() / growth * (count - exact) as f32;
        ahead + (exact + beyond as usize).min(count - 1)
    }

    /// What is added to scores `[b, heads, len, len]`: a value of `table_nh` `[buckets, heads]` for each
    /// query and key, and [`UNSEEN`] for what lies ahead of a query that does not look there.
    /// `[1, heads, len, len]`.
    pub fn bias<B: Backend>(&self, table_nh: Tensor<B, 2>, len: usize) -> Tensor<B, 4> {
        let table_hn = table_nh.transpose();
        let (heads, device) = (table_hn.dims()[0], table_hn.device());
        let places = || (0..len * len).map(|place| (place / len.max(1), place % len.max(1)));
        let buckets: Vec<i32> = places().map(|(query, key)| self.bucket(query, key) as i32).collect();
        let buckets: Tensor<B, 1, Int> = Tensor::from_data(TensorData::new(buckets, [len * len]), &device);
        let bias = table_hn.select(1, buckets).reshape([1, heads, len, len]);
        if self.both_ways {
            return bias;
        }
        let ahead: Vec<f32> = places().map(|(query, key)| if key > query { UNSEEN } else { 0.0 }).collect();
        bias + Tensor::<B, 4>::from_data(TensorData::new(ahead, [1, 1, len, len]), &device)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn near_positions_have_buckets_of_their_own_and_far_ones_share_the_last() {
        let encoder = Buckets { count: 32, max_distance: 128, both_ways: true };
        assert_eq!([0, 1, 7].map(|back| encoder.bucket(100, 100 - back)), [0, 1, 7]);
        assert_eq!([1, 7].map(|ahead| encoder.bucket(100, 100 + ahead)), [17, 23]);
        // As Transformers has them.
        assert_eq!(
            [8, 11, 12, 15, 16, 64, 90, 91, 1000].map(|back| encoder.bucket(1000, 1000 - back)),
            [8, 8, 9, 9, 10, 14, 14, 15, 15]
        );
        let decoder = Buckets { both_ways: false, ..encoder };
        assert_eq!(
            [0, 15, 16, 20, 127, 500].map(|back| decoder.bucket(500, 500 - back)),
            [0, 15, 16, 17, 31, 31]
        );
        assert_eq!(decoder.bucket(3, 9), 0, "what lies ahead is not seen, whatever its bucket");
    }
}
