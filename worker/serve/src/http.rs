//! What comes before frames: a request of HTTP/1.1, answered once.
//!
//! | request | answer |
//! |---|---|
//! | `GET /healthz` | 200 `OK`: the policy is loaded and warm |
//! | `GET /metrics` | 200, Prometheus's text format; wants the token |
//! | `HEAD` of these | the same without what follows the headers, as `wget --spider` and load balancers ask |
//! | any other path, with an upgrade to WebSocket | 101; wants the token |
//! | anything else | 400, 401, 404 or 426, with a sentence |
//!
//! The token is `Authorization: Api-Key TOKEN`, as openpi's clients send it. A client that speaks in clear
//! where TLS is wanted is told so in clear.

use std::io::{self, Read, Write};

use httparse::Status;
use tungstenite::handshake::derive_accept_key;

use crate::metrics::Metrics;

/// Longest request, without what follows its headers.
const MAX_HEAD_BYTES: usize = 16 << 10;
/// Most headers of a request.
const MAX_HEADERS: usize = 64;
/// The first byte of a client that speaks TLS.
pub const TLS_HANDSHAKE: u8 = 0x16;
/// To a client that has no token, or a wrong one.
const UNAUTHORIZED: &str = "401 Unauthorized";
/// To a client for which there is no room.
const UNAVAILABLE: &str = "503 Service Unavailable";

/// Who has asked.
#[derive(Debug, PartialEq, Eq)]
pub enum Greeting {
    /// One that speaks frames from now on, with what it has sent of them.
    Client(Vec<u8>),
    /// One that has its answer, or has gone.
    Visitor,
    /// One that was not let in, and why.
    Refused(&'static str),
}

/// What a client is told, and what becomes of it.
#[derive(Debug, PartialEq, Eq)]
enum Reply {
    /// It speaks frames from now on.
    Upgrade { accept: String },
    /// This, and nothing more.
    Once { status: &'static str, text: String },
}

impl Reply {
    fn once(status: &'static str, text: impl Into<String>) -> Self {
        Self::Once { status, text: text.into() }
    }
}

/// Reads a request and answers it. Who may come in is `let_in`, unless there is no room.
pub fn greet(
    stream: &mut (impl Read + Write),
    token: Option<&str>,
    metrics: &Metrics,
    let_in: impl FnOnce() -> bool,
) -> io::Result<Greeting> {
    let Some((head, rest)) = read_head(stream)? else { return Ok(Greeting::Visitor) };
    let wants_body = !head.starts_with(b"HEAD ");
    match reply(&head, token, metrics) {
        Reply::Upgrade { .. } if !let_in() => {
            tell(stream, UNAVAILABLE, "the maximum number of clients is connected; try again later\n", true)?;
            Ok(Greeting::Refused("the maximum number of clients is connected"))
        }
        Reply::Upgrade { accept } => {
            write!(
                stream,
                "HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\
                 Sec-WebSocket-Accept: {accept}\r\n\r\n"
            )?;
            Ok(Greeting::Client(rest))
        }
        Reply::Once { status, text } => {
            tell(stream, status, &text, wants_body)?;
            match status {
                UNAUTHORIZED => Ok(Greeting::Refused("it has no token, or a wrong one")),
                _ => Ok(Greeting::Visitor),
            }
        }
    }
}

/// Answers a request that came in clear where it must not.
pub fn refuse_in_clear(stream: &mut (impl Read + Write)) -> io::Result<()> {
    // Read as a whole: closing a connection with something unread takes the answer along.
    match read_head(stream)? {
        Some(_) => {
            tell(stream, "400 Bad Request", "this port speaks TLS; connect to wss:// or https://\n", true)
        }
        None => Ok(()),
    }
}

/// An answer after which nothing follows, with its text or with the length of it alone.
fn tell(stream: &mut impl Write, status: &str, text: &str, wants_body: bool) -> io::Result<()> {
    write!(
        stream,
        "HTTP/1.1 {status}\r\nContent-Type: text/plain; charset=utf-8\r\nContent-Length: {}\r\n\
         Connection: close\r\n\r\n{}",
        text.len(),
        if wants_body { text } else { "" },
    )?;
    stream.flush()
}

/// The bytes up to the empty line, and those after it; none if the client has gone or sends something else.
fn read_head(stream: &mut impl Read) -> io::Result<Option<(Vec<u8>, Vec<u8>)>> {
    let (mut bytes, mut chunk) = (Vec::new(), [0; 4096]);
    while bytes.len() < MAX_HEAD_BYTES {
        let count = stream.read(&mut chunk)?;
        if count == 0 {
            return Ok(None);
        }
        bytes.extend_from_slice(&chunk[..count]);
        if let Some(at) = bytes.windows(4).position(|end| end == b"\r\n\r\n") {
            let rest = bytes.split_off(at + 4);
            return Ok(Some((bytes, rest)));
        }
    }
    Ok(None)
}

fn reply(head: &[u8], token: Option<&str>, metrics: &Metrics) -> Reply {
    let mut headers = [httparse::EMPTY_HEADER; MAX_HEADERS];
    let mut request = httparse::Request::new(&mut headers);
    if !matches!(request.parse(head), Ok(Status::Complete(_))) {
        return Reply::once("400 Bad Request", "not an HTTP/1.1 request\n");
    }
    let header = |name: &str| {
        let found = request.headers.iter().find(|header| header.name.eq_ignore_ascii_case(name));
        found.and_then(|header| std::str::from_utf8(header.value).ok())
    };
    let path = request.path.unwrap_or_default().split('?').next().unwrap_or_default();
    let is_head = request.method == Some("HEAD");
    if request.method != Some("GET") && !is_head {
        return Reply::once("405 Method Not Allowed", "only GET and HEAD are answered\n");
    }
    if path == "/healthz" {
        return Reply::once("200 OK", "OK\n");
    }
    if !admits(token, header("authorization")) {
        let text = "this server requires `Authorization: Api-Key TOKEN` (api_key=TOKEN in openpi's client)\n";
        return Reply::once(UNAUTHORIZED, text);
    }
    if path == "/metrics" {
        return Reply::once("200 OK", metrics.render());
    }
    // Pages in a browser of this machine could open it otherwise; robots send no such header.
    if token.is_none() && header("origin").is_some() {
        return Reply::once("403 Forbidden", "web pages need a token: start the server with one\n");
    }
    let upgrades = header("upgrade").is_some_and(|upgrade| upgrade.eq_ignore_ascii_case("websocket"));
    match header("sec-websocket-key").filter(|_| !is_head) {
        Some(key) if upgrades && header("sec-websocket-version") == Some("13") => {
            Reply::Upgrade { accept: derive_accept_key(key.as_bytes()) }
        }
        Some(_) => Reply::once("426 Upgrade Required", "use WebSocket version 13\n"),
        None => Reply::once(
            "404 Not Found",
            "not found: this port serves a policy's WebSocket, /healthz and /metrics\n",
        ),
    }
}

/// Whether a client that says this of itself may come in. Takes as long for a token that is nearly right as
/// for any other of its length.
fn admits(token: Option<&str>, authorization: Option<&str>) -> bool {
    let Some(token) = token else { return true };
    let Some((scheme, given)) = authorization.and_then(|header| header.split_once(' ')) else { return false };
    let differs = given.bytes().zip(token.bytes()).fold(0, |differs, (a, b)| differs | (a ^ b));
    scheme.eq_ignore_ascii_case("api-key") && given.len() == token.len() && differs == 0
}

#[cfg(test)]
mod tests {
    use super::*;

