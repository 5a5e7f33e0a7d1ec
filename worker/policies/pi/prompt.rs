//! The prompt of pi0.5: the task and the state, as text.
//!
//! ```text
//! <bos>Task: put the cup away, State: 127 3 255 -1;\nAction:␣
//! ```
//!
//! Underscores and newlines of a task are blanks. A value of the state, normalised, is the number of the last
//! of 256 bins from -1 to 1 that begins at or below it, and -1 below all of them
//! (`np.digitize(state, np.linspace(-1, 1, 257)[:-1]) - 1`). Only the state's own values are told.

/// Bins of a state's value.
const BINS: u32 = 256;
/// Tokens that a value of a state takes at most: three digits, and the blank before them.
const VALUE_TOKENS: usize = 4;
/// About as many stand around task and state.
const FRAME_TOKENS: usize = 12;

/// About how many tokens a prompt has around its task, with so many values of a state, at most.
pub fn told_tokens(state: usize) -> usize {
    FRAME_TOKENS + VALUE_TOKENS * state
}

/// The prompt of a task in a state.
pub(super) fn told(task: &str, state: &[f32]) -> String {
    let task = task.trim().replace(['_', '\n'], " ");
    format!("Task: {task}, State: {};\nAction: ", bins(state))
}

/// A state in words: the bin of each value.
pub fn bins(state: &[f32]) -> String {
    state.iter().map(|value| bin(*value).to_string()).collect::<Vec<_>>().join(" ")
}

fn bin(value: f32) -> i64 {
    let begins = |bin: u32| f64::from(bin) * 2.0 / f64::from(BINS) - 1.0;
    (0..BINS).filter(|bin| begins(*bin) <= f64::from(value)).count() as i64 - 1
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_state_is_told_in_bins_as_numpy_digitizes_it() {
        for (value, expected) in
            [(-1.5, -1), (-1.0, 0), (-1e-20, 127), (0.0, 128), (0.99, 254), (0.9921875, 255), (4.0, 255)]
        {
            assert_eq!(bin(value), expected, "{value}");
        }
        let text = told(" open_the\ndrawer ", &[0.0, -2.0]);
        assert_eq!(text, "Task: open the drawer, State: 128 -1;\nAction: ");
    }
}
