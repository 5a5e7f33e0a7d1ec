//! Real-time chunking: a robot goes on with its last chunk while it waits for the next one, and the next one
//! goes on from there. Without a gradient, as GR00T N1.7 has it; the guided form is arXiv 2506.07339.
//!
//! | steps of the new chunk | start from | move by |
//! |---|---|---|
//! | before `inference_delay`: taken while the robot waits | the last chunk | nothing |
//! | from there to the end of what is left of it | the last chunk | a part of their velocity that rises |
//! | the rest | noise | their velocity |
//!
//! What is left may be cut by `execution_horizon`. A policy whose actions are differences from the state
//! takes them as differences from the state that is observed now.

use coxswain_task::{BadRequest, NamedValues, Value};

use super::ObservationReader;
use crate::vla_flow::serving::values::shape_of;

/// What is left of the last chunk, `[n, size]` in the units of answers: its first action is the one that the
/// robot takes next.
pub(super) const PREVIOUS: &str = "prev_actions";
/// So many of its actions are taken before the answer is there.
pub(super) const DELAY: &str = "inference_delay";
/// So many of its actions count.
pub(super) const EXECUTED: &str = "execution_horizon";

/// How fast the part rises (`rtc_ramp_rate` of GR00T N1.7).
const RAMP: f32 = 6.0;

impl ObservationReader {
    /// Lays what is left of the last chunk over the noise in `start`, `[horizon, padded size]`; by which part
    /// of its velocity each step then moves, `[horizon]`.
    pub(super) fn continue_chunk(
        &self,
        request: &NamedValues,
        offset: &[f32],
        start: &mut [f32],
    ) -> Result<Vec<f32>, BadRequest> {
        let [horizon, own] = self.chunk();
        let delay = self.count(request, DELAY, 0)?.unwrap_or(0);
        let executed = self.count(request, EXECUTED, 1)?.unwrap_or(horizon);
        let Some(previous) = request.get(PREVIOUS) else { return Ok(vec![1.0; horizon]) };
        if !self.file.flow.head.is_flow() {
            let problem = "is given, and this policy starts from no actions; leave it out";
            return Err(BadRequest::new(PREVIOUS, problem.to_owned()));
        }
        let rows = match shape_of(previous) {
            Some(&[rows, size]) if rows <= horizon && size == own => rows,
            _ => {
                let wanted = format!(
                    "expected numbers [n, {own}], the actions left of the last chunk, n at most {horizon}"
                );
                return Err(self.differs(request, PREVIOUS, PREVIOUS, &wanted));
            }
        };
        let mut left = self.finite(request, PREVIOUS, PREVIOUS, &[rows, own])?;
        if self.deltas.any() {
            left.iter_mut().zip(offset.iter().cycle()).for_each(|(value, offset)| *value -= offset);
        }
        self.action.apply(&mut left);
        let overlap = rows.min(executed);
        let steps = start.chunks_exact_mut(self.padded().action).zip(left.chunks_exact(own));
        for (step, action) in steps.take(overlap) {
            step.fill(0.0);
            step[..own].copy_from_slice(action);
        }
        Ok(strengths(horizon, delay.min(overlap), overlap))
    }

    /// A whole number, if it is given.
    fn count(&self, request: &NamedValues, name: &str, least: i64) -> Result<Option<usize>, BadRequest> {
        match request.get(name) {
            None => Ok(None),
            Some(Value::Integer(count)) if *count >= least => Ok(Some(*count as usize)),
            Some(_) => {
                Err(self.differs(request, name, name, &format!("expected a whole number from {least}")))
            }
        }
    }
}

/// None before `delay`, rising up to `overlap`, 1 from there.
fn strengths(horizon: usize, delay: usize, overlap: usize) -> Vec<f32> {
    let rising = |step: usize| {
        let along = (step + 1 - delay) as f32 / (overlap + 1 - delay) as f32;
        (1.0 - (-RAMP * along).exp()) / (1.0 - (-RAMP).exp())
    };
    let strength = |step: usize| match step {
        _ if step < delay => 0.0,
        _ if step < overlap => rising(step),
        _ => 1.0,
    };
    (0..horizon).map(strength).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_taken_meanwhile_is_held_and_the_rest_of_the_chunk_moves_as_in_groot() {
        // `vel_strength` of `groot_n1_7.py` in LeRobot 0.6.1 for an overlap of 5 with 2 frozen steps.
        let groot = [0.0, 0.0, 0.778800, 0.952574, 0.991348, 1.0, 1.0];
        for (ours, theirs) in strengths(7, 2, 5).into_iter().zip(groot) {
            assert!((ours - theirs).abs() < 1e-6, "{ours} {theirs}");
        }
        assert_eq!(strengths(3, 0, 0), [1.0; 3]);
        assert_eq!(strengths(3, 3, 3), [0.0; 3]);
    }
}
