//! A table, runs on it as real `cox-toy` processes, and what they leave.

use std::{
    fs::File,
    io::{BufRead, BufReader, Read, Write},
    net::{TcpListener, TcpStream},
    path::{Path, PathBuf},
    process::{Child, Command, ExitStatus, Stdio},
    sync::{Arc, mpsc},
    thread,
    time::Duration,
};

use parquet::{
    data_type::DoubleType, file::properties::WriterProperties, file::writer::SerializedFileWriter,
    schema::parser::parse_message_type,
};
use serde_json::Value;

use crate::processes;

/// Longer than anything here takes on a loaded machine; reached only when something hangs.
const PATIENCE: Duration = Duration::from_secs(300);

/// The repository's root: relative paths in run files are taken from it.
fn root() -> PathBuf {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    here.ancestors().nth(2).expect("the crate lies two folders deep").to_path_buf()
}

/// A table and a run on it, in a directory of their own.
pub struct Toy {
    dir: tempfile::TempDir,
}

impl Toy {
    /// With so many rows of `y = sin(a) + b c`.
    pub fn new(rows: usize) -> Self {
        let dir = tempfile::tempdir().expect("a directory");
        let wave = |row: usize, step: f64| (row as f64 * step).sin();
        let columns: [Vec<f64>; 3] =
            [0.7, 1.3, 2.1].map(|step| (0..rows).map(|row| wave(row, step)).collect());
        let [a, b, c] = &columns;
        let y = (0..rows).map(|row| a[row].sin() + b[row] * c[row]).collect();
        write_table(&dir.path().join("table.parquet"), &[columns.as_slice(), &[y]].concat());
        Self { dir }
    }

    /// Rows of a wave, and one whose inputs are so large that a network cannot take them: finite, but not
    /// their products.
    pub fn with_huge_row(rows: usize, row: usize, value: f64) -> Self {
        let toy = Self::new(rows);
        let wave = |row: usize, step: f64| (row as f64 * step).sin();
        let mut columns: Vec<Vec<f64>> =
            [0.7, 1.3, 2.1, 0.9].map(|step| (0..rows).map(|row| wave(row, step)).collect()).into();
        columns[..3].iter_mut().for_each(|column| column[row] = value);
        write_table(&toy.path("table.parquet"), &columns);
        toy
    }

    /// With so many rows none of which can be learned from.
    pub fn without_numbers(rows: usize) -> Self {
        let toy = Self::new(rows);
        write_table(&toy.path("table.parquet"), &vec![vec![f64::NAN; rows]; 4]);
        toy
    }

    /// A table of which every third row has no number to learn.
    pub fn with_gaps(rows: usize) -> Self {
        let toy = Self::new(rows);
        let value = |row: usize| if row % 3 == 1 { f64::NAN } else { row as f64 / rows as f64 };
        write_table(&toy.path("table.parquet"), &vec![(0..rows).map(value).collect(); 4]);
        toy
    }

    /// A path below its directory.
    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// A `cox-toy` command in the repository's root. What its run teaches about memory stays in this
    /// directory.
    pub fn cox(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_cox-toy"));
        command.args(arguments).current_dir(root()).stdin(Stdio::null());
        command.env("XDG_CACHE_HOME", self.path("records")).env("COX_WITNESS", "1");
        command
    }

    /// `cox-toy run` of the table into the directory `name`.
    pub fn command(&self, name: &str, overrides: &[&str]) -> Command {
        let (table, output) = (self.path("table.parquet"), self.path(name));
        let mut command = self.cox(&["run", "integration-tests/toy/table.yaml"]);
        command.arg(format!("data.path={}", table.display()));
        command.arg(format!("run.output_dir={}", output.display())).args(overrides);
        command.env("COX_TEST_HOLD", self.path("hold"));
        command
    }

    /// `cox-toy check` of the same.
    pub fn check(&self, name: &str, overrides: &[&str]) -> Command {
        let (table, output) = (self.path("table.parquet"), self.path(name));
        let mut command = self.cox(&["check", "integration-tests/toy/table.yaml"]);
        command.arg(format!("data.path={}", table.display()));
        command.arg(format!("run.output_dir={}", output.display())).args(overrides);
        command
    }

    /// `cox-toy plan` of the table.
    pub fn plan(&self, flags: &[&str]) -> String {
        let mut command = self.cox(&["plan", "integration-tests/toy/table.yaml"]);
        command.arg(format!("data.path={}", self.path("table.parquet").display())).args(flags);
        let answer = command.output().expect("cox-toy was built");
        let told = String::from_utf8_lossy(&answer.stdout).into_owned();
        assert!(answer.status.success(), "{told}\n{}", String::from_utf8_lossy(&answer.stderr));
        told
    }

    /// Starts it.
    pub fn start(&self, name: &str, overrides: &[&str]) -> LaunchProcess {
        LaunchProcess::of(self.command(name, overrides))
    }

    /// Starts such a command.
    pub fn start_of(&self, command: Command) -> LaunchProcess {
        LaunchProcess::of(command)
    }

    /// Runs it to its end; returns `summary.json` and what was printed.
    pub fn train(&self, name: &str, overrides: &[&str]) -> (Value, String) {
        let (status, printed) = self.start(name, overrides).finish();
        assert!(status.success(), "{status}\n{printed}");
        (read_json(&self.path(name).join("summary.json")), printed)
    }

