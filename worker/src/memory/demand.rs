//! How much a micro-batch will want, from what earlier ones took.
//!
//! Activations are proportional to a micro-batch's cells (rows times padded length), up to what does not depend on it, which is
//! small beside them. So the largest bytes per cell seen so far, times the cells of the next micro-batch, on top of what is in use now,
//! says whether it can fit before a second is spent on it. A wrong no costs one halving of the micro-batch; a wrong yes costs what it
//! would have cost without a prediction.
//!
//! What it does not do: predict before anything has run (`prediction` does that, from the model's sizes).

/// Bytes per cell, measured.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Demand {
    bytes_per_cell: f64,
}

impl Demand {
    /// A micro-batch of `cells` took `bytes` on top of what was in use before it.
    pub fn observe(&mut self, cells: usize, bytes: u64) {
        if cells > 0 {
            self.bytes_per_cell = self.bytes_per_cell.max(bytes as f64 / cells as f64);
        }
    }

    /// What a micro-batch of `cells` will take on top of what is in use; none before anything was observed.
    pub fn predict(&self, cells: usize) -> Option<u64> {
        (self.bytes_per_cell > 0.0).then(|| (self.bytes_per_cell * cells as f64) as u64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_hungriest_micro_batch_so_far_sets_the_rate() {
        let mut demand = Demand::default();
        assert_eq!(demand.predict(10), None);
        demand.observe(10, 1000);
        demand.observe(20, 1000);
        demand.observe(0, 1 << 40);
        assert_eq!(demand.predict(30), Some(3000));
    }
}
