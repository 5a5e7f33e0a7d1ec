//! Clients that speak TLS, clients that do not, and clients that stop half-way.

use std::{
    fs,
    io::{self, ErrorKind, Read, Write},
    net::{SocketAddr, TcpStream},
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use rustls::{
    ClientConfig, ClientConnection, RootCertStore, StreamOwned,
    crypto::ring,
    pki_types::{CertificateDer, ServerName, pem::PemObject},
};
use tungstenite::{Message, protocol::frame::coding::CloseCode};

use super::{Client, get, number, start_behind};
use crate::{Door, Tls};

/// `cert.pem` and `key.pem`: good until 2126, made by
///
/// ```text
/// openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 36500 \
///     -subj /CN=localhost -addext subjectAltName=DNS:localhost,IP:127.0.0.1 \
///     -addext basicConstraints=critical,CA:FALSE -keyout key.pem -out cert.pem
/// ```
///
/// `other-key.pem` is a key of the same kind, of no certificate.
fn file(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("src/tests/tls").join(name)
}

fn tls() -> Tls {
    Tls::load(&file("cert.pem"), &file("key.pem")).unwrap()
}

fn door(token: Option<&str>) -> Door {
    Door { token: token.map(str::to_owned), tls: Some(tls()) }
}

type TlsClient = StreamOwned<ClientConnection, TcpStream>;

/// A client's stream; its handshake is made with its first byte.
fn encrypted(address: SocketAddr, trusts: bool) -> TlsClient {
    let mut roots = RootCertStore::empty();
    if trusts {
        roots.add(CertificateDer::from_pem_file(file("cert.pem")).unwrap()).unwrap();
    }
    let config = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(roots)
        .with_no_client_auth();
    let name = ServerName::try_from("localhost").unwrap();
    let connection = ClientConnection::new(Arc::new(config), name).unwrap();
    StreamOwned::new(connection, TcpStream::connect(address).unwrap())
}

fn connect(address: SocketAddr) -> Client<TlsClient> {
    Client::over(encrypted(address, true), None).unwrap_or_else(|status| panic!("{status}"))
}

#[test]
fn an_encrypted_client_is_answered_and_hears_the_end() {
    let (server, _sizes) = start_behind(door(Some("secret")), None);
    let address = server.address();
    assert_eq!(Client::over(encrypted(address, true), None).err(), Some(401));
    let client = Client::over(encrypted(address, true), Some("secret"));
    let mut client = client.unwrap_or_else(|status| panic!("{status}"));
    for value in 0..3 {
        assert_eq!(client.ask(&number(value as f32)), Ok(value as f32 + 1.0));
    }
    assert_eq!(server.stop(), 0);
    match client.0.read() {
        Ok(Message::Close(Some(told))) => assert_eq!(told.code, CloseCode::Away),
        other => panic!("{other:?}"),
    }
}

#[test]
fn what_is_not_a_policys_client_is_answered_over_tls_too() {
    let (server, _sizes) = start_behind(door(None), None);
    let mut stream = encrypted(server.address(), true);
    write!(stream, "GET /healthz HTTP/1.1\r\nHost: a\r\n\r\n").unwrap();
    let mut text = String::new();
    // Ends with a good-bye, or this would be an error.
    stream.read_to_string(&mut text).unwrap();
    assert!(text.ends_with("\r\n\r\nOK\n"), "{text}");
    assert_eq!(server.stop(), 0);
}

#[test]
fn a_huge_observation_is_refused_in_words_over_tls_too() {
    let (server, _sizes) = start_behind(door(None), None);
    let mut client = connect(server.address());
    client.0.send(Message::binary(vec![0; 65 << 20])).unwrap();
    let refused = client.hear().unwrap_err();
    assert!(refused.contains("at most 67108864"), "{refused}");
    drop(client);
    assert_eq!(server.stop(), 0);
}

#[test]
fn clients_that_do_not_come_in_hurt_no_other() {
    let (server, _sizes) = start_behind(door(None), None);
    let address = server.address();
    let mut client = connect(address);
    let mut answered = |value: f32| assert_eq!(client.ask(&number(value)), Ok(value + 1.0));

    let mut distrusts = encrypted(address, false);
    let refused = distrusts.write_all(b"GET / HTTP/1.1\r\n\r\n").and_then(|()| distrusts.flush());
    assert!(refused.is_err_and(|error| error.to_string().contains("UnknownIssuer")));
    answered(1.0);

    let told = get(address, "/healthz");
    assert!(told.starts_with("HTTP/1.1 400") && told.contains("wss://"), "{told}");
    answered(2.0);

    // The first bytes of a handshake, and no more; and nothing at all.
    let mut half = TcpStream::connect(address).unwrap();
    half.write_all(&[0x16, 3, 1]).unwrap();
    let silent = TcpStream::connect(address).unwrap();
    answered(3.0);

    // Nonsense behind the first byte is answered with an alert, and the end.
    let mut garbled = TcpStream::connect(address).unwrap();
    garbled.write_all(&[0x16, 9, 9, 0, 1, 0]).unwrap();
    let mut rest = Vec::new();
    garbled.read_to_end(&mut rest).unwrap();
    answered(4.0);

    assert_eq!(server.stop(), 0);
    drop((half, silent));
}

/// Sends the beginning of a handshake that never ends, byte by byte.
struct Drip {
    sent: usize,
}

impl Read for Drip {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let record = [0x16, 3, 1, 0x40, 0];
        buffer[0] = record.get(self.sent).copied().unwrap_or_default();
        self.sent += 1;
        Ok(1)
    }
}

impl Write for Drip {
    fn write(&mut self, buffer: &[u8]) -> io::Result<usize> {
        Ok(buffer.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[test]
fn a_handshake_byte_by_byte_is_given_up() {
    let refused = tls().accept(Drip { sent: 0 }, Duration::ZERO).err().expect("it never ends");
    assert_eq!(refused.kind(), ErrorKind::TimedOut, "{refused}");
}

#[test]
fn a_certificate_or_key_that_cannot_be_used_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let write = |name: &str, text: &str| {
        let path = dir.path().join(name);
        fs::write(&path, text).unwrap();
        path
    };
    let (cert, key) = (file("cert.pem"), file("key.pem"));
    let encrypted = write(
        "locked.pem",
        "-----BEGIN ENCRYPTED PRIVATE KEY-----\nAA==\n-----END ENCRYPTED PRIVATE KEY-----\n",
    );
    let empty = write("empty.pem", "");
    let torn = write("torn.pem", "-----BEGIN CERTIFICATE-----\nAA==\n");
    let hollow = write("hollow.pem", "-----BEGIN CERTIFICATE-----\nAA==\n-----END CERTIFICATE-----\n");
    for (cert, key, what, problem) in [
        (&dir.path().join("none.pem"), &key, "TLS certificate", "No such file"),
        (&cert, &dir.path().join("none.pem"), "TLS key", "No such file"),
        (&empty, &key, "TLS certificate", "no certificate in it"),
        (&key, &cert, "TLS certificate", "no certificate in it"),
        (&torn, &key, "TLS certificate", "not PEM"),
        (&hollow, &key, "TLS certificate", "invalid"),
        (&cert, &cert, "TLS key", "no key in it"),
        (&cert, &encrypted, "TLS key", "openssl pkey"),
        (&cert, &file("other-key.pem"), "TLS key", "not the key of"),
    ] {
        let refused = Tls::load(cert, key).unwrap_err().to_string();
        assert!(refused.starts_with(what) && refused.contains(problem), "{refused}");
    }
}