    /// What a run has learned.
    pub fn network(&self, name: &str) -> Vec<u8> {
        let path = self.path(name).join("network.safetensors");
        std::fs::read(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
    }

    /// Makes a worker of the next launch stand still in `phase` from `step` on.
    pub fn hold(&self, rank: u32, phase: &str, step: u64) -> PathBuf {
        let directory = self.path("hold");
        std::fs::create_dir_all(&directory).expect("a directory");
        let order = directory.join(format!("{rank}-{phase}"));
        std::fs::write(&order, step.to_string()).expect("a file");
        order.with_extension("held")
    }

    /// What a run's records say so far, and its ranks of them.
    pub fn audit(&self, name: &str) -> (ExitStatus, Value) {
        let (mut command, witness) = (self.cox(&["audit", "--json"]), self.path(name).join("witness"));
        command.arg(self.path(name));
        // Before the first step there is none.
        if witness.exists() {
            command.arg("--against").arg(witness);
        }
        let answer = command.output().expect("cox-toy was built");
        let told = String::from_utf8_lossy(&answer.stdout);
        let audit = serde_json::from_str(&told).unwrap_or_else(|error| panic!("{error}: {told}"));
        (answer.status, audit)
    }

    /// The records of a run: every sample of every step once. Returns them.
    pub fn assert_audited(&self, name: &str, steps: u64) -> Value {
        let (status, audit) = self.audit(name);
        assert!(status.success(), "{audit:#}");
        assert_eq!((&audit["missing"], &audit["duplicate"]), (&0.into(), &0.into()), "{audit:#}");
        assert_eq!(audit["committed_steps"], steps, "{audit:#}");
        assert_eq!(audit["against"]["differing"], 0, "{audit:#}");
        audit
    }
}

/// Columns `a`, `b`, `c` and `y`.
fn write_table(path: &Path, columns: &[Vec<f64>]) {
    let fields = ["a", "b", "c", "y"].map(|name| format!("required double {name};"));
    let schema = parse_message_type(&format!("message table {{ {} }}", fields.join(" "))).expect("a schema");
    let (file, properties) = (File::create(path).expect("a file"), WriterProperties::default());
    let mut writer =
        SerializedFileWriter::new(file, Arc::new(schema), Arc::new(properties)).expect("a writer");
    let mut group = writer.next_row_group().expect("a row group");
    for values in columns {
        let mut column = group.next_column().expect("a column").expect("as many as in the schema");
        column.typed::<DoubleType>().write_batch(values, None, None).expect("values");
        column.close().expect("the column's end");
    }
    group.close().expect("the row group's end");
    writer.close().expect("a footer");
}

/// Runs a command that is to be refused; returns its exit code and what it printed.
pub fn refused(mut command: Command) -> (Option<i32>, String) {
    let answer = command.output().expect("cox-toy was built");
    let printed = [answer.stdout, answer.stderr].concat();
    (answer.status.code(), String::from_utf8_lossy(&printed).into_owned())
}

/// A running launch, its output read line by line as it comes.
pub struct LaunchProcess {
    child: Child,
    lines: mpsc::Receiver<String>,
    seen: Vec<String>,
}

impl LaunchProcess {
    fn of(mut command: Command) -> Self {
        let captured = command.stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = captured.spawn().expect("cox-toy was built");
        let (tell, lines) = mpsc::channel();
        forward(child.stdout.take().expect("captured"), tell.clone());
        forward(child.stderr.take().expect("captured"), tell);
        Self { child, lines, seen: Vec::new() }
    }

    /// Waits until a worker stands still where it was told to.
    pub fn wait_until_held(&mut self, held: &Path) {
        processes::wait_for(&held.display().to_string(), || {
            if let Some(status) = self.child.try_wait().expect("a child can be asked") {
                panic!("it ended with {status}:\n{}", self.lines.try_iter().collect::<Vec<_>>().join("\n"));
            }
            held.exists().then_some(())
        });
    }

    /// Waits for the end; returns the status and everything that was printed.
    pub fn finish(mut self) -> (ExitStatus, String) {
        while let Ok(line) = self.lines.recv_timeout(PATIENCE) {
            self.seen.push(line);
        }
        let status = self.child.wait().expect("a child can be waited for");
        (status, std::mem::take(&mut self.seen).join("\n"))
    }

    /// The launcher's process id.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }
}

impl Drop for LaunchProcess {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn forward(stream: impl Read + Send + 'static, tell: mpsc::Sender<String>) {
    thread::spawn(move || {
        let lines = BufReader::new(stream).lines().map_while(Result::ok);
        lines.take_while(|line| tell.send(line.clone()).is_ok()).for_each(drop);
    });
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

/// An address that was free a moment ago, below the ports that the kernel gives to outgoing connections.
pub fn free_endpoint() -> String {
    let first = std::process::id().wrapping_mul(89);
    let ports = (0..1_000u32).map(|n| 10_000 + (first.wrapping_add(n) % 20_000) as u16);
    let free = ports.into_iter().find(|port| TcpListener::bind(("127.0.0.1", *port)).is_ok());
    format!("127.0.0.1:{}", free.expect("one of a thousand ports is free"))
}

/// What `GET` answers to one who shows the token of the run in `output`.
pub fn get(address: &str, path: &str, output: &Path) -> String {
    let token = std::fs::read_to_string(output.join("logs/token")).expect("the run's own token");
    let mut stream = TcpStream::connect(address).expect("the coordinator listens");
    let authorization = format!("Authorization: Bearer {}", token.trim());
    let head =
        format!("GET {path} HTTP/1.1\r\nHost: {address}\r\n{authorization}\r\nConnection: close\r\n\r\n");
    stream.write_all(head.as_bytes()).expect("sent");
    let mut answer = String::new();
    stream.read_to_string(&mut answer).expect("an answer");
    answer
}
