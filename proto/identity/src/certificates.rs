//! Which files hold certificates of one's own.

use std::path::PathBuf;

use crate::IdentityError;

/// Files of certificates, PEM each; none is needed. They are read when a process starts.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CertificateFiles {
    /// `COX_TLS_CERT`: what this process shows, with those behind it that lead to its issuer's.
    pub cert: Option<PathBuf>,
    /// `COX_TLS_KEY`: its key, without a passphrase.
    pub key: Option<PathBuf>,
    /// `COX_TLS_CA`: whose certificates are accepted.
    pub ca: Option<PathBuf>,
}

impl CertificateFiles {
    /// Whether there is any.
    pub fn are_given(&self) -> bool {
        *self != Self::default()
    }

    /// Refuses a certificate without its key, and the other way round.
    pub(crate) fn check(&self) -> Result<(), IdentityError> {
        match self.cert.is_some() == self.key.is_some() {
            true => Ok(()),
            false => Err(IdentityError::HalfACertificate),
        }
    }
}
