//! Control groups with a limit, of either version, where this process may make them.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
    sync::atomic::{AtomicU32, Ordering::Relaxed},
};

/// A group for one controller. Removed with this value, when its processes have ended.
pub struct Group {
    dir: PathBuf,
    /// Whether it is of the second version.
    unified: bool,
}

impl Group {
    /// Nothing, and a line that says so, where no such group can be made.
    pub fn of(controller: &str) -> Option<Self> {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let name = format!("coxswain-test-{}-{}", std::process::id(), NEXT.fetch_add(1, Relaxed));
        let root = Path::new("/sys/fs/cgroup");
        let unified = root.join("cgroup.controllers").exists();
        let dir = if unified { root.join(name) } else { root.join(controller).join(name) };
        if unified {
            // Already so where a service manager runs.
            let _ = fs::write(root.join("cgroup.subtree_control"), format!("+{controller}"));
        }
        let limit = if controller == "pids" { "pids.max" } else { limit(unified) };
        let made = fs::create_dir(&dir).is_ok();
        let group = Self { dir, unified };
        if made && group.dir.join(limit).exists() {
            return Some(group);
        }
        println!("skipped: no control group for {controller} can be made here");
        None
    }

    /// A command whose processes are in the group from the beginning.
    pub fn holds(&self, command: &Command) -> Command {
        let mut inside = Command::new("sh");
        inside.args(["-c", "echo $$ > \"$0\" && exec \"$@\""]).arg(self.dir.join("cgroup.procs"));
        inside.arg(command.get_program()).args(command.get_args()).stdin(std::process::Stdio::null());
        inside.envs(command.get_envs().filter_map(|(name, value)| Some((name, value?))));
        inside.current_dir(command.get_current_dir().unwrap_or(&super::root()));
        inside
    }

    /// Bytes that its processes hold, mapped files included, without files that the kernel keeps for them: it
    /// lets those go before it kills.
    pub fn memory(&self) -> u64 {
        let held = if self.unified { ["anon", "file_mapped"] } else { ["total_rss", "total_mapped_file"] };
        let text = fs::read_to_string(self.dir.join("memory.stat")).expect("the kernel counts");
        let figures = text.lines().filter_map(|line| line.split_once(' '));
        let mine = figures.filter(|(name, _)| held.contains(name));
        mine.map(|(_, bytes)| bytes.parse::<u64>().expect("a number of bytes")).sum()
    }

    /// Bounds what its processes may hold; nothing lifts the bound.
    pub fn bound_memory(&self, bytes: Option<u64>) {
        let none = if self.unified { "max" } else { "-1" };
        self.write(limit(self.unified), &bytes.map_or(none.to_owned(), |bytes| bytes.to_string()));
    }

    /// Bounds its processes and their threads.
    pub fn bound_threads(&self, count: u64) {
        self.write("pids.max", &count.to_string());
    }

    /// Processes and threads in it.
    pub fn threads(&self) -> u64 {
        self.read("pids.current")
    }

    fn read(&self, file: &str) -> u64 {
        let text = fs::read_to_string(self.dir.join(file)).unwrap_or_else(|error| panic!("{file}: {error}"));
        text.trim().parse().unwrap_or_else(|error| panic!("{file} {text:?}: {error}"))
    }

    fn write(&self, file: &str, value: &str) {
        fs::write(self.dir.join(file), value).unwrap_or_else(|error| panic!("{file} {value}: {error}"));
    }
}

fn limit(unified: bool) -> &'static str {
    if unified { "memory.max" } else { "memory.limit_in_bytes" }
}

impl Drop for Group {
    fn drop(&mut self) {
        // One that still holds a process stays until somebody removes it.
        let _ = fs::remove_dir(&self.dir);
    }
}
