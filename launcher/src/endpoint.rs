//! Where the coordinator of a run is: a small file in the run's logs, and how commands find it.
//!
//! The launcher that starts a coordinator writes `OUTPUT_DIR/logs/endpoint`, wherever its other logs go,
//! holds a lock on it, and removes it when the coordinator has ended. A launcher that was killed leaves the
//! file behind, and another run may listen at that port by now: before a command says or does anything about
//! the run of a directory, the coordinator there must be that run's.
//!
//! Somebody else may have written the file. It never makes a command call in clear beyond this machine; and a
//! token of the user's is shown at the place that another user's file names through TLS alone, on this
//! machine, too, where only who has that token can answer.

mod address_file;
mod finding;

use std::{
    fs,
    io::{self, Write},
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
};

use clap::Args;
use coxswain_identity::Address;
use coxswain_proto::{
    bounded, in_place,
    v1::{GetStatusRequest, GetStatusResponse},
};
use serde::Deserialize;
use tonic::Code;

use self::{
    address_file::{DIR, MAX_BYTES, RETRY, TRIES, file, written},
    finding::{is_held, newest, read},
};
pub use self::{
    address_file::{RUNS, SPEC_FILE},
    finding::{active, is_active},
};
use crate::{
    control::{Access, prompt},
    credentials,
    exit::{CliError, Exit, Outcome},
    launch::inputs::process_env,
};

/// Which run a command is for.
#[derive(Args, Clone, Debug, Default)]
pub struct Target {
    /// Coordinator's HOST:PORT; with http:// never TLS, with https:// always TLS [env:
    /// COX_COORDINATOR] [default: the newest active run in runs/]
    #[arg(long, value_name = "HOST:PORT")]
    pub endpoint: Option<String>,
    /// Output directory of the run
    #[arg(long, value_name = "DIR", conflicts_with = "endpoint")]
    pub run: Option<PathBuf>,
    /// Output directory of the run; the same as `--run`
    #[arg(value_name = "RUN_DIR", conflicts_with_all = ["endpoint", "run"])]
    dir: Option<PathBuf>,
}

impl Target {
    /// The run in this output directory.
    pub fn of_dir(run: PathBuf) -> Self {
        Self { run: Some(run), ..Self::default() }
    }

    /// The coordinator at this address.
    pub fn of_address(address: String) -> Self {
        Self { endpoint: Some(address), ..Self::default() }
    }

    /// The output directory that was named.
    pub fn run_dir(&self) -> Option<&Path> {
        self.run.as_deref().or(self.dir.as_deref())
    }

    /// Finds the coordinator: `--endpoint`, `--run`, `COX_COORDINATOR`, the newest run below `runs/`.
    pub async fn access(&self) -> Result<Access, CliError> {
        let address = match (&self.endpoint, self.run_dir()) {
            (Some(address), _) => address.clone(),
            (None, Some(run)) => return of_run(run).await,
            (None, None) => match process_env("COX_COORDINATOR") {
                Some(address) => address,
                None => return of_run(&newest(Path::new(RUNS))?).await,
            },
        };
        let found = Address::parse(&address);
        if found.port().is_none() && !address.contains("://") {
            return Err(CliError::usage(format!(
                "{address}: not a coordinator's address; expected HOST:PORT, such as 127.0.0.1:29400"
            )));
        }
        Access::new(found, &credentials::of_env(&process_env)?)
    }
}

/// The coordinator of the run in `output_dir`, which answers.
pub async fn of_run(output_dir: &Path) -> Result<Access, CliError> {
    let (address, is_ours) = read(output_dir)?;
    let is_trusted = is_ours || credentials::has_own(output_dir);
    let address = if is_trusted { address } else { address.encrypted() };
    let access = Access::new(address, &credentials::of_run(output_dir, &process_env)?)?;
    // Asked all the same: locks of some file systems are not seen from other machines.
    let abandoned = !is_held(&file(output_dir));
    let access = access.advising(abandoned.then_some(ABANDONED));
    let other = match access
        .try_look(|mut people| async move { people.get_status(prompt(GetStatusRequest {})).await })
        .await
    {
        Ok(there) if is_of(output_dir, &there) => return Ok(access),
        Ok(there) => format!("run {} (output directory {})", there.run_id, there.output_dir),
        // It knows no token of this run's.
        Err(status) if abandoned && status.code() == Code::Unauthenticated => "another run".to_owned(),
        Err(status) => return Err(access.explain(&status)),
    };
    Err(CliError::new(
        Exit::CoordinatorLost,
        format!(
            "{}: no launcher is running this run; its address {} now belongs to {other}",
            output_dir.display(),
            access.address(),
        ),
    ))
}

