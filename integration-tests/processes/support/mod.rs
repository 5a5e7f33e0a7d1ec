//! Real `cox` processes for tests: started, watched line by line, ended with the test.

use std::{
    io::{BufRead, BufReader, Read},
    net::TcpListener,
    path::{Path, PathBuf},
    process::{Child, Command, ExitStatus, Stdio},
    sync::{
        atomic::{AtomicU32, Ordering},
        mpsc,
    },
    thread,
    time::{Duration, Instant},
};

use nix::sys::signal::Signal;
use serde_json::Value;

pub mod cgroups;
pub mod flood;
pub mod killed;
pub mod machines;
pub mod moto;
pub mod processes;
pub mod proxy;
#[allow(dead_code, reason = "more of it is for the tests that it belongs to")]
#[path = "../../../worker/remote/tests/suite/server.rs"]
pub mod server;
pub mod shim;
pub mod tiny;

/// Longer than anything here takes on a loaded machine; reached only when something hangs.
const PATIENCE: Duration = Duration::from_secs(300);

/// The repository's root: relative paths in configs are taken from it.
pub fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the launcher lies in the workspace").to_path_buf()
}

/// A `cox` command in the repository's root.
pub fn cox(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_cox"));
    command.args(arguments).current_dir(root()).stdin(Stdio::null());
    // What runs here teach about memory is not for the user's own plans.
    command.env("XDG_CACHE_HOME", std::env::temp_dir().join("coxswain-tests"));
    // What ranks do is held against the ledger of each run.
    command.env("COX_WITNESS", "1");
    command
}

/// A running `cox`, its output read line by line as it comes.
pub struct CoxProcess {
    child: Child,
    lines: mpsc::Receiver<String>,
    seen: Vec<String>,
}

impl CoxProcess {
    /// Starts `cox` with both streams captured.
    pub fn start(arguments: &[&str]) -> Self {
        Self::of(cox(arguments))
    }

    /// Starts `cox` with more in its environment, which workers inherit.
    pub fn start_with(arguments: &[&str], environment: &[(&str, &str)]) -> Self {
        let mut command = cox(arguments);
        command.envs(environment.iter().copied());
        Self::of(command)
    }

    /// Starts a `cox` command with both streams captured.
    pub fn of(mut command: Command) -> Self {
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("cox was built");
        let (tell, lines) = mpsc::channel();
        let out = child.stdout.take().expect("captured");
        let err = child.stderr.take().expect("captured");
        forward(out, tell.clone());
        forward(err, tell);
        Self { child, lines, seen: Vec::new() }
    }

    /// The next line with `text` in it. Other lines do not prolong the wait.
    pub fn wait_for(&mut self, text: &str) -> String {
        let give_up = Instant::now() + PATIENCE;
        loop {
            match self.lines.recv_timeout(give_up.saturating_duration_since(Instant::now())) {
                Ok(line) => {
                    self.seen.push(line.clone());
                    if line.contains(text) {
                        return line;
                    }
                }
                Err(_) => panic!("no line with {text:?} came:\n{}", self.seen.join("\n")),
            }
        }
    }

    /// Fails with everything printed if it has ended.
    pub fn assert_alive(&mut self) {
        if let Some(status) = self.child.try_wait().expect("a child can be asked") {
            self.seen.extend(self.lines.iter());
            panic!("it ended with {status}:\n{}", self.seen.join("\n"));
        }
    }

    /// Waits for the end; returns the status and everything that was printed.
    pub fn finish(mut self) -> (ExitStatus, String) {
        while let Ok(line) = self.lines.recv_timeout(PATIENCE) {
            self.seen.push(line);
        }
        let status = self.child.wait().expect("a child can be waited for");
        (status, std::mem::take(&mut self.seen).join("\n"))
    }

    /// The machine of the launcher is gone, and all its processes.
    pub fn lose(self) {
        let processes = processes::children(self.pid());
        processes::signal(self.pid() as i32, Signal::SIGKILL);
        self.finish();
        processes::wait_until_gone(&processes);
    }

    /// The launcher's process id.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }
}

impl Drop for CoxProcess {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn forward(stream: impl Read + Send + 'static, tell: mpsc::Sender<String>) {
    thread::spawn(move || {
        for line in BufReader::new(stream).lines().map_while(Result::ok) {
            if tell.send(line).is_err() {
                return;
            }
        }
    });
}

/// Runs to the end and returns `summary.json`.
pub fn train(output: &Path, overrides: &[&str]) -> Value {
    let output_dir = format!("run.output_dir={}", output.display());
    let mut arguments = vec!["run", "configs/quickstart.yaml", &output_dir];
    arguments.extend(overrides);
    let (status, printed) = CoxProcess::start(&arguments).finish();
    assert!(status.success(), "{printed}");
    read_json(&output.join("summary.json"))
}

/// A JSON file.
pub fn read_json(path: &Path) -> Value {
    let text = std::fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    serde_json::from_str(&text).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// The losses of a summary, as bits.
pub fn losses(summary: &Value) -> Vec<u64> {
    let losses = summary["losses"].as_array().expect("an array");
    losses.iter().map(|loss| loss.as_f64().expect("a number").to_bits()).collect()
}

/// An address that was free a moment ago, on a port that the kernel gives to no outgoing connection: one of
/// those could keep a listener away for a minute after it has closed.
pub fn free_endpoint() -> String {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let first = std::process::id().wrapping_mul(97);
    let port = || 10_000 + (first.wrapping_add(NEXT.fetch_add(1, Ordering::Relaxed)) % 20_000) as u16;
    let mut ports = std::iter::repeat_with(port).take(1_000);
    let free = ports.find(|port| TcpListener::bind(("127.0.0.1", *port)).is_ok());
    format!("127.0.0.1:{}", free.expect("one of a thousand ports is free"))
}
