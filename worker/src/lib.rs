//! The engine: one worker is one process, one device, one rank.
//!
//! Imports only go down this list:
//!
//! ```text
//! session            gRPC and the worker's state machine; never sees a tensor
//!   link trainer     the two channels between session and trainer, as a trait; `SoloLink` is its null object
//! selftest device    what a node can do; what to compute on
//! train              the trainer thread: loop, step transaction, checkpoint, export; never sees tonic
//! zero memory feeder collective
//! ```
//!
//! What is trained is a task ([`coxswain_task`]); the engine knows none of them.

pub mod collective;
pub mod device;
pub mod feeder;
pub mod link;
pub mod memory;
pub mod selftest;
pub mod session;
pub mod train;
pub mod trainer;
pub mod zero;