/// Whose directory it is, as far as a coordinator tells. Each writes `run.json` before it answers.
#[derive(Deserialize)]
struct RunFile {
    run_id: String,
    name: String,
    spec_digest: String,
}

/// Whether the coordinator that says so is the one of the run in `output_dir`. Runs of one job of a scheduler
/// share an id, and may share all that is learned: then directories that are both seen from here tell them
/// apart.
fn is_of(output_dir: &Path, there: &GetStatusResponse) -> bool {
    let text = fs::read_to_string(output_dir.join("run.json")).unwrap_or_default();
    let Ok(ours) = serde_json::from_str::<RunFile>(&text) else { return false };
    let theirs = Path::new(&there.output_dir);
    let place = |path: &Path| fs::metadata(path).map(|found| (found.dev(), found.ino())).ok();
    let elsewhere = theirs.is_absolute() && place(theirs).is_some_and(|seen| place(output_dir) != Some(seen));
    (ours.run_id, ours.name, ours.spec_digest)
        == (there.run_id.clone(), there.run_name.clone(), there.spec_digest.clone())
        && !elsewhere
}

/// What a file without a lock means where no coordinator answers.
const ABANDONED: &str = "the launcher of this run has exited (killed?); start it again to resume from the newest checkpoint, if there is one";

/// Publishes where the coordinator is, and that this launcher holds the run; removed again when the value is
/// dropped.
#[derive(Debug)]
pub struct PublishedEndpoint {
    path: PathBuf,
    /// Keeps the lock.
    file: fs::File,
}

impl PublishedEndpoint {
    /// Writes the file anew, though a launcher whose machine is gone may hold the old one: a server of files
    /// keeps its lock for a while.
    pub fn instead(output_dir: &Path, address: &str) -> Result<Self, CliError> {
        // If it cannot be removed, it cannot be locked either, and that is reported.
        let _ = fs::remove_file(file(output_dir));
        Self::write(output_dir, address)
    }

    /// Writes the file, unless another living launcher holds it: two launchers of one run would write the
    /// same checkpoints.
    pub fn write(output_dir: &Path, address: &str) -> Result<Self, CliError> {
        let path = file(output_dir);
        let unusable = |error| CliError::usage(format!("{}: {error}", path.display()));
        fs::create_dir_all(output_dir.join(DIR)).map_err(unusable)?;
        let mut file = in_place::open(&path).map_err(unusable)?;
        for left in (0..TRIES).rev() {
            if !locked(|| file.try_lock()) {
                return Err(held(output_dir));
            }
            if left == 0 || is_at(&path, &file) {
                break;
            }
            // A launcher that was ending has removed it meanwhile: what is locked is nowhere.
            file = in_place::open(&path).map_err(unusable)?;
        }
        // A file system without locks (some network mounts) still gets the address.
        file.set_len(0).and_then(|()| file.write_all(format!("{address}\n").as_bytes())).map_err(unusable)?;
        Ok(Self { path, file })
    }
}

/// Whether the lock is ours now, or there are no locks here. A command that asks about runs holds it for a
/// moment: that much is waited for.
fn locked(lock: impl Fn() -> Result<(), fs::TryLockError>) -> bool {
    (0..TRIES).any(|_| match lock() {
        Err(fs::TryLockError::WouldBlock) => {
            std::thread::sleep(RETRY);
            false
        }
        _ => true,
    })
}

fn held(output_dir: &Path) -> CliError {
    let holder = written(|| bounded::read_text(&file(output_dir), MAX_BYTES)).unwrap_or_default();
    CliError::usage(format!(
        "{}: another launcher is running this run (coordinator at {}); stop it or choose another run.output_dir",
        output_dir.display(),
        holder.trim(),
    ))
}

/// Refuses a run that another launcher holds, and leaves its file as it is.
pub fn refuse_active(output_dir: &Path) -> Outcome {
    match fs::File::open(file(output_dir)) {
        Ok(file) if !locked(|| file.try_lock_shared()) => Err(held(output_dir)),
        _ => Ok(()),
    }
}

