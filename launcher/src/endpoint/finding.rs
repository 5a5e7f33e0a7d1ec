//! Runs found by the files that their launchers hold: which are active, which of them is the newest, and
//! where the coordinator of one listens.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use coxswain_identity::Address;
use coxswain_proto::{bounded, human};

use super::address_file::{DIR, MAX_BYTES, RUNS, SPEC_FILE, file, written};
use crate::exit::{CliError, Exit};

/// The newest of this user's runs, or else of all.
pub(super) fn newest(runs: &Path) -> Result<PathBuf, CliError> {
    let mut found = active(runs)?;
    found.sort_by_key(|run| is_ours(&file(run)));
    Ok(found.pop().unwrap_or_default())
}

/// The runs below `runs` that launchers hold, the newest last; at least one.
pub fn active(runs: &Path) -> Result<Vec<PathBuf>, CliError> {
    let started = |run: &PathBuf| fs::metadata(file(run)).and_then(|file| file.modified()).ok();
    let entries = fs::read_dir(runs).into_iter().flatten().flatten().map(|entry| entry.path());
    // A launcher that was killed leaves its file, without its lock.
    let held = entries.filter(|run| is_held(&file(run)));
    let mut found: Vec<_> = held.filter_map(|run| Some((started(&run)?, run))).collect();
    found.sort();
    if found.is_empty() {
        return Err(CliError::new(
            Exit::CoordinatorLost,
            format!(
                "no run is active in {}/; name one with --run DIR or --endpoint HOST:PORT",
                runs.display()
            ),
        ));
    }
    Ok(found.into_iter().map(|(_, run)| run).collect())
}

/// Whether a launcher holds the run in `output_dir`.
pub fn is_active(output_dir: &Path) -> bool {
    is_held(&file(output_dir))
}

/// Whether a launcher holds the run of this file. Where there are no locks, the file itself has to do as a
/// sign.
pub(super) fn is_held(path: &Path) -> bool {
    fs::File::open(path).is_ok_and(|file| !matches!(file.try_lock_shared(), Ok(())))
}

/// What the file of a run says, and whether this user, or root, has written it.
pub(super) fn read(run: &Path) -> Result<(Address, bool), CliError> {
    let path = file(run);
    let not_running = |why: &str| {
        let launched = [run.to_owned(), run.join(DIR)].iter().any(|dir| dir.join(SPEC_FILE).exists());
        let resumes = || format!("; `cox run {}` resumes it", human::word(run.display()));
        let (run, remedy) = (run.display(), if launched { resumes() } else { String::new() });
        let problem = format!("{run}: no launcher is running this run ({why} {}){remedy}", path.display());
        CliError::new(Exit::CoordinatorLost, problem)
    };
    let unreadable = |error: io::Error| match error.kind() {
        io::ErrorKind::NotFound if !run.exists() => CliError::new(
            Exit::CoordinatorLost,
            format!("{}: there is no such directory; `cox runs` lists the runs in {RUNS}/", run.display()),
        ),
        io::ErrorKind::NotFound => not_running("missing:"),
        _ => CliError::usage(format!("{}: {error}", path.display())),
    };
    let text = written(|| bounded::read_text(&path, MAX_BYTES)).map_err(unreadable)?;
    if text.trim().is_empty() {
        return Err(not_running("a killed launcher left an empty"));
    }
    Ok((Address::found(text.trim(), false), is_ours(&path)))
}

/// Whether a file is this user's, or root's.
fn is_ours(path: &Path) -> bool {
    fs::metadata(path).is_ok_and(|found| coxswain_identity::is_ours(&found))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::endpoint::{PublishedEndpoint, address_file::TRIES};

    #[test]
    fn the_newest_active_run_is_found_and_none_is_reported() {
        let dir = tempfile::tempdir().unwrap();
        let run = |name: &str| dir.path().join(name);
        assert!(newest(dir.path()).unwrap_err().message.unwrap().contains("no run is active"));
        fs::create_dir(run("c")).unwrap();
        let a = PublishedEndpoint::write(&run("a"), "127.0.0.1:1").unwrap();
        let b = PublishedEndpoint::write(&run("b"), "127.0.0.1:2").unwrap();
        let later = std::time::SystemTime::now() + std::time::Duration::from_secs(5);
        fs::OpenOptions::new().write(true).open(&a.path).unwrap().set_modified(later).unwrap();
        assert_eq!(newest(dir.path()).unwrap(), run("a"));
        let there = |run: &Path| read(run).map(|(address, _)| address.to_string());
        assert_eq!(there(&run("a")).unwrap(), "127.0.0.1:1");
        drop(a);
        assert_eq!(newest(dir.path()).unwrap(), run("b"));
        let told = || there(&run("a")).unwrap_err().message.unwrap();
        assert!(told().contains("no launcher is running") && !told().contains("cox run"), "{}", told());
        fs::write(run("a").join(SPEC_FILE), "{}").unwrap();
        assert!(told().ends_with(&format!("; `cox run {}` resumes it", run("a").display())), "{}", told());
        let twice = PublishedEndpoint::write(&run("b"), "127.0.0.1:3").unwrap_err().message.unwrap();
        assert!(
            twice.contains("another launcher is running this run (coordinator at 127.0.0.1:2)"),
            "{twice}"
        );
        // A run whose launcher was killed a moment ago, and never ran long.
        fs::create_dir_all(run("d/logs")).unwrap();
        fs::write(run("d/logs/endpoint"), "127.0.0.1:4\n").unwrap();
        assert_eq!(newest(dir.path()).unwrap(), run("b"));
        drop(b);
        assert!(newest(dir.path()).is_err());
        // On a machine that is gone, to which a lock may still belong.
        let _gone = PublishedEndpoint::write(&run("e"), "127.0.0.1:5").unwrap();
        let _instead = PublishedEndpoint::instead(&run("e"), "127.0.0.1:6").unwrap();
        assert_eq!(there(&run("e")).unwrap(), "127.0.0.1:6");
    }

    #[test]
    fn a_file_that_is_being_written_is_read_once_it_is_whole() {
        let looks = std::cell::Cell::new(0);
        let in_turn = |texts: &'static [&'static str]| {
            looks.set(0);
            written(|| {
                let text = texts[looks.get().min(texts.len() - 1)];
                looks.set(looks.get() + 1);
                Ok(text.to_owned())
            })
        };
        assert_eq!(in_turn(&["", "127.0", "127.0.0.1:1\n"]).unwrap(), "127.0.0.1:1\n");
        assert_eq!((in_turn(&["127.0.0.1:1"]).unwrap(), looks.get()), ("127.0.0.1:1".to_owned(), TRIES));
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join(DIR)).unwrap();
        fs::write(file(dir.path()), "").unwrap();
        let refused = read(dir.path()).unwrap_err();
        assert_eq!(refused.exit, Exit::CoordinatorLost);
        assert!(refused.message.unwrap().contains("left an empty"));
    }
}
