//! The worker as the coordinator sees it: gRPC and its state machine.

mod options;

pub use options::{SessionError, SessionOptions};