    const UPGRADE: &str = "GET / HTTP/1.1\r\nHost: a\r\nUpgrade: WebSocket\r\nConnection: Upgrade\r\n\
                           Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n";

    fn status(head: &str, token: Option<&str>) -> String {
        match reply(format!("{head}\r\n").as_bytes(), token, &Metrics::default()) {
            Reply::Upgrade { accept } => accept,
            Reply::Once { status, .. } => status.to_owned(),
        }
    }

    #[test]
    fn an_upgrade_is_answered_as_rfc_6455_has_it() {
        assert_eq!(status(UPGRADE, None), "s3pPLMBiTxaQ9kYGzzhZRbK+xOo=");
    }

    #[test]
    fn the_token_is_wanted_for_all_but_health() {
        let with = |token: &str| format!("{UPGRADE}Authorization: {token}\r\n");
        for (head, wanted) in [
            (UPGRADE.to_owned(), "401 Unauthorized"),
            (with("Api-Key wron"), "401 Unauthorized"),
            (with("Api-Key rightt"), "401 Unauthorized"),
            (with("Bearer right"), "401 Unauthorized"),
            (with("Api-Key right"), "s3pPLMBiTxaQ9kYGzzhZRbK+xOo="),
            ("GET /metrics HTTP/1.1\r\n".into(), "401 Unauthorized"),
            ("GET /metrics HTTP/1.1\r\nauthorization: api-key right\r\n".into(), "200 OK"),
            ("GET /healthz HTTP/1.1\r\n".into(), "200 OK"),
        ] {
            assert_eq!(status(&head, Some("right")), wanted, "{head}");
        }
    }

    #[test]
    fn other_requests_are_told_what_is_spoken_here() {
        for (head, wanted) in [
            ("GET / HTTP/1.1\r\n", "404 Not Found"),
            ("POST / HTTP/1.1\r\n", "405 Method Not Allowed"),
            ("GET / HTTP/1.1\r\nSec-WebSocket-Key: a\r\n", "426 Upgrade Required"),
            ("\x16\x03\x01", "400 Bad Request"),
        ] {
            assert_eq!(status(head, None), wanted, "{head}");
        }
    }

    #[test]
    fn head_is_answered_as_get_without_what_follows() {
        let answer = |head: &str| {
            let mut stream = io::Cursor::new(head.as_bytes().to_vec());
            greet(&mut stream, None, &Metrics::default(), || true).unwrap();
            String::from_utf8(stream.into_inner().split_off(head.len())).unwrap()
        };
        let whole = answer("GET /healthz HTTP/1.1\r\n\r\n");
        let alone = answer("HEAD /healthz HTTP/1.1\r\n\r\n");
        assert!(alone.starts_with("HTTP/1.1 200 OK\r\n") && alone.ends_with("\r\n\r\n"), "{alone}");
        assert_eq!(whole, alone + "OK\n");
        let upgrade = UPGRADE.replacen("GET", "HEAD", 1);
        assert_eq!(status(&upgrade, None), "404 Not Found");
    }

    #[test]
    fn a_request_without_an_end_is_given_up() {
        let endless = vec![b'a'; 2 * MAX_HEAD_BYTES];
        assert_eq!(read_head(&mut &endless[..]).unwrap(), None);
        assert_eq!(read_head(&mut &b"GET / HTTP/1.1\r\n"[..]).unwrap(), None);
        let whole = b"GET / HTTP/1.1\r\n\r\nmore";
        assert_eq!(read_head(&mut &whole[..]).unwrap().map(|(_, rest)| rest), Some(b"more".to_vec()));
    }
}
