//! Where in a model hidden states are read, or kept.
//!
//! ```text
//! pixels ─▶ vision tower ─┬▶ embedding ─▶ layer 0 ─▶ .. ─▶ layer k ─▶ .. ─▶ final norm ─┬▶
//!                      Vision           Layer(0)       Layer(k)                       Final
//! ```

use std::fmt;

use crate::pretrained::rules::Place;

/// A place in the model, ordered by depth.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Tap {
    /// The image features that the vision tower hands to the language model, `[image tokens, d]`.
    Vision,
    /// The input of this decoder layer, before its norm, `[tokens, d]`.
    Layer(usize),
    /// The hidden states after the final norm, `[tokens, d]`.
    Final,
}

impl Tap {
    /// Whether hidden states there depend on what is at this place of the model.
    pub fn is_above(self, place: Place) -> bool {
        match (place, self) {
            (Place::Vision(_), _) | (_, Self::Final) => true,
            (Place::Table, Self::Layer(_)) => true,
            (Place::Layer(layer), Self::Layer(end)) => layer < end,
            _ => false,
        }
    }

    /// What need not be computed where features are kept there.
    pub fn skips(self) -> String {
        match self {
            Self::Vision => "the vision tower and its merger".into(),
            Self::Layer(0) => "the vision tower, its merger and the embedding".into(),
            Self::Layer(1) => "the vision tower, the embedding and decoder layer 0".into(),
            Self::Layer(k) => format!("the vision tower, the embedding and decoder layers 0 to {}", k - 1),
            Self::Final => "the whole vision-language model".into(),
        }
    }
}

impl fmt::Display for Tap {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Vision => f.write_str("the image features after the merger"),
            Self::Layer(k) => write!(f, "the input of decoder layer {k} (pre-norm)"),
            Self::Final => f.write_str("the final hidden states (post-norm)"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_lies_below_a_tap_grows_with_its_depth() {
        let places =
            [Place::Vision(Some(0)), Place::Table, Place::Layer(1), Place::Layer(11), Place::FinalNorm];
        let below = |tap: Tap| places.iter().filter(|place| tap.is_above(**place)).count();
        let taps = [Tap::Vision, Tap::Layer(0), Tap::Layer(1), Tap::Layer(2), Tap::Layer(11), Tap::Final];
        assert_eq!(taps.map(below), [1, 2, 2, 3, 3, 5]);
    }
}
