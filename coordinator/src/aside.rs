//! Checkpoints of an earlier run, out of the way of one that begins anew in the same directory
//! (`train.resume=false`).
//!
//! They carry higher steps than those to come: a restarted coordinator that looks for the newest one, or the
//! pruning of old ones, would take them for this run's future. They are moved, not removed: `checkpoints`
//! becomes `checkpoints.earlier-1`, or the next free number. What the workers say of the best of them goes
//! along: it is moved among them first, so that no crash leaves it behind for the run that begins.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

/// The best checkpoint's name and its artifacts, which workers leave in the output directory.
const BEST: [&str; 2] = ["best.json", "best"];

/// Moves what is in `OUTPUT_DIR/checkpoints` aside; returns where to, if there was anything.
pub fn set_aside(output: &Path) -> io::Result<Option<PathBuf>> {
    forget_objects(output)?;
    let checkpoints = output.join("checkpoints");
    for name in BEST.into_iter().filter(|name| output.join(name).exists()) {
        fs::create_dir_all(&checkpoints)?;
        fs::rename(output.join(name), checkpoints.join(name))?;
    }
    match fs::read_dir(&checkpoints).map(|mut entries| entries.next().is_none()) {
        Ok(false) => {}
        Ok(true) => return Ok(None),
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error),
    }
    let place = (1u32..).map(|number| output.join(format!("checkpoints.earlier-{number}")));
    let place =
        place.into_iter().find(|place| !place.exists()).expect("a directory holds fewer than 2^32 others");
    fs::rename(&checkpoints, &place)?;
    // A machine that crashes must not come back with them beside the journal of the run that begins.
    for directory in [place.as_path(), output] {
        coxswain_proto::directory::sync(directory)?;
    }
    tracing::info!(to = %place.display(), "checkpoints of an earlier run are set aside");
    Ok(Some(place))
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
    fn no_best_of_an_earlier_run_stays_where_checkpoints_are_gone() {
        for empty in [false, true] {
            let dir = tempfile::tempdir().unwrap();
            if empty {
                fs::create_dir(dir.path().join("checkpoints")).unwrap();
            }
            fs::create_dir(dir.path().join("best")).unwrap();
            fs::write(dir.path().join("best.json"), "{}").unwrap();
            let place = set_aside(dir.path()).unwrap().unwrap();
            for name in BEST {
                assert!(!dir.path().join(name).exists() && place.join(name).exists(), "{name}");
            }
        }
    }
}
