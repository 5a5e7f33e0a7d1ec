//! Stands for TLS in a program that was built without it.

use std::io;

use tokio::net::TcpStream;

use crate::{Address, CertificateFiles, IdentityError, Scope, Stream, Token, Tokens, error::DialError};

/// Whether this build has TLS.
pub(crate) const IS_HERE: bool = false;

/// The certificate that follows from a token, and its name: not in this build.
pub fn certificate(_token: &Token) -> Result<(String, String), IdentityError> {
    Err(IdentityError::NoCertificates)
}

/// A caller that can only say what is missing.
#[derive(Debug)]
pub(crate) struct Client;

impl Client {
    pub(crate) fn new(files: &CertificateFiles) -> Result<Self, IdentityError> {
        files.check()?;
        match files.are_given() {
            true => Err(IdentityError::CertificateWithoutTls),
            false => Ok(Self),
        }
    }

    pub(crate) async fn connect(
        &self,
        _tcp: TcpStream,
        address: &Address,
        _shown: Option<&Token>,
    ) -> Result<Stream, DialError> {
        Err(IdentityError::WithoutTls(address.host_port().to_owned()).into())
    }
}

/// There is none.
#[derive(Debug)]
pub(crate) enum Server {}

impl Server {
    pub(crate) fn new(_files: &CertificateFiles, _tokens: &Tokens) -> Result<Self, IdentityError> {
        Err(IdentityError::CertificateWithoutTls)
    }

    pub(crate) async fn accept(&self, _tcp: TcpStream) -> io::Result<(Stream, Vec<Scope>)> {
        match *self {}
    }
}
