//! The `checkpoints` directory: find, verify, prune. Knows files, not tensors.

use std::{
    collections::BTreeMap,
    fs, io,
    path::{Path, PathBuf},
};

use coxswain_proto::{
    checkpoint::{self, MANIFEST, ManifestError},
    ids::Step,
    limits::MAX_WORLD,
    report::Skip,
};

use super::{
    Checkpoint, CheckpointError, Manifest, Staging, io_error, proof,
    remove::{self, HIDDEN, step_of},
};
use coxswain_nn::pulse;

/// Why a checkpoint is set aside that is not what was written.
pub const DAMAGED: &str = "damaged";

/// The `checkpoints` directory of a run.
#[derive(Clone, Debug)]
pub struct Store {
    root: PathBuf,
}

impl Store {
    /// The store below a run's output directory; nothing is created yet.
    pub fn new(output_dir: &Path) -> Self {
        Self { root: output_dir.join("checkpoints") }
    }

    /// The complete checkpoint that this very directory is, if it is one.
    pub fn at(path: &Path) -> Option<Checkpoint> {
        Some(Checkpoint { path: path.into(), manifest: read_manifest(path).ok()? })
    }

    /// Where the checkpoint of `step` is, or will be.
    pub fn path(&self, step: u64) -> PathBuf {
        self.root.join(Step(step).checkpoint_dir())
    }

    /// All complete checkpoints, oldest first. Directories without a readable manifest are not checkpoints;
    /// nor are those with a name of their own, such as copies that people have made.
    pub fn complete(&self) -> Result<Vec<Checkpoint>, CheckpointError> {
        let entries = match fs::read_dir(&self.root) {
            Ok(entries) => entries,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            Err(error) => return Err(io_error("read", &self.root)(error)),
        };
        let mut found = Vec::new();
        for entry in entries {
            let path = entry.map_err(io_error("read", &self.root))?.path();
            let Some(step) = step_of(&path) else { continue };
            match read_manifest(&path) {
                Ok(manifest) if manifest.step == step.0 => found.push(Checkpoint { path, manifest }),
                Err(error @ ManifestError::UnknownFormat(_)) => return Err(unreadable(path, error)),
                Ok(_) | Err(ManifestError::Absent | ManifestError::Garbled(_)) => {}
            }
        }
        found.sort_by_key(|checkpoint| checkpoint.manifest.step);
        Ok(found)
    }

    /// The newest complete checkpoint.
    pub fn newest(&self) -> Result<Checkpoint, CheckpointError> {
        self.complete()?.pop().ok_or_else(|| CheckpointError::Foreign {
            path: self.root.clone(),
            detail: "holds no complete checkpoint; is this the output directory of a run that has saved one?"
                .into(),
        })
    }

    /// The step of the newest one before `step`, if there is one.
    pub fn before(&self, step: Step) -> Option<Step> {
        let complete = self.complete().unwrap_or_default();
        let steps = complete.iter().map(|found| Step(found.manifest.step));
        steps.filter(|found| *found < step).max()
    }

    /// Gives a checkpoint that is not to be gone on from a name under which it is none, for people to look
    /// at: `why` it is none, and a number. What is not there any more, or cannot be renamed, stays as it is:
    /// the next resume finds the same.
    pub fn set_aside(&self, step: Step, why: &str) {
        let path = self.path(step.0);
        let aside = (1..).map(|number| aside_of(&path, why, number)).find(|aside| !aside.exists());
        let aside = aside.expect("some number is free");
        if let Err(error) = fs::rename(&path, &aside) {
            tracing::warn!(path = %path.display(), %error, "a {why} checkpoint cannot be set aside");
        }
    }

    /// Sets all aside that are newer than the newest from which a later step was taken, in a run that has
    /// come to `now` and has left these steps out. Returns the step of that one, if there is one.
    pub fn retreat(
        &self,
        now: Step,
        skipped: &BTreeMap<Step, Skip>,
    ) -> Result<Option<Step>, CheckpointError> {
        let complete = self.complete()?;
        let good = proof::newest(&complete, Some((now, skipped)));
        let newer = complete.iter().map(|found| Step(found.manifest.step)).filter(|step| Some(*step) > good);
        newer.for_each(|step| self.set_aside(step, "diverged"));
        Ok(good)
    }

