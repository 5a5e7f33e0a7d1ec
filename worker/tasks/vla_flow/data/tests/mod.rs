//! Tests of the whole path on data sets written by LeRobot, and on copies of them that are broken in one
//! place.

mod broken;
mod broken_checkpoint;
mod golden;
mod keys;
mod layout;
mod mixture;
mod real;
mod video;

use crate::vla_flow::testing::{assets, mini, recording, spec};
