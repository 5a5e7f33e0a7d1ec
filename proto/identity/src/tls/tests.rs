//! Callers and coordinators on loopback, with `https://` where TLS would not be spoken by itself.

use std::{fs, path::Path};

use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair, date_time_ymd};
use rustls::{ServerConfig, crypto::ring, server::ResolvesServerCert, sign::CertifiedKey, version::TLS13};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
};
use tokio_rustls::TlsAcceptor;

use super::*;
use crate::{
    Address, Caller, CertificateFiles, Credentials, Door, IdentityError, Scope, Token, Tokens,
    error::DialError,
};

fn fresh(scope: Scope) -> Token {
    Token::fresh(scope).unwrap()
}

fn with(token: &Token) -> Credentials {
    Credentials::new(Some(Tokens::one(token.clone())), CertificateFiles::default())
}

/// Where a listener is, through TLS.
fn at(listener: &TcpListener) -> Address {
    Address::parse(&format!("https://localhost:{}", listener.local_addr().unwrap().port()))
}

async fn listen() -> TcpListener {
    TcpListener::bind("127.0.0.1:0").await.unwrap()
}

async fn call(listener: &TcpListener, caller: &Credentials) -> Result<crate::Stream, DialError> {
    let tcp = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
    let shown = caller.tokens().and_then(|tokens| tokens.for_scope(Scope::Worker));
    Client::new(caller.certificates())?.connect(tcp, &at(listener), shown.as_ref()).await
}

/// A caller at a door: what the one says of the other, after a word from the caller has come through.
async fn meet(door: &Door, caller: &Credentials) -> (Result<(), String>, Result<Caller, String>) {
    let listener = listen().await;
    let calling = async {
        let mut stream = call(&listener, caller).await.map_err(|error| error.to_string())?;
        stream.write_all(b"word").await.map_err(|error| error.to_string())?;
        // It hears of a refused certificate of its own here.
        stream.read_exact(&mut [0; 4]).await.map(drop).map_err(|error| error.to_string())
    };
    let answering = async {
        let (tcp, _) = listener.accept().await.unwrap();
        let (mut stream, caller) = door.greet(tcp).await.map_err(|error| error.to_string())?;
        let mut word = [0; 4];
        stream.read_exact(&mut word).await.map_err(|error| error.to_string())?;
        assert_eq!(&word, b"word");
        stream.write_all(b"echo").await.map_err(|error| error.to_string())?;
        Ok(caller)
    };
    tokio::join!(calling, answering)
}

#[tokio::test]
async fn who_has_the_token_is_spoken_to_and_who_has_another_learns_what_to_check() {
    let [ours, read, other] = [Scope::All, Scope::Read, Scope::All].map(fresh);
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("tokens");
    [&ours, &read].iter().for_each(|token| Tokens::add_to_file(&file, token).unwrap());
    let tokens = Tokens::of_file(&file).unwrap();
    let door = Door::new(&Credentials::new(Some(tokens), CertificateFiles::default()), false).unwrap();
    for token in [&ours, &read] {
        let (calling, caller) = meet(&door, &with(token)).await;
        calling.unwrap();
        let caller = caller.unwrap();
        assert!(caller.is_private && caller.granted.is_empty(), "{caller:?}");
    }
    let (calling, caller) = meet(&door, &with(&other)).await;
    let refused = calling.unwrap_err();
    assert!(refused.contains("does not know our token") && refused.contains("COX_TOKEN"), "{refused}");
    assert!(caller.unwrap_err().contains("a token that is not valid here"));
    let (calling, _) = meet(&door, &Credentials::default()).await;
    assert!(calling.unwrap_err().contains("its identity cannot be verified"));
}

