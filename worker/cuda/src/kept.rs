//! Compiled kernels, kept between processes: a first step compiles hundreds, and a worker that is started
//! again should not.
//!
//! cubecl knows a kernel again by its name, its settings and its arguments, not by what it computes: what was
//! compiled of a kernel that was edited since would run in its place. So every program has a directory of its
//! own, named by its bytes, as there is one for each compiler and each kind of GPU:
//!
//! ```text
//! kernels/sm_90-nvrtc-13.0-3f0a9c..    what one build of one program compiled for one kind of GPU
//! ```
//!
//! What a program that is no longer there has left is removed when a new one comes ([`MOST`]).
//!
//! Kernels may come compiled, as machine code that `worker/cuda/kernels.py` has made elsewhere for one
//! program and kinds of GPUs: `COX_KERNELS` names the folder. What fits is taken over before anything is
//! compiled; what was made for another program, GPU or driver is not, and a line says so.
//!
//! What it does not do: keep what the autotuner has measured. That names a kernel, and no bits of it.

use std::{
    fs::{self, File},
    io,
    path::{Path, PathBuf},
    sync::OnceLock,
    time::SystemTime,
};

use cubecl::config::{CubeClRuntimeConfig, RuntimeConfig, cache::CacheConfig};

use crate::libraries::Driver;
use coxswain_worker::device::Version;

/// Directories that stay, of the programs that compiled last.
const MOST: usize = 8;
/// Characters of a program's hash in a name.
const SHOWN: usize = 16;
/// Names the folder of kernels that came compiled.
const VARIABLE: &str = "COX_KERNELS";
/// Says in a folder of kernels for one GPU by which CUDA they were compiled, and how many.
const MADE: &str = "compiled";
/// Where cubecl 0.10 keeps its records below a directory.
const RECORDS: &str = "cuda";

/// What came compiled.
static CAME: OnceLock<String> = OnceLock::new();

/// Has cubecl keep compiled kernels, beside what the autotuner has measured. On a machine of several kinds of
/// GPUs, or where the program cannot be read, none are kept; a `cubecl.toml` that says otherwise is obeyed.
///
/// Before anything else asks cubecl: its configuration is read once.
pub fn keep(driver: &Driver, nvrtc: Version) {
    let mut config = CubeClRuntimeConfig::from_current_dir().override_from_env();
    if let (None, Some(capability)) = (&config.compilation.cache, driver.capability) {
        match hash(Path::new("/proc/self/exe")) {
            Ok(program) => {
                let dir = placed(driver, capability, nvrtc, &program);
                config.compilation.cache = Some(CacheConfig::File(dir));
            }
            Err(why) => {
                tracing::warn!(%why, "this program cannot be read, so the kernels that it compiles are not kept");
            }
        }
    }
    CubeClRuntimeConfig::set(config);
}

/// Where kernels of this process come from, in words.
pub fn told() -> String {
    CAME.get().cloned().unwrap_or_else(|| "compiled when they are first used".to_owned())
}

/// The directory of this program, with what came compiled; others' are bounded.
fn placed(driver: &Driver, capability: [u32; 2], nvrtc: Version, program: &str) -> PathBuf {
    let all = CacheConfig::Target.root().join("kernels");
    let name = name(capability, nvrtc, program);
    let dir = all.join(&name);
    let shipped = std::env::var_os(VARIABLE).filter(|shipped| !shipped.is_empty()).map(PathBuf::from);
    if let Some(shipped) = shipped {
        let made_for = format!("sm_{}{}-{program}", capability[0], capability[1]);
        let came = match taken_over(&shipped.join(made_for), &dir, driver.cuda) {
            Ok(came) => came,
            Err(why) => {
                tracing::warn!("{VARIABLE} is {}: {why}; kernels are compiled here", shipped.display());
                format!("compiled here: {why}")
            }
        };
        CAME.get_or_init(|| came);
    }
    // So that the directories of programs that still run are the last to go.
    if let Err(why) = fs::create_dir_all(&dir).and_then(|()| fs::write(dir.join("used"), "")) {
        tracing::warn!(dir = %dir.display(), %why, "compiled kernels are not kept");
    }
    remove_all_but(MOST - 1, &all, &name);
    dir
}

/// Copies what came compiled for this program and GPU, unless there are kernels already. In words: what came,
/// or why nothing did.
fn taken_over(from: &Path, dir: &Path, driver: Version) -> Result<String, String> {
    let made = fs::read_to_string(from.join(MADE))
        .map_err(|_| "none of its kernels are of this program and kind of GPU".to_owned())?;
    let (cuda, count) =
        made.trim().split_once(' ').ok_or("it does not say by which CUDA they were compiled")?;
    let major: u32 = cuda.split('.').next().and_then(|major| major.parse().ok()).unwrap_or(u32::MAX);
    if major > driver.major {
        return Err(format!("they were compiled by CUDA {cuda}, and this driver is for {driver}"));
    }
    let came = format!("{count} came compiled by CUDA {cuda}");
    if dir.join(RECORDS).exists() {
        return Ok(came);
    }
    copy(from, dir).map_err(|why| format!("they cannot be copied to {}: {why}", dir.display()))?;
    Ok(came)
}

