//! A web server for tests: files of a directory by range, or what another server answers; late, cut off or
//! refused where a test says so. One request a connection.

use std::{
    collections::{HashMap, VecDeque},
    fs::{self, File, Metadata},
    hash::{DefaultHasher, Hash, Hasher},
    io::{self, Read, Write},
    net::{Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream},
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    thread,
    time::{Duration, SystemTime},
};

/// What answers.
pub enum Answers {
    /// Files below a directory, with entity tags of their content.
    Files(PathBuf),
    /// Another server.
    #[allow(dead_code, reason = "for the tests of whole programs, which have one")]
    Of(SocketAddr),
}

/// What goes wrong with a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// Nothing.
    None,
    /// 503, as servers under load say it.
    Unavailable,
    /// 403.
    Forbidden,
    /// Half of the answer, then nothing.
    Cut,
    /// Half of the answer, a pause, the rest.
    Halting,
    /// Nothing is done, and nothing answered.
    #[allow(dead_code, reason = "for the tests of whole programs, which write")]
    Silent,
}

/// A server of this machine.
pub struct Server {
    address: SocketAddr,
    shared: Arc<ServerState>,
}

struct ServerState {
    answers: Answers,
    latency: Duration,
    /// For the next requests for content, one each.
    faults: Mutex<VecDeque<Fault>>,
    /// For the next writes.
    of_writes: Mutex<VecDeque<Fault>>,
    requests: AtomicUsize,
    under_way: AtomicUsize,
    most_under_way: AtomicUsize,
    /// Entity tags of files that have not changed for a while.
    tags: Mutex<HashMap<(PathBuf, SystemTime), String>>,
    stop: AtomicBool,
}

impl Server {
    /// Listens on a free port; each answer begins after `latency`.
    pub fn start(answers: Answers, latency: Duration) -> Self {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a free port");
        let address = listener.local_addr().expect("it is bound");
        let shared = Arc::new(ServerState {
            answers,
            latency,
            faults: Mutex::default(),
            of_writes: Mutex::default(),
            requests: AtomicUsize::new(0),
            under_way: AtomicUsize::new(0),
            most_under_way: AtomicUsize::new(0),
            tags: Mutex::default(),
            stop: AtomicBool::new(false),
        });
        let of_listener = shared.clone();
        thread::spawn(move || {
            for connection in listener.incoming().flatten() {
                if of_listener.stop.load(Ordering::SeqCst) {
                    return;
                }
                let shared = of_listener.clone();
                // Who asks may be gone by now.
                thread::spawn(move || drop(shared.serve(connection)));
            }
        });
        Self { address, shared }
    }

    /// Files of a directory, at once.
    pub fn files(dir: &Path) -> Self {
        Self::start(Answers::Files(dir.to_path_buf()), Duration::ZERO)
    }

    /// `http://127.0.0.1:port`.
    pub fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    /// What goes wrong with the next requests for content.
    pub fn fail(&self, faults: &[Fault]) {
        self.shared.faults.lock().expect("nobody panics with it").extend(faults);
    }

    /// What goes wrong with the next writes, in the place of what was said before.
    #[allow(dead_code, reason = "for the tests of whole programs, which write")]
    pub fn fail_writes(&self, faults: &[Fault]) {
        *self.shared.of_writes.lock().expect("nobody panics with it") = faults.iter().copied().collect();
    }

    /// How many of those have not come yet.
    #[allow(dead_code, reason = "for the tests of whole programs, which write")]
    pub fn faults_of_writes(&self) -> usize {
        self.shared.of_writes.lock().expect("nobody panics with it").len()
    }

    /// Requests so far.
    pub fn requests(&self) -> usize {
        self.shared.requests.load(Ordering::SeqCst)
    }

    /// Most requests that were waiting for their answers at once.
    #[allow(dead_code, reason = "for the tests of this crate")]
    pub fn most_under_way(&self) -> usize {
        self.shared.most_under_way.load(Ordering::SeqCst)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::SeqCst);
        let _ = TcpStream::connect(self.address);
    }
}

