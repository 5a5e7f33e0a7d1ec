//! The next token, from the logits of all of them.
//!
//! ```text
//! logits / temperature -> the top_k likeliest -> the fewest of them with top_p of their probability -> draw
//! ```
//!
//! Transformers' `generate` has the same order. The draw is keyed by seed, prompt and token: answers do not
//! depend on what is written beside them.

use std::cmp::Reverse;

use coxswain_nn::rng::{Key, Purpose};

use crate::generation::Sampling;

impl Sampling {
    /// The token at place `token` of the answer to prompt number `prompt`, from one logit for each entry of
    /// the vocabulary. None if a logit is not a number, or all are infinite: then the model is at fault.
    pub fn next(&self, logits: &[f32], prompt: u64, token: u64) -> Option<u32> {
        let highest = highest(logits)?;
        if self.temperature <= 0.0 {
            return Some(highest);
        }
        let most = f64::from(logits[highest as usize]);
        let weight = |logit: &f32| ((f64::from(*logit) - most) / self.temperature).exp();
        let mut kept: Vec<(u32, f64)> = (0..).zip(logits.iter().map(weight)).collect();
        if self.top_k > 0 || self.top_p < 1.0 {
            kept.sort_unstable_by(|(a, x), (b, y)| y.total_cmp(x).then(a.cmp(b)));
        }
        if self.top_k > 0 {
            kept.truncate(self.top_k);
        }
        if self.top_p < 1.0 {
            kept.truncate(nucleus(&kept, self.top_p));
        }
        let key = Key { seed: self.seed, purpose: Purpose::Task, step: token, sample: prompt, repeat: 0 };
        let uniform = (key.draws().word() >> 11) as f64 / (1u64 << 53) as f64;
        let mut left = uniform * total(&kept);
        let drawn = kept.iter().find(|(_, weight)| {
            left -= weight;
            left < 0.0
        });
        // Rounding may leave a remainder beyond the last.
        drawn.or(kept.last()).map(|(token, _)| *token)
    }
}

/// The first of the largest logits.
fn highest(logits: &[f32]) -> Option<u32> {
    if logits.iter().any(|logit| logit.is_nan()) {
        return None;
    }
    let highest = (0..).zip(logits).max_by(|(a, x), (b, y)| x.total_cmp(y).then(Reverse(a).cmp(&Reverse(b))));
    highest.filter(|(_, logit)| logit.is_finite()).map(|(token, _)| token)
}

/// How many of the likeliest have `share` of all probability between them; at least one.
fn nucleus(sorted: &[(u32, f64)], share: f64) -> usize {
    let wanted = share * total(sorted);
    let mut sum = 0.0;
    let beyond = sorted.iter().position(|(_, weight)| {
        sum += weight;
        sum >= wanted
    });
    beyond.map_or(sorted.len(), |last| last + 1)
}

fn total(weights: &[(u32, f64)]) -> f64 {
    weights.iter().map(|(_, weight)| weight).sum()
}

#[cfg(test)]
mod tests {
    use std::f32::consts::LN_2;

    use super::*;

    const GREEDY: Sampling = Sampling { max_new_tokens: 1, temperature: 0.0, top_p: 1.0, top_k: 0, seed: 3 };
    /// Probabilities of 1/2, 1/4, 1/8, 1/8, in another order.
    const LOGITS: [f32; 4] = [-LN_2, 0.0, -2.0 * LN_2, -2.0 * LN_2];

    /// How often each of four tokens comes in so many draws.
    fn shares(sampling: Sampling) -> [f64; 4] {
        let mut counts = [0.0; 4];
        for prompt in 0..4000 {
            let token = sampling.next(&LOGITS, prompt, prompt % 7).expect("finite logits");
            counts[token as usize] += 1.0 / 4000.0;
        }
        counts
    }

    fn are(found: [f64; 4], wanted: [f64; 4]) {
        let near = found.iter().zip(wanted).all(|(found, wanted)| (found - wanted).abs() < 0.03);
        assert!(near, "{found:?} is not {wanted:?}");
    }

    #[test]
    fn tokens_come_as_often_as_their_probability_says() {
        are(shares(GREEDY), [0.0, 1.0, 0.0, 0.0]);
        let drawn = Sampling { temperature: 1.0, ..GREEDY };
        are(shares(drawn), [0.25, 0.5, 0.125, 0.125]);
        are(shares(Sampling { top_k: 2, ..drawn }), [1.0 / 3.0, 2.0 / 3.0, 0.0, 0.0]);
        are(shares(Sampling { top_p: 0.5, ..drawn }), [0.0, 1.0, 0.0, 0.0]);
        are(shares(Sampling { top_p: 0.6, ..drawn }), [1.0 / 3.0, 2.0 / 3.0, 0.0, 0.0]);
        // Of the two that are left, one has 2/3.
        are(shares(Sampling { top_k: 2, top_p: 0.6, ..drawn }), [0.0, 1.0, 0.0, 0.0]);
        // Weights to the power of two: 4, 1, 1/4, 1/4 by their sum.
        let sum = 5.5 / 4.0;
        are(
            shares(Sampling { temperature: 0.5, ..drawn }),
            [0.25 / sum, 1.0 / sum, 0.0625 / sum, 0.0625 / sum],
        );
    }

    #[test]
    fn a_draw_depends_on_seed_prompt_and_token_alone() {
        let drawn = Sampling { temperature: 1.0, ..GREEDY };
        let row = |sampling: Sampling, prompt| {
            (0..64).map(|token| sampling.next(&LOGITS, prompt, token)).collect::<Vec<_>>()
        };
        assert_eq!(row(drawn, 1), row(drawn, 1));
        assert_ne!(row(drawn, 1), row(drawn, 2));
        assert_ne!(row(drawn, 1), row(Sampling { seed: 4, ..drawn }, 1));
    }

    #[test]
    fn the_first_of_equals_is_taken_and_nothing_of_what_is_no_number() {
        assert_eq!(GREEDY.next(&[1.0, 2.0, 2.0, f32::NEG_INFINITY], 0, 0), Some(1));
        for broken in [&[f32::NAN, 1.0][..], &[f32::NEG_INFINITY; 2], &[f32::INFINITY, 0.0], &[]] {
            assert_eq!(GREEDY.next(broken, 0, 0), None, "{broken:?}");
        }
    }
}
