//! Bounds of a policy server.

/// Clients at once. A robot has one; the bound keeps strangers from taking all threads.
pub const MAX_CLIENTS: usize = 256;
/// Largest observation: ten cameras of 1920 x 1080.
pub const MAX_OBSERVATION_BYTES: usize = 64 << 20;
/// What is read, and thrown away, of a larger one, so that its sender gets to hear why.
pub const MAX_DRAINED_BYTES: u64 = 4 << 30;
