//! Drift: how far features have moved since a generation was begun, as a sum over probes and ranks.
//!
//! ```text
//! a probe       |fresh - kept|^2, |fresh|^2, cosine; the loss with either, under the same noise
//! a rank        its probes, one after the other, however many were compared at once
//! all ranks     |fresh - kept| / |fresh|,  mean cosine,  loss per valid element
//! ```
//!
//! What it does not do: choose probes, or compute features (`probes`).

use coxswain_proto::cache_plan::Drift;

/// What adds up over probes and ranks.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Sums {
    pub probes: f64,
    pub squared_difference: f64,
    pub squared_norm: f64,
    pub cosine: f64,
    pub loss_fresh: f64,
    pub loss_kept: f64,
    pub valid: f64,
}

/// How a rank fared: a number in its row, the worst of all counts.
pub(super) const WELL: f64 = 0.0;
/// It has not the adapter to compare with.
pub(super) const UNAVAILABLE: f64 = 1.0;
/// It failed; its own error says why.
pub(super) const FAILED: f64 = 2.0;

/// Numbers of a rank's row.
pub(super) const FIELDS: usize = 8;

impl Sums {
    /// What a rank shows the others.
    pub fn row(&self, status: f64) -> [f64; FIELDS] {
        let Self { probes, squared_difference, squared_norm, cosine, loss_fresh, loss_kept, valid } = *self;
        [probes, squared_difference, squared_norm, cosine, loss_fresh, loss_kept, valid, status]
    }

    /// Rows of all ranks, in rank order, so that all ranks add up the same bits.
    pub fn total(rows: &[f64]) -> Self {
        let sum = |field: usize| rows.chunks_exact(FIELDS).map(|row| row[field]).sum::<f64>();
        Self {
            probes: sum(0),
            squared_difference: sum(1),
            squared_norm: sum(2),
            cosine: sum(3),
            loss_fresh: sum(4),
            loss_kept: sum(5),
            valid: sum(6),
        }
    }

    /// None without probes.
    pub fn drift(&self) -> Option<Drift> {
        (self.probes > 0.0).then(|| Drift {
            relative_l2: (self.squared_difference / self.squared_norm.max(f64::MIN_POSITIVE)).sqrt(),
            cosine: self.cosine / self.probes,
            loss_fresh: self.loss_fresh / self.valid.max(1.0),
            loss_cached: self.loss_kept / self.valid.max(1.0),
        })
    }

    /// How the rank of a row fared.
    pub fn status(row: &[f64]) -> f64 {
        row[FIELDS - 1]
    }

    /// Adds one probe's features.
    pub fn compare(&mut self, fresh: &[f32], kept: &[f32]) {
        let (mut dot, mut of_fresh, mut of_kept, mut difference) = (0.0, 0.0, 0.0, 0.0);
        for (&f, &k) in fresh.iter().zip(kept) {
            let (f, k) = (f64::from(f), f64::from(k));
            dot += f * k;
            of_fresh += f * f;
            of_kept += k * k;
            difference += (f - k) * (f - k);
        }
        self.probes += 1.0;
        self.squared_difference += difference;
        self.squared_norm += of_fresh;
        self.cosine += dot / (of_fresh * of_kept).sqrt().max(f64::MIN_POSITIVE);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_features_have_not_moved() {
        let mut sums = Sums::default();
        sums.compare(&[3.0, 4.0], &[3.0, 4.0]);
        let drift = Sums { valid: 2.0, loss_fresh: 1.0, loss_kept: 1.0, ..sums }.drift().expect("a probe");
        assert_eq!((drift.relative_l2, drift.cosine, drift.loss_fresh), (0.0, 1.0, 0.5));
    }

    #[test]
    fn drift_is_relative_to_the_fresh_features_and_adds_up_over_ranks() {
        let (mut one, mut two) = (Sums::default(), Sums::default());
        one.compare(&[3.0, 4.0], &[3.0, 0.0]);
        two.compare(&[0.0, 0.0], &[0.0, 3.0]);
        let rows = [one.row(WELL), two.row(WELL)].concat();
        let drift = Sums::total(&rows).drift().expect("two probes");
        assert_eq!(drift.relative_l2, (16.0f64 + 9.0).sqrt() / 5.0);
        assert!(
            (drift.cosine - 0.3).abs() < 1e-12,
            "a probe without features counts as turned by 90 degrees"
        );
        assert_eq!(Sums::default().drift(), None);
    }
}
