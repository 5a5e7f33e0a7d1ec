//! The coordinator over real sockets, with workers that only pretend to train.

#![allow(clippy::unwrap_used, reason = "a helper that cannot set its test up has failed it")]

mod cache;
mod control;
mod harness;
mod journal;
mod monitoring;
mod node;
mod recovery;
mod training;
mod transport;
