//! An S3 server: `moto`'s, of Python. Nothing where that is not installed.

use std::{
    env,
    io::{BufRead, BufReader, Read, Write},
    net::{SocketAddr, TcpStream},
    process::{Child, Command, Stdio},
};

/// A server of this machine, ended with the value.
pub struct Moto {
    child: Child,
    pub address: SocketAddr,
}

impl Moto {
    /// Starts the server of `COX_TEST_PYTHON`, else `python3`, on a free port; a line says that it skips
    /// where that has none.
    pub fn start() -> Option<Self> {
        let python = env::var("COX_TEST_PYTHON").unwrap_or_else(|_| "python3".into());
        let mut command = Command::new(&python);
        command.args(["-m", "moto.server", "-H", "127.0.0.1", "-p", "0"]);
        let mut child = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().ok();
        let stderr = child.as_mut().and_then(|child| child.stderr.take());
        let lines =
            stderr.into_iter().flat_map(|stderr| BufReader::new(stderr).lines().map_while(Result::ok));
        let mut lines = lines.inspect(|line| println!("moto: {line}"));
        let port = lines.find_map(|line| line.rsplit_once("http://127.0.0.1:")?.1.trim().parse::<u16>().ok());
        let Some((child, port)) = child.zip(port) else {
            println!("skipped: {python} has no moto: pip install 'moto[s3,server]'");
            return None;
        };
        // What it says later is read, so that it never waits to be.
        std::thread::spawn(move || lines.for_each(drop));
        Some(Self { child, address: ([127, 0, 0, 1], port).into() })
    }

    /// Writes an object, or makes a bucket where the path is a name alone.
    pub fn put(&self, path: &str, body: &[u8]) {
        self.ask("PUT", path, body);
    }

    /// An object's content.
    pub fn get(&self, path: &str) -> Vec<u8> {
        self.ask("GET", path, b"")
    }

    /// What the server answers, which looks at no signature.
    fn ask(&self, method: &str, path: &str, body: &[u8]) -> Vec<u8> {
        let (server, len) = (self.address, body.len());
        let mut connection = TcpStream::connect(server).expect("it listens");
        let head = format!(
            "{method} /{path} HTTP/1.1\r\nHost: {server}\r\nAuthorization: {WHO}\r\nContent-Length: {len}\r\nConnection: close\r\n\r\n"
        );
        connection.write_all(&[head.as_bytes(), body].concat()).expect("it reads");
        let mut answer = Vec::new();
        connection.read_to_end(&mut answer).expect("it answers");
        assert!(answer.starts_with(b"HTTP/1.1 200"), "{path}: {}", String::from_utf8_lossy(&answer));
        let end = answer.windows(4).position(|four| four == b"\r\n\r\n").expect("the end of its head");
        answer.split_off(end + 4)
    }
}

const WHO: &str =
    "AWS4-HMAC-SHA256 Credential=test/20260101/us-east-1/s3/aws4_request, SignedHeaders=host, Signature=0";

impl Drop for Moto {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
