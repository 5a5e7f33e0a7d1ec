//! Memory of a card, as whoever knows the card reads it.

use std::fmt;

use super::PhasePeak;

/// Reads what a card holds now. Asked at the ends of phases; a read waits for the orders that the card's runtime has not looked at yet, not
/// for the card.
pub trait Gauge: fmt::Debug + Send {
    /// In use and reserved by its allocator, and taken of the card by anybody. Zero where a scope cannot be read.
    fn read(&self) -> PhasePeak;

    /// What its maker calls the card; none if it does not say.
    fn card(&self) -> Option<String> {
        None
    }
}
