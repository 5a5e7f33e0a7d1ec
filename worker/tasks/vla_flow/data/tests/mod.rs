//! Tests of the whole path on data sets written by LeRobot, and on copies of them that are broken in one
//! place.

mod augmented;
mod broken;
mod broken_checkpoint;
mod deltas;
mod episodes;
mod golden;
mod keys;
mod layout;
mod mixture;
mod observed;
mod preview;
mod real;
mod rows;
mod single_key;
mod video;

use crate::vla_flow::testing::{assets, mini, recording, spec};
