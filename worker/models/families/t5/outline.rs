//! A configuration, as tasks see it.

use super::{
    config::T5Config,
    modules::{modules, tensors},
    rules::RULES,
};
use crate::text_to_text::TextModelOutline;

/// A configuration, as tasks see it.
pub(super) fn outline(config: &T5Config) -> TextModelOutline {
    TextModelOutline {
        rules: RULES,
        modules: modules(config),
        tensors: tensors(config),
        tied: config.head.is_none().then(|| config.table.clone()),
        vocab_size: config.vocab_size,
        special: config.special,
        sizes: format!("{config:?}"),
    }
}
