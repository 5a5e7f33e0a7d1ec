//! TLS 1.3 by rustls, with ring's cryptography.
//!
//! | file | what |
//! |---|---|
//! | `derived` | the key and the certificate that follow from a token, and the name that tells which token |
//! | `files` | certificates of one's own |
//! | `client` | what a caller accepts: the key of its token, or what COX_TLS_CA has issued |
//! | `server` | what a coordinator shows, and what a caller's certificate grants |

mod client;
mod derived;
mod files;
mod server;
#[cfg(test)]
mod tests;

/// Whether this build has TLS.
pub(crate) const IS_HERE: bool = true;

pub use self::derived::certificate;
pub(crate) use self::{client::Client, server::Server};