    /// The checkpoint of exactly this step.
    pub fn checkpoint(&self, step: u64) -> Result<Checkpoint, CheckpointError> {
        let path = self.path(step);
        match read_manifest(&path) {
            Ok(manifest) if manifest.step == step => Ok(Checkpoint { path, manifest }),
            Ok(manifest) => Err(CheckpointError::Foreign {
                path,
                detail: format!("holds the state of step {}; was it copied or renamed?", manifest.step),
            }),
            // By a generation that ended before it had begun.
            Err(ManifestError::Absent) if aside_of(&path, DAMAGED, 1).exists() => {
                let aside = aside_of(&path, DAMAGED, 1);
                Err(CheckpointError::SetAside { path, aside })
            }
            Err(ManifestError::Absent) => Err(CheckpointError::Foreign {
                path,
                detail: format!(
                    "the run should resume from step {step}, but there is no manifest here; do all ranks see the same run.output_dir?"
                ),
            }),
            Err(error) => Err(unreadable(path, error)),
        }
    }

    /// Creates the staging directory of a step, and removes what crashes have left behind, of this step and
    /// others. Rank 0 only, between two checkpoints.
    pub fn stage(&self, step: u64) -> Result<Staging, CheckpointError> {
        let staging = self.staging(step);
        fs::create_dir_all(&self.root).map_err(io_error("create", &self.root))?;
        for left in remove::leftovers(&self.root).map_err(io_error("read", &self.root))? {
            remove::remove_hidden(&left);
        }
        if staging.path().exists() {
            // A process has a file of it open.
            remove::remove(staging.path()).map_err(io_error("clear", staging.path()))?;
        }
        fs::create_dir(staging.path()).map_err(io_error("create", staging.path()))?;
        Ok(staging)
    }

    /// The staging directory that rank 0 has created.
    pub fn staging(&self, step: u64) -> Staging {
        Staging::new(self.root.join(format!("{HIDDEN}{}", Step(step).checkpoint_dir())), self.path(step))
    }

    /// Removes all but the newest `keep` checkpoints, `best`, that of a step, and the newest from which a
    /// later step was taken. One that cannot be removed is said so and stays: nothing depends on it.
    pub fn prune(&self, keep: usize, best: Option<u64>) {
        let complete = match self.complete() {
            Ok(complete) => complete,
            Err(error) => return tracing::warn!(%error, "cannot remove old checkpoints"),
        };
        let old = &complete[..complete.len().saturating_sub(keep.max(1))];
        let kept = [best.map(Step), proof::newest(&complete, None)];
        for old in old.iter().filter(|old| !kept.contains(&Some(Step(old.manifest.step)))) {
            pulse::beat();
            if let Err(error) = remove::remove(&old.path) {
                tracing::warn!(path = %old.path.display(), %error, "cannot remove an old checkpoint");
            }
        }
    }
}

/// What a checkpoint is called that is not to be gone on from.
fn aside_of(path: &Path, why: &str, number: u32) -> PathBuf {
    path.with_extension(format!("{why}-{number}"))
}

/// The error of a manifest that is there.
fn unreadable(path: PathBuf, error: ManifestError) -> CheckpointError {
    let detail = error.to_string();
    match error {
        ManifestError::UnknownFormat(_) => CheckpointError::Foreign { path, detail },
        ManifestError::Absent | ManifestError::Garbled(_) => {
            CheckpointError::Damaged { path: path.join(MANIFEST), detail }
        }
    }
}

