//! What names of modules and tensors mean.

use crate::{pretrained::rules::Rules, two_towers::reading::rules};

/// What names mean here: published files have the module paths of Transformers.
pub(super) const RULES: Rules = rules(str::to_owned);
