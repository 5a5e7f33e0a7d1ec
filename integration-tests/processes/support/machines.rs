//! Two machines with a network between them that can be made bad: network namespaces of Linux, and a router
//! of our own that carries the packets. Needs the rights of root, and Python 3.

use std::{
    io::{BufRead, BufReader, Write},
    process::{Child, ChildStdin, ChildStdout, Command, Stdio},
};

/// Two machines and what is between them. They are gone with this value.
pub struct Machines {
    holders: [Child; 2],
    router: Child,
    orders: ChildStdin,
    answers: BufReader<ChildStdout>,
}

/// Keeps a namespace until its standard input ends, which it does with the test.
const HOLD: &str = "ip link set lo up && mount --make-rprivate / && echo ok && exec cat";

impl Machines {
    /// Nothing, and a line that says so, where such machines cannot be had.
    pub fn start() -> Option<Self> {
        let started = Self::try_start();
        if started.is_none() {
            println!(
                "skipped: no network namespaces here (they take root, ip, nsenter, Python 3 and /dev/net/tun)"
            );
        }
        started
    }

    fn try_start() -> Option<Self> {
        let hold = || spawn("unshare", &["--net", "--mount", "sh", "-c", HOLD]);
        let holders = [hold()?, hold()?].map(|(child, stdin, _)| {
            // The end of this process closes it.
            std::mem::forget(stdin);
            child
        });
        let script = concat!(env!("CARGO_MANIFEST_DIR"), "/../integration-tests/processes/support/router.py");
        let [first, second] = holders.each_ref().map(|holder| holder.id().to_string());
        let (router, orders, answers) = spawn("unshare", &["--net", "python3", script, &first, &second])?;
        Some(Self { holders, router, orders, answers })
    }

    /// A command on one of the machines, with the same environment and directory.
    pub fn on(&self, machine: usize, command: &Command) -> Command {
        let mut inside = Command::new("nsenter");
        inside.args(["--net", "--mount", "--target", &self.holders[machine].id().to_string(), "--"]);
        // One that enters a machine begins at its root.
        inside
            .args(["sh", "-c", "cd \"$0\" && exec \"$@\""])
            .arg(command.get_current_dir().unwrap_or(&super::root()));
        inside.arg(command.get_program()).args(command.get_args()).stdin(Stdio::null());
        inside.envs(command.get_envs().filter_map(|(name, value)| Some((name, value?))));
        inside
    }

    /// Runs a line of a shell on one of the machines.
    pub fn shell(&self, machine: usize, line: &str) {
        let mut shell = Command::new("sh");
        let status = self.on(machine, shell.args(["-c", line])).status().expect("nsenter was there");
        assert!(status.success(), "{line}: {status}");
    }

    /// What the network does from now on, as `router.py` reads it.
    pub fn weather(&mut self, weather: &str) {
        writeln!(self.orders, "{weather}").expect("the router lives");
        let mut answer = String::new();
        self.answers.read_line(&mut answer).expect("the router lives");
        assert_eq!(answer, "ok\n", "{weather}");
    }
}

impl Drop for Machines {
    fn drop(&mut self) {
        for process in self.holders.iter_mut().chain([&mut self.router]) {
            let _ = process.kill();
            let _ = process.wait();
        }
    }
}

/// Starts a process that says `ok` when it is ready.
fn spawn(program: &str, arguments: &[&str]) -> Option<(Child, ChildStdin, BufReader<ChildStdout>)> {
    let mut command = Command::new(program);
    command.args(arguments).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
    let mut child = command.spawn().ok()?;
    let (stdin, mut stdout) = (child.stdin.take()?, BufReader::new(child.stdout.take()?));
    let mut line = String::new();
    let ready = stdout.read_line(&mut line).is_ok() && line == "ok\n";
    if !ready {
        let _ = child.kill();
        let _ = child.wait();
        return None;
    }
    Some((child, stdin, stdout))
}
