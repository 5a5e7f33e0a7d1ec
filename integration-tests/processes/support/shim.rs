//! Faults that a test cannot ask a machine for, between `cox` and its C library: see `shim.c`.

use std::{
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
    process::Command,
    sync::OnceLock,
};

/// What the commands that were given it see. Two numbers: see `shim.c`.
pub struct Shim {
    file: std::fs::File,
    path: PathBuf,
    library: &'static Path,
}

impl Shim {
    /// Kept in this directory. Nothing, and a line that says so, where there is no C compiler.
    pub fn new(dir: &Path) -> Option<Self> {
        static BUILT: OnceLock<Option<PathBuf>> = OnceLock::new();
        let library = BUILT.get_or_init(build).as_deref()?;
        let path = dir.join("shim");
        std::fs::write(&path, [0; 16]).expect("a file");
        let file = std::fs::File::options().write(true).open(&path).expect("a file");
        Some(Self { file, path, library })
    }

    /// Has a command see it; handles of files whose path has `below` in it are those that can go stale.
    pub fn before(&self, command: &mut Command, below: &str) {
        command.env("LD_PRELOAD", self.library).env("COX_TEST_SHIM", &self.path).env("COX_TEST_STALE", below);
    }

    /// The wall clock is wrong by so many seconds from now on.
    pub fn wall_clock_is_wrong_by(&self, seconds: i64) {
        self.file.write_all_at(&seconds.to_le_bytes(), 0).expect("a file");
    }

    /// The server of those files does not answer, until it is said how often handles have gone stale.
    pub fn server_is_away(&self) {
        self.handles_go_stale(-1);
    }

    /// Handles that were opened before go stale, for the `times`-th time.
    pub fn handles_go_stale(&self, times: i64) {
        self.file.write_all_at(&times.to_le_bytes(), 8).expect("a file");
    }
}

fn build() -> Option<PathBuf> {
    let library = std::env::temp_dir().join(format!("coxswain-shim-{}.so", std::process::id()));
    let source = concat!(env!("CARGO_MANIFEST_DIR"), "/../integration-tests/processes/support/shim.c");
    let mut compiler = Command::new("cc");
    compiler.args(["-shared", "-fPIC", "-O1", "-o"]).arg(&library).args([source, "-ldl"]);
    let built = compiler.output();
    if built.as_ref().is_ok_and(|built| built.status.success()) {
        return Some(library);
    }
    println!("skipped: no C compiler that builds shim.c here: {built:?}");
    None
}
