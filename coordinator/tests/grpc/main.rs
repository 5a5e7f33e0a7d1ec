//! The coordinator over real sockets, with workers that only pretend to train.

mod control;
mod harness;
mod journal;
mod training;
mod transport;
