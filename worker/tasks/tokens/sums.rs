//! What predicting the tokens of a batch has come to.

use coxswain_nn::next_token::TokenTargets;
use coxswain_proto::ids::Step;
use coxswain_task::{Fault, MicroLoss, TaskError};

/// Over all targets of a batch.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct TokenSums {
    /// Losses, in nats.
    pub loss_sum: f64,
    /// How many are the likeliest at their place.
    pub right: f64,
    /// How many there are.
    pub tokens: f64,
}

impl TokenSums {
    /// From the loss and the margin of each target. A loss that is no number is an error, which names the
    /// step and the samples concerned: `sample_at` tells of which one a row of hidden states is.
    pub fn from_rows(
        rows: &[[f32; 2]],
        targets: &TokenTargets,
        step: Step,
        sample_at: impl Fn(u32) -> u64,
    ) -> Result<Self, TaskError> {
        let mut sums = Self { tokens: rows.len() as f64, ..Self::default() };
        for [loss, margin] in rows {
            sums.loss_sum += f64::from(*loss);
            sums.right += f64::from(u8::from(*margin >= 0.0));
        }
        if sums.loss_sum.is_finite() {
            return Ok(sums);
        }
        let broken = targets.rows.iter().zip(rows).filter(|(_, row)| !row[0].is_finite());
        let mut samples: Vec<u64> = broken.map(|(row, _)| sample_at(*row)).collect();
        samples.dedup();
        let problem =
            format!("step {step}: the loss of samples {samples:?} is not finite; lower the learning rate");
        Err(TaskError::new(Fault::Numeric, problem))
    }

    /// The loss, as the engine divides it.
    pub fn loss(self) -> MicroLoss {
        MicroLoss { loss_sum: self.loss_sum, valid: self.tokens }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_loss_that_is_no_number_names_the_samples_that_have_one() {
        let targets = TokenTargets::of([None, Some(4), Some(5), None, Some(6), Some(7)]);
        let of =
            |rows: &[[f32; 2]]| TokenSums::from_rows(rows, &targets, Step(3), |row| 10 + u64::from(row) / 3);
        let sums = of(&[[1.0, 0.0], [2.0, -0.5], [0.5, 0.0], [0.5, -2.0]]).expect("finite");
        assert_eq!(sums, TokenSums { loss_sum: 4.0, right: 2.0, tokens: 4.0 });
        let error = of(&[[1.0, 0.0], [2.0, 0.0], [f32::NAN, 0.0], [f32::INFINITY, 0.0]]);
        let error = error.expect_err("no number");
        assert_eq!(error.fault, Fault::Numeric);
        assert!(error.to_string().contains("step 3: the loss of samples [11]"), "{error}");
    }
}
