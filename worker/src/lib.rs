//! The engine: one worker is one process, one device, one rank.
//!
//! Imports only go down this list:
//!
//! ```text
//! session            gRPC and the worker's state machine; never sees a tensor
//! device selftest    what to compute on; what a node can do
//! train              the trainer thread: loop, step transaction, checkpoint, export; never sees tonic
//! memory             peaks by phase, predicted and measured
//! health             whether the machine is sound
//! trainer link       what session and trainer are to each other; the two channels between them, as a trait;
//!                    `SoloLink` is its null object
//! zero               the optimizer's partition
//! feeder collective  micro-batches ahead of the trainer; what ranks say to each other
//! ```
//!
//! What is trained is a task ([`coxswain_task`]); the engine knows none of them.

mod clock;
pub mod collective;
pub mod device;
pub mod feeder;
pub mod health;
pub mod link;
pub mod memory;
pub mod selftest;
pub mod session;
pub mod train;
pub mod trainer;
pub mod zero;
