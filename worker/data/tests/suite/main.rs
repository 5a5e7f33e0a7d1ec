//! Data sets whose cameras are videos, in both layouts: `make_fixtures.py` wrote all but the
//! videos. And tar shards, which `make_shards.py` wrote.

#![allow(clippy::unwrap_used, reason = "helpers of tests fail by panicking")]

mod frames;
mod hostile;
mod refused;
mod sets;
mod shards;
mod types;
