//! A trained policy behind a port: openpi's WebSocket protocol, so that its clients need not change.
//!
//! ```text
//! a thread a client       tls? -> http -> [101] -> metadata -> (observation -> answer, or text: an error)*
//!     decode              msgpack to named values        RequestReader      named values to samples
//!                              │  ▲
//!                 a queue of one observation a client
//!                              ▼  │
//! the model's thread      as many as wait, up to a bound -> one forward pass -> an answer each
//! ```
//!
//! | module | what |
//! |---|---|
//! | [`model`] | the thread that computes; warm-up; batches |
//! | [`server`] | the port, its threads, and their end |
//! | [`clients`], [`patience`] | who is connected, strangers apart; how long each may take |
//! | [`connection`] | one client, from its first byte to its last |
//! | [`tls`] | a certificate of one's own, and the handshake; with the feature `tls` |
//! | [`http`] | what comes before frames: health, metrics, the token, the upgrade |
//! | [`decode`], [`encode`] | msgpack, with arrays as NumPy's clients write them |
//! | [`metrics`] | latencies and counts |
//!
//! A client that sends nonsense hears so in a text frame, and may go on; no other client notices. What this
//! crate does not do: know what an observation or an action is. That is the
//! [`Responder`](coxswain_task::Responder)'s, which a task makes.

#![forbid(unsafe_code)]

mod clients;
mod clock;
mod connection;
mod decode;
mod encode;
mod error;
mod http;
mod limits;
mod metrics;
mod model;
mod patience;
mod server;
#[cfg(test)]
mod tests;
#[cfg(feature = "tls")]
mod tls;
#[cfg(not(feature = "tls"))]
#[path = "tls_absent.rs"]
mod tls;

pub use self::{
    error::ServeError,
    model::Model,
    server::{Door, Port, Server},
    tls::Tls,
};
