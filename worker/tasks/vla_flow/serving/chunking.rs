//! Real-time chunking: while a robot waits for a chunk it takes actions of the last one, and the new chunk
//! begins with those. Without a gradient, as GR00T N1.7 has it; the guided form is arXiv 2506.07339.
//!
//! | steps of the new chunk | start from | move by |
//! |---|---|---|
//! | before `inference_delay`: taken while the robot waits | the last chunk | nothing |
//! | from there to the end of what is left of it | the last chunk | a part of their velocity that rises |
//! | the rest | noise | their velocity |
//!
//! What is left may be cut by `execution_horizon`. A policy whose actions are differences from the state
//! takes them as differences from the state that is observed now.

/// What is left of the last chunk, `[n, size]` in the units of answers: its first action is the one that the
/// robot takes next.
pub(super) const PREVIOUS: &str = "prev_actions";
/// So many of its actions are taken before the answer is there.
pub(super) const DELAY: &str = "inference_delay";
/// So many of its actions count.
pub(super) const EXECUTED: &str = "execution_horizon";

/// How fast the part rises (`rtc_ramp_rate` of GR00T N1.7).
const RAMP: f32 = 6.0;

/// What is left of the last chunk, as the model has actions.
pub(super) struct PreviousChunk<'a> {
    /// `[n, size]`.
    pub actions: &'a [f32],
    /// Values of an action.
    pub size: usize,
    /// So many are taken meanwhile.
    pub delay: usize,
}

impl PreviousChunk<'_> {
    /// Lays it over the noise in `start`, `[horizon, padded size]`; by which part of its velocity each step
    /// then moves, `[horizon]`.
    pub(super) fn begin(&self, start: &mut [f32], padded: usize) -> Vec<f32> {
        let (horizon, overlap) = (start.len() / padded.max(1), self.actions.len() / self.size.max(1));
        for (step, action) in start.chunks_exact_mut(padded).zip(self.actions.chunks_exact(self.size)) {
            step.fill(0.0);
            step[..self.size].copy_from_slice(action);
        }
        strengths(horizon, self.delay.min(overlap), overlap)
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
