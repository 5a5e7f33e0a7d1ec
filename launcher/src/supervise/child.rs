//! Starting a process that cannot outlive us.
//!
//! The kernel sends the child SIGKILL when the thread that started it ends (`PR_SET_PDEATHSIG`), so even
//! `kill -9` of the launcher leaves no orphan. Children are therefore started on the main thread only. Each
//! child leads a process group of its own: a Ctrl-C of the terminal reaches the launcher alone, and killing
//! the group ends what the child started, too.
//!
//! Children ignore what a launcher answers (`signals`): a scheduler that stops a launch by signalling all its
//! processes at once must not take from the launcher the workers that are to write a checkpoint. They are
//! ended with SIGKILL.
//!
//! This is the launcher's only file with `unsafe` code.

use std::{io, path::PathBuf, process::Stdio};

use nix::{
    sys::{prctl, signal},
    unistd::{Pid, getppid},
};
use tokio::process::{Child, Command};

use super::signals;
use crate::exit::{CliError, Exit};

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
pub struct ChildStreams {
    /// Standard input.
    pub stdin: Stdio,
    /// Standard output.
    pub stdout: Stdio,
    /// Standard error.
    pub stderr: Stdio,
}

/// Starts `program` in a process group of its own, with the signals ignored that its launcher answers; it is
/// killed when the calling thread ends.
pub fn spawn(program: &Program, streams: ChildStreams) -> io::Result<Child> {
    let mut command = Command::new(&program.path);
    command
        .args(&program.args)
        .envs(program.env.iter().map(|(name, value)| (name, value)))
        .stdin(streams.stdin)
        .stdout(streams.stdout)
        .stderr(streams.stderr)
        .process_group(0);
    let parent = Pid::this();
    // SAFETY: the closure runs between fork and exec, where only async-signal-safe calls are allowed: it
    // makes the system calls prctl, getppid and sigaction, installs no handler, and allocates nothing.
    unsafe {
        command.pre_exec(move || {
            prctl::set_pdeathsig(signal::Signal::SIGKILL)?;
            // The parent may have died before the line above took effect; then the kernel would not kill us.
            if getppid() != parent {
                return Err(io::Error::from_raw_os_error(nix::libc::ESRCH));
            }
            for answered in signals::ANSWERED {
                signal::signal(answered, signal::SigHandler::SigIgn)?;
            }
            Ok(())
        });
    }
    command.spawn()
}

/// From now on a write beyond the largest file that is allowed (`ulimit -f`) is an error, as on a full disk,
/// and ends no process; in children neither.
pub fn survive_file_limits() {
    // SAFETY: no handler is installed. It fails for signals that there are not.
    let _ = unsafe { signal::signal(signal::Signal::SIGXFSZ, signal::SigHandler::SigIgn) };
}

/// Kills the process group that `child` leads; nothing if it has ended already.
pub fn kill_group(child: &Child) {
    // The group may be gone between its leader's end and our noticing it: not an error.
    kill_leftovers(child.id());
}

/// Kills what is left of the process group that a child which has just been waited for led.
///
/// The kernel does not give a group's number to a new process while the group has members, so this reaches
/// what the child started or nothing: between the wait and this call, process numbers would have to be used
/// up once around.
pub fn kill_leftovers(leader: Option<u32>) {
    let Some(id) = leader.and_then(|id| i32::try_from(id).ok()) else { return };
    // Nothing is left, as a rule.
    let _ = signal::killpg(Pid::from_raw(id), signal::Signal::SIGKILL);
}

/// The file of this program, which its children run.
pub fn this_program() -> Result<PathBuf, CliError> {
    std::env::current_exe()
        .map_err(|error| CliError::new(Exit::Internal, format!("cannot find this program: {error}")))
}

#[cfg(test)]
mod tests;
