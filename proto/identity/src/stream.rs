//! A connection, in clear or through TLS.

use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::TcpStream,
};
use tokio_util::either::Either;

/// What TLS makes of a connection.
pub trait EncryptedStream: AsyncRead + AsyncWrite + Send + Unpin {}

impl<S: AsyncRead + AsyncWrite + Send + Unpin> EncryptedStream for S {}

/// A connection, in clear or through TLS.
pub type Stream = Either<TcpStream, Box<dyn EncryptedStream>>;
