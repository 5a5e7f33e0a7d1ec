//! What a state's token and actions see.

use std::ops::Range;

use burn::tensor::Tensor;
use coxswain_nn::kernels::ModelBackend;

use crate::rotary::{key_mask, placed, score};

/// What is added to scores.
pub(crate) struct StateMasks<B: ModelBackend> {
    /// The prefix and the state, `[b, 1, 1, s + 1]`: what the state's token sees, and what actions see in a
    /// layer that does not attend jointly.
    pub state: Tensor<B, 4>,
    /// The prefix, the state and actions, `[b, 1, c, s + 1 + c]` if an action sees those up to itself; `[b,
    /// 1, 1, s + 1 + c]` if it sees all.
    pub joint: Tensor<B, 4>,
}

impl<B: ModelBackend> StateMasks<B> {
    /// Masks of prefixes that are these ranges of `seq` tokens, before `chunk` actions.
    pub fn new(valid: &[Range<u32>], [seq, chunk]: [usize; 2], causal: bool, device: &B::Device) -> Self {
        let state = key_mask(valid, [seq, 1], device);
        if !causal {
            return Self { state, joint: key_mask(valid, [seq, 1 + chunk], device) };
        }
        let seen = |row: &Range<u32>, key: usize, action: usize| match key {
            _ if key < seq => row.contains(&(key as u32)),
            _ => key == seq || key - seq - 1 <= action,
        };
        let of_actions = valid.iter().flat_map(|row| {
            (0..chunk).flat_map(move |action| (0..=seq + chunk).map(move |key| score(seen(row, key, action))))
        });
        Self { state, joint: placed(of_actions.collect(), [valid.len(), 1, chunk, seq + 1 + chunk], device) }
    }
}
