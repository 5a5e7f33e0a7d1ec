//! Checkpoints of an earlier run, out of the way of one that begins anew in the same directory
//! (`train.resume=false`).
//!
//! They carry higher steps than those to come: a restarted coordinator that looks for the newest one, or the
//! pruning of old ones, would take them for this run's future. They are moved, not removed: `checkpoints`
//! becomes `checkpoints.earlier-1`, or the next free number. What the workers say of the best of them, and
//! what they witnessed, goes along: it is moved among them first, so that no crash leaves it behind for the
//! run that begins. What such a crash had moved among them already gets a number likewise.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use coxswain_proto::witness;

/// What workers leave in the output directory of the run as it was: the best checkpoint's name and its
/// artifacts, and what each rank trained on.
const ALONG: [&str; 3] = ["best.json", "best", witness::DIRECTORY];

/// Moves what is in `OUTPUT_DIR/checkpoints` aside; returns where to, if there was anything.
pub fn set_aside(output: &Path) -> io::Result<Option<PathBuf>> {
    forget_objects(output)?;
    let checkpoints = output.join("checkpoints");
    for name in ALONG.into_iter().filter(|name| output.join(name).exists()) {
        fs::create_dir_all(&checkpoints)?;
        let place = checkpoints.join(name);
        if place.exists() {
            fs::rename(&place, free(&place))?;
        }
        fs::rename(output.join(name), place)?;
    }
    match fs::read_dir(&checkpoints).map(|mut entries| entries.next().is_none()) {
        Ok(false) => {}
        Ok(true) => return Ok(None),
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error),
    }
    let place = free(&checkpoints);
    fs::rename(&checkpoints, &place)?;
    // A machine that crashes must not come back with them beside the journal of the run that begins.
    for directory in [place.as_path(), output] {
        coxswain_proto::directory::sync(directory)?;
    }
    tracing::info!(to = %place.display(), "checkpoints of an earlier run are set aside");
    Ok(Some(place))
}

/// A name like that of `path` which nothing has.
fn free(path: &Path) -> PathBuf {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let mut places = (1u32..).map(|number| path.with_file_name(format!("{name}.earlier-{number}")));
    places.find(|place| !place.exists()).expect("a directory holds fewer than 2^32 others")
}

/// What the earlier run noted of the objects of a bucket, which may be others now.
fn forget_objects(output: &Path) -> io::Result<()> {
    for entry in fs::read_dir(output).into_iter().flatten() {
        let path = entry?.path();
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        if name.starts_with("objects-") && name.ends_with(".txt") {
            fs::remove_file(&path)?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_earlier_run_has_a_place_of_its_own() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(set_aside(dir.path()).unwrap(), None);
        for number in 1..=2 {
            let step = dir.path().join("checkpoints/step-00000004");
            fs::create_dir_all(&step).unwrap();
            fs::write(dir.path().join("best.json"), "{}").unwrap();
            fs::write(dir.path().join("objects-0a.txt"), "").unwrap();
            let place = dir.path().join(format!("checkpoints.earlier-{number}"));
            assert_eq!(set_aside(dir.path()).unwrap(), Some(place.clone()));
            assert!(!step.exists() && place.join("step-00000004").exists());
            assert!(!dir.path().join("objects-0a.txt").exists());
            assert!(!dir.path().join("best.json").exists() && place.join("best.json").exists());
        }
        fs::create_dir(dir.path().join("checkpoints")).unwrap();
        assert_eq!(set_aside(dir.path()).unwrap(), None, "nothing to keep");
    }

    #[test]
    fn a_best_that_a_crash_has_left_among_the_checkpoints_is_in_nobodys_way() {
        let dir = tempfile::tempdir().unwrap();
        let of = |place: &str| dir.path().join(place).join("best");
        for place in ["checkpoints", "."] {
            fs::create_dir_all(of(place)).unwrap();
            fs::write(of(place).join("weights"), place).unwrap();
            fs::write(dir.path().join(place).join("best.json"), place).unwrap();
        }
        let place = set_aside(dir.path()).unwrap().unwrap();
        let text = |name: &str| fs::read_to_string(place.join(name)).unwrap();
        assert_eq!([text("best/weights"), text("best.json")], [".", "."]);
        assert_eq!([text("best.earlier-1/weights"), text("best.json.earlier-1")], ["checkpoints"; 2]);
    }

    #[test]
    fn no_best_of_an_earlier_run_stays_where_checkpoints_are_gone() {
        for empty in [false, true] {
            let dir = tempfile::tempdir().unwrap();
            if empty {
                fs::create_dir(dir.path().join("checkpoints")).unwrap();
            }
            fs::create_dir(dir.path().join("best")).unwrap();
            fs::create_dir(dir.path().join(witness::DIRECTORY)).unwrap();
            fs::write(dir.path().join("best.json"), "{}").unwrap();
            let place = set_aside(dir.path()).unwrap().unwrap();
            for name in ALONG {
                assert!(!dir.path().join(name).exists() && place.join(name).exists(), "{name}");
            }
        }
    }
}
