//! What names of modules and tensors mean.

use crate::pretrained::rules::{Place, Rules};

/// What names mean here: one spelling, and every linear but the head is quantized where that is asked for.
pub(super) const RULES: Rules =
    Rules { canonical: |name| name.into(), place: |_| Place::Other, packs: |module| module != "lm_head" };
