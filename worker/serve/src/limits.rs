//! Bounds of a policy server.

use std::time::Duration;

/// Clients at once. A robot has one.
pub const MAX_CLIENTS: usize = 256;
/// Connections at once that have not shown yet that they may come in; the longest there makes room for the
/// next.
pub const MAX_STRANGERS: usize = 64;
/// They have so long for it, TLS's handshake included.
pub const AUTHENTICATION: Duration = Duration::from_secs(10);
/// From the first byte of an observation to its last: the largest at half a megabyte a second.
pub const OBSERVATION_TIME: Duration = Duration::from_secs(120);
/// Sending a request, or taking an answer, may pause for this long.
pub const STALL: Duration = Duration::from_secs(10);
/// How often a client is heard while its answer is computed: some leave when a ping waits for 20 s.
pub const HEARD_EVERY: Duration = Duration::from_millis(250);
/// How long a look takes at what has come, if nothing has.
pub const GLANCE: Duration = Duration::from_millis(1);
/// Largest observation: ten cameras of 1920 x 1080.
pub const MAX_OBSERVATION_BYTES: usize = 64 << 20;
/// What is read, and thrown away, of a larger one, so that its sender gets to hear why.
pub const MAX_DRAINED_BYTES: u64 = 4 << 30;
