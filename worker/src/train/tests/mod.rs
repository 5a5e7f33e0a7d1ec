//! Parts of training on a real task's policy.

mod average;
mod gradients;
mod init_from;
mod on_device;
mod room;

use crate::zero::Rates;

/// A rate for each of its groups.
fn peak() -> Rates {
    Rates::from([("lora", 1e-4), ("expert", 1e-4), ("sensor", 1e-4)])
}
