//! Starting a process that cannot outlive us.
//!
//! The kernel sends the child SIGKILL when the thread that started it ends (`PR_SET_PDEATHSIG`), so even `kill -9` of the launcher
//! leaves no orphan. Children are therefore started on the main thread only. Each child leads a process group of its own: a
//! Ctrl-C of the terminal reaches the launcher alone, and a signal sent to the group reaches whatever the child started.
//!
//! This is the launcher's only file with `unsafe` code.

use std::{io, process::Stdio};

use nix::{
    sys::{prctl, signal},
    unistd::{Pid, getppid},
};
use tokio::process::{Child, Command};

/// What to start.
#[derive(Debug)]
pub struct Program {
    /// Executable.
    pub path: std::path::PathBuf,
    /// Arguments.
    pub args: Vec<String>,
    /// Variables on top of our own.
    pub env: Vec<(&'static str, String)>,
}

/// The child's three standard streams.
#[derive(Debug)]
pub struct Streams {
    /// Standard input.
    pub stdin: Stdio,
    /// Standard output.
    pub stdout: Stdio,
    /// Standard error.
    pub stderr: Stdio,
}

/// Starts `program` in a process group of its own; it is killed when the calling thread ends.
pub fn spawn(program: &Program, streams: Streams) -> io::Result<Child> {
    let mut command = Command::new(&program.path);
    command
        .args(&program.args)
        .envs(program.env.iter().map(|(name, value)| (name, value)))
        .stdin(streams.stdin)
        .stdout(streams.stdout)
        .stderr(streams.stderr)
        .process_group(0);
    let parent = Pid::this();
    // SAFETY: the closure runs between fork and exec, where only async-signal-safe calls are allowed: it makes the system calls
    // prctl and getppid, and allocates nothing.
    unsafe {
        command.pre_exec(move || {
            prctl::set_pdeathsig(signal::Signal::SIGKILL)?;
            // The parent may have died before the line above took effect; then nobody would kill us.
            if getppid() != parent {
                return Err(io::Error::from_raw_os_error(nix::libc::ESRCH));
            }
            Ok(())
        });
    }
    command.spawn()
}

/// Sends `number` to the process group that `child` leads; nothing if it has ended already.
pub fn signal_group(child: &Child, number: i32) {
    let Some(id) = child.id().and_then(|id| i32::try_from(id).ok()) else { return };
    let Ok(signal) = signal::Signal::try_from(number) else { return };
    // The group may be gone between its leader's end and our noticing it: not an error.
    let _ = signal::killpg(Pid::from_raw(id), signal);
}

/// Kills what is left of the process group that a child which has just been waited for led.
///
/// The kernel does not give a group's number to a new process while the group has members, so this reaches what the child started or
/// nothing: between the wait and this call, process numbers would have to be used up once around.
pub fn kill_leftovers(leader: Option<u32>) {
    let Some(id) = leader.and_then(|id| i32::try_from(id).ok()) else { return };
    // Nothing is left, as a rule.
    let _ = signal::killpg(Pid::from_raw(id), signal::Signal::SIGKILL);
}

#[cfg(test)]
mod tests;