/// Whether a path still is that of a file that is open.
fn is_at(path: &Path, file: &fs::File) -> bool {
    let place = |of: io::Result<fs::Metadata>| of.ok().map(|found| (found.dev(), found.ino()));
    place(fs::metadata(path)) == place(file.metadata())
}

impl Drop for PublishedEndpoint {
    fn drop(&mut self) {
        // Gone already, or a disk that fails: the next launch overwrites it. Another launcher's stays.
        if is_at(&self.path, &self.file) {
            let _ = fs::remove_file(&self.path);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{io::Read, net::TcpListener};

    use super::*;

    #[test]
    fn what_somebody_else_has_written_is_not_called_in_clear() {
        let dir = tempfile::tempdir().unwrap();
        let run = |name: &str| dir.path().join(name);
        let _ours = PublishedEndpoint::write(&run("ours"), "http://10.9.9.9:7777").unwrap();
        let theirs = PublishedEndpoint::write(&run("theirs"), "127.0.0.1:7777").unwrap();
        let (address, is_ours) = read(&run("ours")).unwrap();
        assert!(is_ours && !address.is_plaintext(), "{address}");
        // Only root can give a file away.
        if is_root() && std::os::unix::fs::chown(&theirs.path, Some(1000), None).is_ok() {
            assert!(!read(&run("theirs")).unwrap().1);
            let later = std::time::SystemTime::now() + std::time::Duration::from_secs(5);
            fs::OpenOptions::new().write(true).open(&theirs.path).unwrap().set_modified(later).unwrap();
            assert_eq!(newest(dir.path()).unwrap(), run("ours"), "the one that began last");
        }
    }

    #[tokio::test]
    async fn a_place_that_another_users_file_names_is_called_through_tls_on_this_machine_too() {
        let dir = tempfile::tempdir().unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let theirs = PublishedEndpoint::write(dir.path(), &address).unwrap();
        // Only root can give a file away.
        if !is_root() || std::os::unix::fs::chown(&theirs.path, Some(1000), None).is_err() {
            return eprintln!("skipped: a file of another user is made by root alone");
        }
        assert!(of_run(dir.path()).await.is_err(), "nobody answers there");
        listener.set_nonblocking(true).unwrap();
        let (mut caller, _) = listener.accept().expect("it was called");
        let mut heard = [0; 3];
        let count = caller.read(&mut heard).unwrap_or(0);
        assert_ne!(&heard[..count], b"PRI", "HTTP/2 in clear");
    }

    fn is_root() -> bool {
        fs::metadata("/proc/self").unwrap().uid() == 0
    }

    #[test]
    fn a_launch_that_begins_while_another_one_ends_has_the_lock_of_the_file_that_is_there() {
        let dir = tempfile::tempdir().unwrap();
        for round in 0..200 {
            let ending = PublishedEndpoint::write(dir.path(), "127.0.0.1:1").unwrap();
            let output = dir.path().to_owned();
            let beginning = std::thread::spawn(move || PublishedEndpoint::write(&output, "127.0.0.1:2"));
            drop(ending);
            let begun = beginning.join().unwrap();
            assert!(begun.is_err() || is_active(dir.path()), "round {round}");
        }
    }

    #[test]
    fn a_coordinator_of_another_run_is_told_apart() {
        let dir = tempfile::tempdir().unwrap();
        let (ours, other) = (dir.path().join("a"), dir.path().join("b"));
        for run in [&ours, &other] {
            fs::create_dir(run).unwrap();
        }
        let there = |run_id: &str, output_dir: &Path| GetStatusResponse {
            run_id: run_id.into(),
            run_name: "name".into(),
            spec_digest: "digest".into(),
            output_dir: output_dir.display().to_string(),
            ..GetStatusResponse::default()
        };
        assert!(!is_of(&ours, &there("job", &ours)), "no coordinator has begun there");
        let file = r#"{"run_id": "job", "name": "name", "spec_digest": "digest", "version": "1"}"#;
        fs::write(ours.join("run.json"), file).unwrap();
        assert!(is_of(&ours, &there("job", &ours)));
        assert!(is_of(&ours, &there("job", Path::new("a"))), "as its launcher was told, from elsewhere");
        assert!(is_of(&ours, &there("job", &dir.path().join("mounted/elsewhere"))));
        assert!(!is_of(&ours, &there("job", &other)), "the next run of the same job");
        assert!(!is_of(&ours, &there("another", &ours)));
    }
}
