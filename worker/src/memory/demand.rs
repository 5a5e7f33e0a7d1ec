//! How much a micro-batch will want, from what earlier ones took.
//!
//! Activations are proportional to a micro-batch's cells (rows times padded length), up to a part that does
//! not depend on it. So what the largest micro-batch so far took, in proportion to the cells of the next one,
//! on top of what is in use now, says whether the next can fit before a second is spent on it. Smaller ones
//! are no guide: the fixed part is most of what they take. A wrong no costs one halving of the micro-batch; a
//! wrong yes costs what it would have cost without a prediction.
//!
//! What it does not do: predict before anything has run (`prediction` does that, from the model's sizes).

/// The hungriest of the largest micro-batches so far.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Demand {
    cells: usize,
    bytes: u64,
}

impl Demand {
    /// A micro-batch of `cells` took `bytes` on top of what was in use before it.
    pub fn observe(&mut self, cells: usize, bytes: u64) {
        if cells > self.cells || (cells > 0 && bytes > self.bytes) {
            *self = Self { cells, bytes };
        }
    }

    /// What a micro-batch of `cells` will take on top of what is in use; none before anything was observed.
    pub fn predict(&self, cells: usize) -> Option<u64> {
        (self.cells > 0).then(|| (self.bytes as f64 * cells as f64 / self.cells as f64) as u64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_largest_micro_batch_so_far_sets_the_rate() {
        let mut demand = Demand::default();
        assert_eq!(demand.predict(10), None);
        demand.observe(10, 1000);
        demand.observe(20, 1600);
        demand.observe(5, 900);
        demand.observe(0, 1 << 40);
        assert_eq!(demand.predict(30), Some(2400));
        demand.observe(20, 1800);
        assert_eq!(demand.predict(10), Some(900));
    }
}
