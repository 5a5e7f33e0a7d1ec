//! What is wrong with a token, a certificate, or who is at the other end; each says what to do.

use std::{error::Error, io, path::PathBuf};

use crate::Scope;

/// Why somebody is not trusted, or cannot show who they are. No text holds a token.
#[derive(Debug, thiserror::Error)]
pub enum IdentityError {
    /// A token that might be guessed.
    #[error(
        "the token is too short: use at least 32 hexadecimal digits, or 22 letters and digits (128 bits); `cox token` makes one"
    )]
    Short,
    /// A token that cannot be sent.
    #[error(
        "a token must consist of at most {most} visible ASCII characters without blanks; `cox token` makes one"
    )]
    Characters {
        /// The most there may be.
        most: usize,
    },
    /// A line of a token file.
    #[error("{}: line {line}: {problem}", path.display())]
    Line {
        /// The file.
        path: PathBuf,
        /// From 1.
        line: usize,
        /// What is wrong with it.
        problem: String,
    },
    /// A token file as a whole.
    #[error("{}: {problem}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        problem: String,
    },
    /// A token file that others may read.
    #[error(
        "{}: other users may read this token file (mode {mode:04o}): chmod 600 it, and replace the tokens \
         if somebody may have read them",
        path.display()
    )]
    OpenToOthers {
        /// The file.
        path: PathBuf,
        /// Permissions.
        mode: u32,
    },
    /// A token file of another user.
    #[error("{}: this token file belongs to uid {owner}, who could give others access; make it yours with chown", path.display())]
    NotOurs {
        /// The file.
        path: PathBuf,
        /// Whose it is.
        owner: u32,
    },
    /// No token that lets in who must come in.
    #[error(
        "none of the tokens has the scope `{0}`, which every run needs: add one with `cox token --scope {0}`"
    )]
    Missing(Scope),
    /// The machine has no randomness.
    #[error("cannot draw a random token: {0}")]
    Random(getrandom::Error),
    /// This build has no TLS.
    #[error(
        "{0} is not on this machine, and this build of cox has no TLS: build it with `--features tls`, or, \
         if the network is trusted, give `--plaintext` (to commands: the address http://{0})"
    )]
    WithoutTls(String),
    /// This build has no TLS for certificates.
    #[error(
        "COX_TLS_CERT, COX_TLS_KEY, COX_TLS_CA: this build of cox has no TLS; build it with `--features tls`"
    )]
    CertificateWithoutTls,
    /// This build has no TLS to make certificates with.
    #[error("this build of cox has no TLS, and so no certificates; build it with `--features tls`")]
    NoCertificates,
    /// Nothing to know the server by.
    #[error(
        "{0} uses TLS, but its identity cannot be verified: set COX_TOKEN (or COX_TOKEN_FILE), or COX_TLS_CA"
    )]
    NothingToTrust(String),
    /// A certificate, its key, or those it is checked against.
    #[error("{variable}: {}: {problem}", path.display())]
    Certificate {
        /// The variable that names the file.
        variable: &'static str,
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        problem: String,
    },
    /// A certificate without its key, or the other way round.
    #[error("COX_TLS_CERT and COX_TLS_KEY belong together: set both, or neither")]
    HalfACertificate,
    /// The server has a key that is not our token's.
    #[error(
        "{0} does not have our token (its TLS key differs): check that COX_TOKEN (or COX_TOKEN_FILE) is \
         the same on both sides, and that no other program listens there"
    )]
    OtherKey(String),
    /// The server does not know our token.
    #[error(
        "the coordinator at {0} does not know our token: check that COX_TOKEN (or COX_TOKEN_FILE) is the same on both sides"
    )]
    UnknownToken(String),
    /// The server's certificate.
    #[error("the certificate of {address} is not accepted: {problem}")]
    NotAccepted {
        /// `HOST:PORT`.
        address: String,
        /// Why, and what to do.
        problem: String,
    },
    /// The other end speaks in clear.
    #[error(
        "{0} does not speak TLS: if its coordinator was started with --plaintext, give `--plaintext` \
         here, too (to commands: the address http://{0}); otherwise another program listens there"
    )]
    InClear(String),
    /// The handshake failed in another way.
    #[error("TLS with {address} failed: {problem}")]
    Handshake {
        /// `HOST:PORT`.
        address: String,
        /// What rustls says.
        problem: String,
    },
}

impl IdentityError {
    pub(crate) fn file(path: &std::path::Path, problem: impl ToString) -> Self {
        Self::File { path: path.to_owned(), problem: problem.to_string() }
    }
}

/// Why there is no connection.
#[derive(Debug, thiserror::Error)]
pub(crate) enum DialError {
    /// An error of the network: another try may help.
    #[error(transparent)]
    Network(#[from] Box<dyn Error + Send + Sync>),
    /// As with [`DialError::Network`].
    #[error("{0}")]
    Connection(#[from] io::Error),
    /// An error of trust: no other try will help.
    #[error("{0}")]
    Identity(IdentityError),
}

impl From<IdentityError> for DialError {
    fn from(error: IdentityError) -> Self {
        Self::Identity(error)
    }
}
