//! PyTorch in a process of its own, asked for one operation at a time.

use std::{
    io::{BufRead, BufReader, Write},
    process::{Child, ChildStdin, ChildStdout, Command, Stdio},
    time::Duration,
};

use crate::Clock;

/// The running peer. It ends when its input closes.
pub struct Peer {
    process: Child,
    input: Option<ChildStdin>,
    output: BufReader<ChildStdout>,
}

impl Peer {
    /// Starts `torch_peer.py` and waits until it is ready.
    pub fn start(python: &str, threads: usize, clock: Clock) -> Self {
        let script = concat!(env!("CARGO_MANIFEST_DIR"), "/benches/kernels/torch_peer.py");
        let mut process = Command::new(python)
            .args([script, &threads.to_string(), if clock == Clock::Cpu { "cpu" } else { "wall" }])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap_or_else(|error| panic!("cannot run {python} {script}: {error}"));
        let input = process.stdin.take();
        let output = BufReader::new(process.stdout.take().expect("stdout is piped"));
        let mut peer = Self { process, input, output };
        assert_eq!(peer.line(), "ready", "the peer did not start");
        peer
    }

    /// Times of one turn of an operation, in milliseconds.
    pub fn run(&mut self, name: &str, round: Duration) -> Vec<f64> {
        let input = self.input.as_mut().expect("open until the peer is dropped");
        writeln!(input, "{name}\t{}", round.as_secs_f64()).expect("the peer reads");
        input.flush().expect("the peer reads");
        self.line().split(' ').map(|time| time.parse().expect("the peer answers with numbers")).collect()
    }

    fn line(&mut self) -> String {
        let mut line = String::new();
        self.output.read_line(&mut line).expect("the peer answers");
        line.trim().to_owned()
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        drop(self.input.take());
        let _ = self.process.wait();
    }
}
