//! A connection, in clear or through TLS.

use std::{
    io::{self, IoSlice},
    pin::Pin,
    task::{Context, Poll},
};

use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::TcpStream,
};

/// What TLS makes of a connection.
pub(crate) trait EncryptedStream: AsyncRead + AsyncWrite + Send + Unpin {}

impl<S: AsyncRead + AsyncWrite + Send + Unpin> EncryptedStream for S {}

/// A connection, in clear or through TLS.
pub struct Stream(Kind);

enum Kind {
    Plain(TcpStream),
    #[cfg_attr(not(feature = "tls"), expect(dead_code, reason = "nothing is encrypted in this build"))]
    Tls(Box<dyn EncryptedStream>),
}

impl Stream {
    pub(crate) fn plain(tcp: TcpStream) -> Self {
        Self(Kind::Plain(tcp))
    }

    #[cfg(feature = "tls")]
    pub(crate) fn tls(stream: impl EncryptedStream + 'static) -> Self {
        Self(Kind::Tls(Box::new(stream)))
    }

    fn inner(&mut self) -> Pin<&mut dyn EncryptedStream> {
        match &mut self.0 {
            Kind::Plain(stream) => Pin::new(stream),
            Kind::Tls(stream) => Pin::new(stream),
        }
    }
}

impl AsyncRead for Stream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        self.inner().poll_read(context, buffer)
    }
}

impl AsyncWrite for Stream {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.inner().poll_write(context, bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.inner().poll_write_vectored(context, bytes)
    }

    fn is_write_vectored(&self) -> bool {
        match &self.0 {
            Kind::Plain(stream) => stream.is_write_vectored(),
            Kind::Tls(stream) => stream.is_write_vectored(),
        }
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.inner().poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.inner().poll_shutdown(context)
    }
}
