//! Random changes of a camera's image in training.
//!
//! ```text
//! draw      which changes an image gets: a function of (run.seed, epoch, sample, camera)
//! change    one change with its parameters     colour, geometry   the two kinds
//! picture   an image while it is changed
//! ```
//!
//! What it does not do: change what is evaluated, held out, compared or served. Those never come here.

mod change;
mod colour;
mod draw;
mod geometry;
mod picture;
#[cfg(test)]
mod tests;

pub(super) use draw::{Augmenter, View};
