//! Processes as Linux shows them, and the cores that they have.

use std::process::Command;

use super::Failure;

/// What a process has used: processor seconds, and MiB resident now.
pub struct Usage {
    pub cpu: f64,
    pub resident: f64,
}

/// What a process has used so far.
pub fn usage(process: u32) -> Result<Usage, Failure> {
    let stat = std::fs::read_to_string(format!("/proc/{process}/stat"))?;
    let fields: Vec<&str> = stat.rsplit(") ").next().ok_or("no stat")?.split_whitespace().collect();
    // Fields 14 and 15 of proc(5), in ticks of a hundredth of a second.
    let ticks = fields[11].parse::<f64>()? + fields[12].parse::<f64>()?;
    let status = std::fs::read_to_string(format!("/proc/{process}/status"))?;
    let line = status.lines().find(|line| line.starts_with("VmRSS:")).ok_or("no VmRSS")?;
    let kib: f64 = line.split_whitespace().nth(1).ok_or("no number")?.parse()?;
    Ok(Usage { cpu: ticks / 100.0, resident: kib / 1024.0 })
}

/// Gives a process, with all of its threads, the cores that are `its`.
pub fn pin(process: u32, its: impl Fn(usize) -> bool) -> Result<(), Failure> {
    let all = std::thread::available_parallelism()?.get();
    let cores: Vec<_> = (0..all).filter(|core| its(*core)).map(|core| core.to_string()).collect();
    let mut command = Command::new("taskset");
    let pinned = command.args(["--all-tasks", "--cpu-list", "--pid", &cores.join(","), &process.to_string()]);
    let pinned = pinned.output().map_err(|error| format!("taskset, of util-linux: {error}"))?;
    match pinned.status.success() {
        true => Ok(()),
        false => Err(String::from_utf8_lossy(&pinned.stderr).into_owned().into()),
    }
}
