//! Certificates of one's own: read from PEM files whose variables errors name.

use std::{fs, path::Path};

use rustls::{
    RootCertStore,
    pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject},
};

use crate::{CertificateFiles, IdentityError};

/// A certificate, with those behind it, and its key.
pub(super) struct OwnCertificate {
    pub chain: Vec<CertificateDer<'static>>,
    pub key: PrivateKeyDer<'static>,
}

/// `COX_TLS_CERT` and `COX_TLS_KEY`; nothing where they are not set.
pub(super) fn own(files: &CertificateFiles) -> Result<Option<OwnCertificate>, IdentityError> {
    files.check()?;
    let (Some(cert), Some(key)) = (&files.cert, &files.key) else { return Ok(None) };
    let chain = certificates("COX_TLS_CERT", cert)?;
    let text = read("COX_TLS_KEY", key)?;
    let key = PrivateKeyDer::from_pem_slice(&text).map_err(|_| {
        let encrypted = String::from_utf8_lossy(&text).contains("ENCRYPTED");
        let problem = match encrypted {
            true => "the key is encrypted; write it without a passphrase: openssl pkey -in FILE -out PLAIN",
            false => "no key in it; expected PEM that begins with -----BEGIN PRIVATE KEY-----",
        };
        wrong("COX_TLS_KEY", key, problem)
    })?;
    Ok(Some(OwnCertificate { chain, key }))
}

/// The roots of `COX_TLS_CA`; nothing where it is not set.
pub(super) fn roots(files: &CertificateFiles) -> Result<Option<RootCertStore>, IdentityError> {
    let Some(path) = &files.ca else { return Ok(None) };
    let mut roots = RootCertStore::empty();
    for certificate in certificates("COX_TLS_CA", path)? {
        roots.add(certificate).map_err(|error| wrong("COX_TLS_CA", path, error))?;
    }
    Ok(Some(roots))
}

/// An error about the file of a variable.
pub(super) fn wrong(variable: &'static str, path: &Path, problem: impl ToString) -> IdentityError {
    IdentityError::Certificate { variable, path: path.to_owned(), problem: problem.to_string() }
}

fn certificates(variable: &'static str, path: &Path) -> Result<Vec<CertificateDer<'static>>, IdentityError> {
    let text = read(variable, path)?;
    let found: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&text).collect();
    let found = found.map_err(|error| wrong(variable, path, format!("not PEM: {error}")))?;
    if found.is_empty() {
        let problem = "no certificate in it; expected PEM that begins with -----BEGIN CERTIFICATE-----";
        return Err(wrong(variable, path, problem));
    }
    Ok(found)
}

fn read(variable: &'static str, path: &Path) -> Result<Vec<u8>, IdentityError> {
    fs::read(path).map_err(|error| wrong(variable, path, error))
}
