//! Whole data sets and damaged ones, of both layouts, with images and with videos.

#![allow(clippy::unwrap_used, reason = "helpers of tests fail by panicking")]

mod damaged;
mod sets;
mod sheet;
mod stats;