/// Ranks are counted and files opened by it.
fn read_manifest(path: &Path) -> Result<Manifest, ManifestError> {
    let manifest: Manifest = checkpoint::read_manifest(path)?;
    if !(1..=MAX_WORLD).contains(&manifest.world_size) || manifest.micro_batch == 0 {
        let Manifest { world_size, micro_batch, .. } = manifest;
        let impossible = format!("world_size {world_size}, micro_batch {micro_batch}");
        return Err(ManifestError::Garbled(impossible));
    }
    Ok(manifest)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn manifest(step: u64) -> Manifest {
        Manifest {
            format: checkpoint::FORMAT,
            step,
            epoch: 0,
            world_size: 1,
            spec_digest: "d".into(),
            core_digest: None,
            planned_steps: None,
            version: "v".into(),
            dataset_fingerprint: "f".into(),
            micro_batch: 1,
            cache: None,
            cache_phase: None,
            skipped: Default::default(),
            losses: Default::default(),
            files: Default::default(),
        }
    }

    fn write(store: &Store, step: u64, content: &[u8]) -> Checkpoint {
        let staging = store.stage(step).expect("temporary directory is writable");
        fs::write(staging.file("part"), content).expect("temporary directory is writable");
        staging.publish(manifest(step), &[]).expect("temporary directory is writable")
    }

    #[test]
    fn a_checkpoint_is_invisible_until_published() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::new(dir.path());
        let staging = store.stage(4).unwrap();
        fs::write(staging.file("part"), b"half").unwrap();
        assert!(store.complete().unwrap().is_empty());
        let wanted = ["part", "optimizer-rank0001-of-0002.safetensors"].map(String::from);
        let refused = staging.publish(manifest(4), &wanted).unwrap_err().to_string();
        assert!(refused.contains("rank0001-of-0002") && refused.contains("run.output_dir"), "{refused}");
        assert!(store.complete().unwrap().is_empty());
        staging.publish(manifest(4), &wanted[..1]).unwrap();
        assert_eq!(store.complete().unwrap()[0].manifest.step, 4);
        assert!(store.checkpoint(4).unwrap().verified("part").is_ok());
    }

    #[test]
    fn a_flipped_bit_is_found_and_named() {
        let dir = tempfile::tempdir().unwrap();
        let found = write(&Store::new(dir.path()), 1, b"abcd");
        fs::write(found.path.join("part"), b"abce").unwrap();
        let error = found.verified("part").unwrap_err().to_string();
        assert!(error.contains("part") && error.contains("BLAKE3"), "{error}");
        fs::write(found.path.join("part"), b"abc").unwrap();
        assert!(found.verified("part").unwrap_err().to_string().contains("3 bytes"));
    }

    #[test]
    fn a_manifest_that_nothing_could_have_written_is_damage() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::new(dir.path());
        for (world_size, micro_batch) in [(0, 1), (usize::MAX, 1), (MAX_WORLD + 1, 1), (2, 0)] {
            write(&store, 2, b"x");
            let path = store.path(2).join(MANIFEST);
            let forged = Manifest { world_size, micro_batch, ..manifest(2) };
            fs::write(&path, serde_json::to_vec(&forged).unwrap()).unwrap();
            assert!(store.complete().unwrap().is_empty(), "{world_size} {micro_batch}");
            let error = store.checkpoint(2).unwrap_err();
            assert!(error.is_damage() && error.to_string().contains("manifest.json"), "{error}");
        }
        assert!(!store.checkpoint(3).unwrap_err().is_damage(), "one that is not there is not damaged");
    }

    #[test]
    fn a_checkpoint_of_another_versions_layout_is_refused_and_not_trained_over() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::new(dir.path());
        write(&store, 1, b"x");
        write(&store, 2, b"x");
        let later = Manifest { format: checkpoint::FORMAT + 1, ..manifest(2) };
        fs::write(store.path(2).join(MANIFEST), serde_json::to_vec(&later).unwrap()).unwrap();
        for refused in
            [store.complete().unwrap_err(), store.newest().unwrap_err(), store.checkpoint(2).unwrap_err()]
        {
            let text = refused.to_string();
            assert!(text.contains("step-00000002") && text.contains("format 2 is unknown"), "{text}");
        }
    }

    #[test]
    fn a_damaged_checkpoint_is_set_aside_for_people_and_the_one_before_it_is_found() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::new(dir.path());
        (1..=3).for_each(|step| drop(write(&store, step, b"x")));
        assert_eq!(store.before(Step(3)), Some(Step(2)));
        store.set_aside(Step(3), "damaged");
        assert_eq!(store.before(Step(9)), Some(Step(2)));
        write(&store, 3, b"again, and damaged again");
        store.set_aside(Step(3), "damaged");
        for number in 1..=2 {
            assert!(dir.path().join(format!("checkpoints/step-00000003.damaged-{number}/part")).exists());
        }
        assert_eq!(store.before(Step(1)), None);
    }

    #[test]
    fn hostile_manifests_are_refused_or_read() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::new(dir.path());
        write(&store, 3, b"x");
        let path = store.path(3).join(MANIFEST);
        let sound = fs::read(&path).unwrap();
        coxswain_fuzz::Target::new("manifest.json", [sound]).holds(1 << 20, 512).check(|bytes| {
            fs::write(&path, bytes).unwrap();
            for found in store.complete().unwrap_or_default() {
                found.bytes();
                assert!((1..=MAX_WORLD).contains(&found.manifest.world_size));
            }
            drop(store.checkpoint(3));
            store.before(Step(9));
        });
    }

    #[test]
    fn one_that_was_set_aside_is_damaged_and_the_one_before_it_is_looked_for() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::new(dir.path());
        (1..=2).for_each(|step| drop(write(&store, step, b"x")));
        store.set_aside(Step(2), DAMAGED);
        let error = store.checkpoint(2).unwrap_err();
        assert!(error.is_damage() && error.to_string().contains("step-00000002.damaged-1"), "{error}");
        assert_eq!(store.before(Step(2)), Some(Step(1)));
        write(&store, 2, b"y");
        assert!(store.checkpoint(2).is_ok(), "written again");
    }

    #[test]
    fn pruning_keeps_the_newest_and_never_the_last_one_away() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::new(dir.path());
        (1..=4).for_each(|step| drop(write(&store, step, b"x")));
        store.prune(2, None);
        let steps =
            |store: &Store| store.complete().unwrap().iter().map(|c| c.manifest.step).collect::<Vec<_>>();
        assert_eq!(steps(&store), [3, 4]);
        store.prune(1, Some(3));
        assert_eq!(steps(&store), [3, 4], "the best one stays");
        store.prune(0, None);
        assert_eq!(steps(&store), [3, 4], "no step has been taken from the newest");
    }

    #[test]
    fn what_people_have_put_there_is_neither_counted_nor_removed() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::new(dir.path());
        (1..=3).for_each(|step| drop(write(&store, step, b"x")));
        let root = dir.path().join("checkpoints");
        let theirs = ["step-best", "step-00000002-copy", "step-00000001.old", "step-notes"];
        for name in &theirs[..3] {
            fs::create_dir(root.join(name)).unwrap();
            fs::copy(store.path(2).join(MANIFEST), root.join(name).join(MANIFEST)).unwrap();
        }
        fs::create_dir(root.join(theirs[3])).unwrap();
        // Of another step than its name says.
        fs::create_dir(store.path(9)).unwrap();
        fs::copy(store.path(2).join(MANIFEST), store.path(9).join(MANIFEST)).unwrap();
        store.stage(4).unwrap();
        store.prune(1, None);
        let steps: Vec<_> = store.complete().unwrap().iter().map(|found| found.manifest.step).collect();
        // The third, and the second, from which it was taken.
        assert_eq!(steps, [2, 3]);
        assert!(theirs.iter().all(|name| root.join(name).exists()) && store.path(9).exists());
    }

    #[test]
    fn what_crashes_left_behind_is_cleared_by_the_next_attempt() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::new(dir.path());
        let root = dir.path().join("checkpoints");
        write(&store, 1, b"x");
        // Saves that were broken off, of this step and of another; one that was being removed; one that lost
        // its manifest.
        for (left, file) in [
            (".tmp-step-00000002", "stale"),
            (".tmp-step-00000007", "part"),
            (".tmp-gone-0-step-00000003", MANIFEST),
            ("step-00000004", "part"),
        ] {
            fs::create_dir_all(root.join(left)).unwrap();
            fs::write(root.join(left).join(file), b"x").unwrap();
        }
        // And one whose manifest is there but garbled.
        fs::create_dir_all(root.join("step-00000005")).unwrap();
        fs::write(root.join("step-00000005").join(MANIFEST), b"{").unwrap();
        store.stage(2).unwrap();
        let mut names: Vec<_> = fs::read_dir(&root)
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        assert_eq!(names, [".tmp-step-00000002", "step-00000001", "step-00000005"]);
        assert_eq!(fs::read_dir(root.join(".tmp-step-00000002")).unwrap().count(), 0);
    }

    #[test]
    fn a_step_saved_again_takes_the_place_of_the_one_before() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::new(dir.path());
        write(&store, 3, b"before the rollback");
        let found = write(&store, 3, b"after it");
        assert_eq!(fs::read(found.verified("part").unwrap()).unwrap(), b"after it");
        assert_eq!(fs::read_dir(dir.path().join("checkpoints")).unwrap().count(), 1);
    }

    #[test]
    fn two_directories_change_places_at_once() {
        let dir = tempfile::tempdir().unwrap();
        let [one, two] = ["one", "two"].map(|name| dir.path().join(name));
        for path in [&one, &two] {
            fs::create_dir(path).unwrap();
            fs::write(path.join(path.file_name().unwrap()), b"").unwrap();
        }
        // What file systems refuse is done in two steps; there is nothing to see here then.
        if remove::exchange(&one, &two).is_ok() {
            assert!(one.join("two").exists() && two.join("one").exists());
        }
    }

    #[test]
    fn an_old_checkpoint_that_cannot_be_emptied_is_out_of_sight_all_the_same() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::new(dir.path());
        (1..=3).for_each(|step| drop(write(&store, step, b"x")));
        // As after a crash between its rename and its last file.
        let hidden = dir.path().join("checkpoints/.tmp-gone-0-step-00000001");
        fs::rename(store.path(1), &hidden).unwrap();
        assert_eq!(store.complete().unwrap().len(), 2);
        write(&store, 1, b"again");
        store.prune(1, None);
        assert_eq!(store.complete().unwrap()[0].manifest.step, 2);
    }
}