impl ServerState {
    fn serve(&self, mut connection: TcpStream) -> io::Result<()> {
        connection.set_nodelay(true)?;
        let head = head_of(&mut connection)?;
        let mut body = vec![0; header(&head, "Content-Length").and_then(|len| len.parse().ok()).unwrap_or(0)];
        connection.read_exact(&mut body)?;
        self.requests.fetch_add(1, Ordering::SeqCst);
        let under_way = self.under_way.fetch_add(1, Ordering::SeqCst) + 1;
        self.most_under_way.fetch_max(under_way, Ordering::SeqCst);
        thread::sleep(self.latency);
        self.under_way.fetch_sub(1, Ordering::SeqCst);
        let queue = match head.split(' ').next() {
            Some("GET") => Some(&self.faults),
            Some("PUT") => Some(&self.of_writes),
            _ => None,
        };
        let fault = queue.and_then(|queue| queue.lock().expect("nobody panics with it").pop_front());
        let answer = match fault {
            Some(Fault::Unavailable) => {
                status("503 Service Unavailable", "", b"<Error><Code>SlowDown</Code></Error>")
            }
            Some(Fault::Forbidden) => {
                status("403 Forbidden", "", b"<Error><Code>SignatureDoesNotMatch</Code></Error>")
            }
            Some(Fault::Silent) => {
                // Until the client has had enough.
                let _ = connection.read(&mut [0]);
                return Ok(());
            }
            _ => match &self.answers {
                Answers::Files(dir) => {
                    self.file(dir, &head).unwrap_or_else(|_| status("404 Not Found", "", b""))
                }
                Answers::Of(other) => passed_on(*other, &head, &body)?,
            },
        };
        let half = answer.len() / 2;
        match fault {
            Some(Fault::Cut) => connection.write_all(&answer[..half])?,
            Some(Fault::Halting) => {
                connection.write_all(&answer[..half])?;
                thread::sleep(Duration::from_millis(300));
                connection.write_all(&answer[half..])?;
            }
            _ => connection.write_all(&answer)?,
        }
        connection.shutdown(Shutdown::Write)
    }

    fn file(&self, dir: &Path, head: &str) -> io::Result<Vec<u8>> {
        let path = dir.join(head.split(' ').nth(1).unwrap_or("/").trim_start_matches('/'));
        let file = File::open(&path)?;
        let metadata = file.metadata()?;
        let (len, tag) = (metadata.len(), self.tag(&path, &metadata)?);
        if header(head, "If-Match").is_some_and(|wanted| wanted != tag) {
            return Ok(status("412 Precondition Failed", "", b""));
        }
        let date = "Last-Modified: Mon, 01 Jan 2024 00:00:00 GMT";
        let headers = format!("ETag: {tag}\r\n{date}\r\nAccept-Ranges: bytes\r\n");
        if head.starts_with("HEAD ") {
            let head =
                format!("HTTP/1.1 200 OK\r\nContent-Length: {len}\r\nConnection: close\r\n{headers}\r\n");
            return Ok(head.into());
        }
        let range = header(head, "Range").and_then(|range| range.strip_prefix("bytes=")?.split_once('-'));
        let Some((first, last)) = range else { return Ok(status("200 OK", &headers, &fs::read(path)?)) };
        let [first, last] = [first, last].map(|text| text.parse::<u64>().expect("a bounded range"));
        let last = last.min(len - 1);
        let mut bytes = vec![0; (last + 1 - first) as usize];
        file.read_exact_at(&mut bytes, first)?;
        let range = format!("Content-Range: bytes {first}-{last}/{len}\r\n");
        Ok(status("206 Partial Content", &format!("{headers}{range}"), &bytes))
    }

    /// An entity tag of a file's content. Of one that was changed just now it is made again each time,
    /// since a file's time may be that of its next change, too.
    fn tag(&self, path: &Path, metadata: &Metadata) -> io::Result<String> {
        let modified = metadata.modified()?;
        let settled = modified.elapsed().is_ok_and(|age| age > Duration::from_secs(1));
        let tags = || self.tags.lock().expect("nobody panics with it");
        let key = (path.to_path_buf(), modified);
        if let Some(tag) = tags().get(&key).filter(|_| settled) {
            return Ok(tag.clone());
        }
        let mut hash = DefaultHasher::new();
        fs::read(path)?.hash(&mut hash);
        let tag = format!("\"{:016x}\"", hash.finish());
        if settled {
            tags().insert(key, tag.clone());
        }
        Ok(tag)
    }
}

/// The request's line and headers.
fn head_of(connection: &mut TcpStream) -> io::Result<String> {
    let (mut head, mut byte) = (Vec::new(), [0]);
    while !head.ends_with(b"\r\n\r\n") {
        connection.read_exact(&mut byte)?;
        head.push(byte[0]);
    }
    Ok(String::from_utf8_lossy(&head).into_owned())
}

fn header<'a>(head: &'a str, name: &str) -> Option<&'a str> {
    let lines = head.lines().filter_map(|line| line.split_once(": "));
    lines.filter(|(key, _)| key.eq_ignore_ascii_case(name)).map(|(_, value)| value).next()
}

fn status(status: &str, headers: &str, body: &[u8]) -> Vec<u8> {
    let len = body.len();
    let head = format!("HTTP/1.1 {status}\r\nContent-Length: {len}\r\nConnection: close\r\n{headers}\r\n");
    [head.as_bytes(), body].concat()
}

fn passed_on(other: SocketAddr, head: &str, body: &[u8]) -> io::Result<Vec<u8>> {
    let mut upstream = TcpStream::connect(other)?;
    let head = head.trim_end_matches("\r\n");
    upstream.write_all(&[format!("{head}\r\nConnection: close\r\n\r\n").as_bytes(), body].concat())?;
    let mut answer = Vec::new();
    upstream.read_to_end(&mut answer)?;
    Ok(answer)
}