#[tokio::test]
async fn a_server_with_another_key_is_not_spoken_to() {
    #[derive(Debug)]
    struct Impostor(std::sync::Arc<CertifiedKey>);
    impl ResolvesServerCert for Impostor {
        fn resolve(&self, _: rustls::server::ClientHello<'_>) -> Option<std::sync::Arc<CertifiedKey>> {
            Some(self.0.clone())
        }
    }
    let (ours, other) = (fresh(Scope::All), fresh(Scope::All));
    let stolen = derived::certified(&ours).unwrap();
    let own = derived::certified(&other).unwrap();
    // The certificate is public: who shows it without its key cannot sign the handshake.
    let forged = CertifiedKey::new(stolen.cert.clone(), own.key.clone());
    for (shown, expected) in [(own, "does not have our token"), (std::sync::Arc::new(forged), "BadSignature")]
    {
        let config = ServerConfig::builder_with_provider(std::sync::Arc::new(ring::default_provider()))
            .with_protocol_versions(&[&TLS13])
            .unwrap()
            .with_no_client_auth()
            .with_cert_resolver(std::sync::Arc::new(Impostor(shown)));
        let (listener, acceptor) = (listen().await, TlsAcceptor::from(std::sync::Arc::new(config)));
        let caller = with(&ours);
        let answering = async { acceptor.accept(listener.accept().await.unwrap().0).await.map(drop) };
        let (refused, served) = tokio::join!(call(&listener, &caller), answering);
        let refused = refused.err().unwrap();
        served.unwrap_err();
        assert!(matches!(refused, DialError::Identity(_)), "{refused:?}");
        let told = format!("{refused} {refused:?}");
        assert!(told.contains(expected) || told.contains("not accepted"), "{told}");
    }
}

#[tokio::test]
async fn who_has_a_lesser_token_is_not_shown_a_higher_one() {
    let [read, worker] = [Scope::Read, Scope::Worker].map(fresh);
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("tokens");
    // The lesser one comes first, as security.md has it.
    [&read, &worker].iter().for_each(|token| Tokens::add_to_file(&file, token).unwrap());
    let caller = Credentials::new(Some(Tokens::of_file(&file).unwrap()), CertificateFiles::default());
    let (calling, _) = meet(&Door::new(&with(&read), false).unwrap(), &caller).await;
    assert!(calling.unwrap_err().contains("does not know our token"));
    let (calling, _) = meet(&Door::new(&with(&worker), false).unwrap(), &caller).await;
    calling.unwrap();
}

#[tokio::test]
async fn a_server_in_clear_is_named_as_such() {
    let listener = listen().await;
    let answering = async {
        let (mut tcp, _) = listener.accept().await.unwrap();
        assert!(tcp.read(&mut [0; 512]).await.unwrap() > 0);
        tcp.write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n").await.unwrap();
    };
    let caller = with(&fresh(Scope::All));
    let (refused, ()) = tokio::join!(call(&listener, &caller), answering);
    let refused = refused.err().unwrap().to_string();
    assert!(refused.contains("does not speak TLS") && refused.contains("--plaintext"), "{refused}");
}

#[tokio::test]
async fn a_caller_of_this_machine_may_speak_in_clear() {
    let (listener, door) = (listen().await, Door::new(&with(&fresh(Scope::All)), false).unwrap());
    let (calling, tcp) = tokio::join!(TcpStream::connect(listener.local_addr().unwrap()), listener.accept());
    let mut calling = calling.unwrap();
    calling.write_all(b"PRI * HTTP/2.0\r\n").await.unwrap();
    let (mut stream, caller) = door.greet(tcp.unwrap().0).await.unwrap();
    assert!(caller.is_private);
    let mut word = [0; 3];
    stream.read_exact(&mut word).await.unwrap();
    assert_eq!(&word, b"PRI", "what was looked at is still there");
}