/// Copies a directory's files, and those of directories in it.
fn copy(from: &Path, to: &Path) -> io::Result<()> {
    fs::create_dir_all(to)?;
    for entry in fs::read_dir(from)? {
        let entry = entry?;
        let (path, target) = (entry.path(), to.join(entry.file_name()));
        if path.is_dir() { copy(&path, &target)? } else { fs::copy(&path, &target).map(drop)? }
    }
    Ok(())
}

/// The directory of one program on one kind of GPU.
fn name([major, minor]: [u32; 2], nvrtc: Version, program: &str) -> String {
    format!("sm_{major}{minor}-nvrtc-{}.{}-{program}", nvrtc.major, nvrtc.minor)
}

/// The beginning of a hash of a program's bytes.
fn hash(program: &Path) -> io::Result<String> {
    let mut hasher = blake3::Hasher::new();
    hasher.update_reader(File::open(program)?)?;
    Ok(hasher.finalize().to_hex()[..SHOWN].to_owned())
}

/// Leaves `most` directories beside `ours`, those that were written to last. What cannot be removed stays: it
/// costs room, and nothing else.
fn remove_all_but(most: usize, all: &Path, ours: &str) {
    let Ok(found) = fs::read_dir(all) else { return };
    let others = found.flatten().filter(|entry| entry.file_name() != ours);
    let mut others: Vec<(SystemTime, PathBuf)> =
        others.map(|entry| (written(&entry.path()), entry.path())).collect();
    others.sort_by_key(|(when, _)| std::cmp::Reverse(*when));
    for (_, old) in others.into_iter().skip(most) {
        if let Err(why) = fs::remove_dir_all(&old) {
            tracing::debug!(dir = %old.display(), %why, "kernels of another program stay");
        }
    }
}

/// When something below a directory was written last; cubecl's files lie two directories deeper.
fn written(path: &Path) -> SystemTime {
    let mut latest = fs::metadata(path).and_then(|found| found.modified()).unwrap_or(SystemTime::UNIX_EPOCH);
    if path.is_dir() {
        for entry in fs::read_dir(path).into_iter().flatten().flatten() {
            latest = latest.max(written(&entry.path()));
        }
    }
    latest
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_edited_program_never_meets_what_the_old_one_compiled() {
        let dir = tempfile::tempdir().expect("a directory");
        let of = |bytes: &[u8]| {
            let program = dir.path().join("program");
            fs::write(&program, bytes).expect("written");
            name([9, 0], Version { major: 13, minor: 0 }, &hash(&program).expect("read"))
        };
        let (before, edited, again) = (of(b"kernel x * 2"), of(b"kernel x * 3"), of(b"kernel x * 2"));
        assert_ne!(before, edited);
        assert_eq!(before, again);
        assert!(before.starts_with("sm_90-nvrtc-13.0-"), "{before}");
    }

    #[test]
    fn what_came_compiled_is_taken_over_where_it_fits() {
        let dir = tempfile::tempdir().expect("a directory");
        let (shipped, own) = (dir.path().join("sm_90-abc"), dir.path().join("own"));
        let driver = |major| Version { major, minor: 0 };
        let none = taken_over(&shipped, &own, driver(13)).expect_err("nothing is there");
        assert!(none.contains("this program"), "{none}");
        let records = shipped.join("cuda/0.10.0/ptx");
        fs::create_dir_all(&records).expect("made");
        fs::write(records.join("chunk0.cbor"), "machine code").expect("written");
        fs::write(shipped.join(MADE), "13.0 143\n").expect("written");
        let old = taken_over(&shipped, &own, driver(12)).expect_err("a driver that cannot load them");
        assert!(old.contains("CUDA 13.0") && !own.exists(), "{old}");
        let came = taken_over(&shipped, &own, driver(13)).expect("they fit");
        assert_eq!(came, "143 came compiled by CUDA 13.0");
        let copied = own.join("cuda/0.10.0/ptx/chunk0.cbor");
        assert_eq!(fs::read_to_string(&copied).expect("copied"), "machine code");
        // What was compiled here since stays.
        fs::write(&copied, "and more").expect("written");
        taken_over(&shipped, &own, driver(13)).expect("they fit");
        assert_eq!(fs::read_to_string(&copied).expect("there"), "and more");
    }

    #[test]
    fn this_program_can_be_read() {
        let program = hash(Path::new("/proc/self/exe")).expect("read");
        assert_eq!(program, hash(&std::env::current_exe().expect("named")).expect("read"));
    }

    #[test]
    fn what_older_programs_have_left_is_bounded() {
        let dir = tempfile::tempdir().expect("a directory");
        // Later than any directory is made.
        let start = SystemTime::UNIX_EPOCH + std::time::Duration::from_secs(4_000_000_000);
        for number in 0..5 {
            let file = dir.path().join(format!("program-{number}")).join("ptx.json.log");
            fs::create_dir(file.parent().expect("below")).expect("made");
            // The files are as old as their numbers; all directories are of now.
            let when = start + std::time::Duration::from_secs(60 * (number + 1));
            File::create(&file).and_then(|file| file.set_modified(when)).expect("made");
        }
        remove_all_but(2, dir.path(), "program-0");
        let mut left: Vec<_> = fs::read_dir(dir.path())
            .expect("there")
            .map(|entry| entry.expect("there").file_name().into_string().expect("a name"))
            .collect();
        left.sort();
        assert_eq!(left, ["program-0", "program-3", "program-4"]);
        remove_all_but(2, &dir.path().join("none"), "program-0");
    }
}
