//! The worker as the coordinator sees it: gRPC and its state machine. Never sees a tensor.
//!
//! ```text
//! run            GetRun -> open -> Register -> Follow, heartbeats, reports -> Leave
//!   thread       the trainer's: a panic of it is a failure with its words
//!   client       one connection: token, backoff, what is worth another try
//!   standing     what directives have said so far, and what follows for the trainer: the worker's state
//!                machine, pure
//!   channel      the link's two ends: the standing under a lock, and the queue of reports
//!   reporter     takes reports off the queue in order, batches steps, sends them until they are taken
//!   convert      wire to domain and back; nothing else here knows wire types' fields
//! ```
//!
//! Directives reach the trainer as state (they are levels, not edges: a replay after a lost connection
//! changes nothing), reports leave it through one bounded queue, so that training never waits for the
//! network.

mod channel;
mod client;
mod convert;
mod hold;
mod options;
mod reporter;
mod run;
pub mod standing;
mod thread;

pub use options::{SessionError, SessionOptions};
pub use run::run;
