//! Who may call a coordinator, and who may be one: tokens, scopes, TLS, and keys that follow from a token.
//!
//! ```text
//! token     one secret and what it grants                      scope: read, control, worker, all
//! tokens    those that are valid now: one of the environment, or those of a file that may change
//!
//! address   HOST:PORT, and whether TLS is spoken there
//! dial      a caller's connections: TLS wherever they leave the machine      ┐ one trust:
//! door      a coordinator's: TLS for those who come from elsewhere           ┘ the token, or certificates
//! role      which coordinator of a run is the newest, where all machines see it
//! tls       rustls; a key and a certificate that follow from a token
//! ```
//!
//! **The token is the trust.** Without any certificate, server and caller derive the same Ed25519 key from
//! the token they share (BLAKE3's key derivation); the server shows a certificate of that key, and the caller
//! accepts this key and no other. So those who have a token can also be the server for those who have the
//! same one; nobody else can. Which token a caller has it says by a public name that follows from it, as
//! TLS's server name. That is sound because a token has at least 128 bits that nobody can guess.
//!
//! What this crate does not do: encrypt what workers send each other. The ring proves knowledge of a token
//! with [`Token::key`] and then speaks in clear.

#![forbid(unsafe_code)]

mod address;
mod certificates;
pub mod claims;
mod dial;
mod door;
mod error;
mod file;
mod names;
mod owner;
mod scope;
mod stream;
#[cfg(feature = "tls")]
mod tls;
#[cfg(not(feature = "tls"))]
#[path = "tls_absent.rs"]
mod tls;
mod token;
mod tokens;

pub use self::{
    address::{Address, Encryption, Whereabouts},
    certificates::CertificateFiles,
    dial::{Credentials, ShowToken, channel, refusal},
    door::{Caller, Door},
    error::IdentityError,
    owner::is_ours,
    scope::Scope,
    stream::{EncryptedStream, Stream},
    tls::certificate,
    token::{Token, random},
    tokens::Tokens,
};
