//! A few steps of a small instance of a task: a device must come to the CPU's numbers, and the CPU to stored
//! ones.

use coxswain_task::{Losses, Width};

use super::Finding;

/// How far the CPU's losses may be from those of the machine where they were stored: processors add in
/// different orders.
const STORED_TOLERANCE: f64 = 1e-3;

/// The CPU against itself, elsewhere and earlier.
pub(super) fn compared_with_stored(found: &Losses, stored: &[f64]) -> Finding {
    let outcome = found.clone().and_then(|losses| match furthest(&losses, stored) {
        error if error <= STORED_TOLERANCE => Ok(told(&losses, error, "the stored losses")),
        error => Err(wrong(&losses, error, STORED_TOLERANCE, "the stored losses")),
    });
    Finding::checked("training", "CPU, float32", outcome)
}

/// A device against the CPU.
pub(super) fn compared(width: Width, reference: &Losses, found: &Losses) -> Finding {
    let both = found.clone().and_then(|found| reference.clone().map(|reference| (found, reference)));
    let outcome = both.and_then(|(found, reference)| match furthest(&found, &reference) {
        error if error <= width.tolerance() => Ok(told(&found, error, "the CPU's losses")),
        error => Err(wrong(&found, error, width.tolerance(), "the CPU's losses")),
    });
    Finding::checked("training", format!("GPU, weights in {}", width.name()), outcome)
}

fn furthest(found: &[f64], expected: &[f64]) -> f64 {
    let errors = found.iter().zip(expected).map(|(a, b)| (a - b).abs() / b.abs().max(1e-12));
    // NaN must not pass: `max` would drop it.
    errors.fold(0.0, |worst, error| if error > worst || error.is_nan() { error } else { worst })
}

fn told(losses: &[f64], error: f64, whose: &str) -> String {
    let (first, last) = (losses[0], losses[losses.len() - 1]);
    format!("loss {first:.5} to {last:.5} in {} steps, within {error:.1e} of {whose}", losses.len())
}

fn wrong(losses: &[f64], error: f64, tolerance: f64, whose: &str) -> String {
    format!("losses {losses:?} differ by {error:.1e} (relative) from {whose}; {tolerance:.0e} is allowed")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn not_a_number_is_never_close_enough() {
        assert!(furthest(&[f64::NAN, 1.0], &[1.0, 1.0]).is_nan());
        assert!(furthest(&[1.0, 1.1], &[1.0, 1.0]) > 0.09);
        let nan: Losses = Ok(vec![f64::NAN; 4]);
        assert!(compared_with_stored(&nan, &[1.0; 4]).failed());
        assert!(compared(Width::Float32, &nan, &nan).failed());
    }

    #[test]
    fn a_failure_is_a_finding() {
        let failure: Losses = Err("no room".into());
        let finding = compared(Width::Bfloat16, &Ok(vec![1.0]), &failure);
        assert!(finding.failed() && finding.found == "no room");
    }
}