/// An authority of one's own, and what it issues.
struct Authority(CertifiedIssuer<'static, KeyPair>);

impl Authority {
    fn new(dir: &Path) -> Self {
        let mut params = CertificateParams::new(Vec::new()).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let authority = Self(CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap());
        fs::write(dir.join("ca.pem"), authority.0.pem()).unwrap();
        authority
    }

    /// A certificate for a name, valid until a year; what to set so that it is shown.
    fn issue(&self, dir: &Path, name: &str, until: i32) -> CertificateFiles {
        let mut params = CertificateParams::new([name.to_owned()]).unwrap();
        params.not_after = date_time_ymd(until, 1, 1);
        let key = KeyPair::generate().unwrap();
        let certificate = params.signed_by(&key, &self.0).unwrap();
        let path = |kind: &str| dir.join(format!("{name}-{until}.{kind}"));
        fs::write(path("crt"), certificate.pem()).unwrap();
        fs::write(path("key"), key.serialize_pem()).unwrap();
        CertificateFiles { cert: Some(path("crt")), key: Some(path("key")), ca: None }
    }
}

#[tokio::test]
async fn certificates_of_ones_own_are_checked_and_what_is_wrong_with_them_is_named() {
    let [dir, elsewhere] = [0, 1].map(|_| tempfile::tempdir().unwrap());
    let (authority, stranger) = (Authority::new(dir.path()), Authority::new(elsewhere.path()));
    let token = fresh(Scope::All);
    let ca = CertificateFiles { ca: Some(dir.path().join("ca.pem")), ..CertificateFiles::default() };
    let tokens = || Some(Tokens::one(token.clone()));
    let caller = Credentials::new(tokens(), ca);
    for (certificate, expected) in [
        (authority.issue(dir.path(), "localhost", 4000), None),
        (authority.issue(dir.path(), "localhost", 2020), Some("renew the certificate, or correct")),
        (authority.issue(dir.path(), "node7", 4000), Some("not valid for name")),
        (stranger.issue(elsewhere.path(), "localhost", 4000), Some("not issued by COX_TLS_CA")),
    ] {
        let door = Door::new(&Credentials::new(tokens(), certificate), false).unwrap();
        let (calling, _) = meet(&door, &caller).await;
        match expected {
            None => calling.unwrap(),
            Some(expected) => {
                let refused = calling.unwrap_err();
                assert!(refused.contains("localhost:") && refused.contains(expected), "{refused}");
            }
        }
        // Who has the token and no authority is content with that.
        meet(&door, &with(&token)).await.0.unwrap();
    }
}

#[tokio::test]
async fn a_callers_certificate_grants_what_its_name_does() {
    let [dir, elsewhere] = [0, 1].map(|_| tempfile::tempdir().unwrap());
    let (authority, stranger) = (Authority::new(dir.path()), Authority::new(elsewhere.path()));
    let (file, token) = (dir.path().join("tokens"), fresh(Scope::All));
    Tokens::add_to_file(&file, &token).unwrap();
    let text =
        fs::read_to_string(&file).unwrap() + "name:prometheus.example=read\nname:ops.example=control\n";
    fs::write(&file, text).unwrap();
    let ca = CertificateFiles { ca: Some(dir.path().join("ca.pem")), ..CertificateFiles::default() };
    let door = Door::new(&Credentials::new(Some(Tokens::of_file(&file).unwrap()), ca), false).unwrap();
    let caller = |certificate| Credentials::new(Some(Tokens::one(token.clone())), certificate);
    for (name, granted) in
        [("prometheus.example", vec![Scope::Read]), ("ops.example", vec![Scope::Control]), ("other", vec![])]
    {
        let (_, met) = meet(&door, &caller(authority.issue(dir.path(), name, 4000))).await;
        assert_eq!(met.unwrap().granted, granted, "{name}");
    }
    let (_, forged) = meet(&door, &caller(stranger.issue(elsewhere.path(), "ops.example", 4000))).await;
    forged.unwrap_err();
    let (_, old) = meet(&door, &caller(authority.issue(dir.path(), "ops.example", 2020))).await;
    old.unwrap_err();
}

#[test]
fn files_that_hold_no_certificate_are_named_by_their_variable() {
    let dir = tempfile::tempdir().unwrap();
    let good = Authority::new(dir.path()).issue(dir.path(), "localhost", 4000);
    let other = Authority::new(dir.path()).issue(dir.path(), "node7", 4000);
    let text = dir.path().join("text");
    fs::write(&text, "no PEM").unwrap();
    let missing = Some(dir.path().join("missing"));
    for (files, expected) in [
        (CertificateFiles { cert: Some(text.clone()), ..good.clone() }, "COX_TLS_CERT: "),
        (CertificateFiles { key: Some(text.clone()), ..good.clone() }, "no key in it"),
        (CertificateFiles { key: other.key, ..good.clone() }, "COX_TLS_KEY: "),
        (CertificateFiles { key: None, ..good.clone() }, "belong together"),
        (CertificateFiles { ca: missing, ..good.clone() }, "COX_TLS_CA: "),
        (CertificateFiles { ca: Some(text), ..good }, "no certificate in it"),
    ] {
        let refused = Client::new(&files).err().unwrap().to_string();
        assert!(refused.contains(expected), "{refused}");
        let credentials = Credentials::new(Some(Tokens::one(fresh(Scope::All))), files);
        assert!(matches!(
            Door::new(&credentials, false),
            Err(IdentityError::Certificate { .. } | IdentityError::HalfACertificate)
        ));
    }
}
