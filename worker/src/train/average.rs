//! The average of the weights (`optimizer.ema_decay`) in the place of the weights, for a look at held-out
//! samples or an export; and what is exported of it beside them.
//!
//! ```text
//! RUN/ema/..        the task's artifacts of the average, the run, and a manifest: as of `cox export`
//! RUN/best/ema/..   the same of the best checkpoint, which is chosen by the weights themselves
//! ```
//!
//! Every rank puts its part of the average where its part of the weights is, and all gather. Its own weights
//! wait beside, a part and not the whole, and are put back whatever has happened meanwhile: they are the only
//! copy of this version that recovery asks this rank for.

use std::{fs, io, path::Path};

use coxswain_nn::kernels::{Tape, flat::Flat};

use super::{
    TrainError,
    checkpoint::SPEC_FILE,
    export::{ExportManifest, pretty, write_text},
    held_out::HeldOutError,
    learner::Learner,
    members::Members,
    training::Training,
};
use crate::link::Phase;
use coxswain_task::TextFile;

/// The directory of the artifacts of the weights' average, below that of the weights'.
pub(super) const AVERAGE_DIR: &str = "ema";

/// Lets all ranks work with the average where the weights are; none if none is kept, on all ranks alike.
pub(super) fn with_average<B: Tape<Base = B>, R>(
    training: &mut Training<'_, B>,
    work: impl FnOnce(&mut Training<'_, B>) -> Result<R, TrainError>,
) -> Result<Option<R>, TrainError> {
    let Some(weights) = training.learner.lend_to_average() else { return Ok(None) };
    let outcome = training.learner.gather(&mut training.members).and_then(|()| work(training));
    training.learner.put_own_part(&weights);
    let outcome = outcome?;
    training.learner.gather(&mut training.members)?;
    Ok(Some(outcome))
}

/// The held-out error of the average; none if none is kept, or there is none to tell.
pub(super) fn evaluate<B: Tape<Base = B>>(
    training: &mut Training<'_, B>,
) -> Result<Option<HeldOutError>, TrainError> {
    Ok(with_average(training, |training| training.evaluate())?.flatten())
}

/// Lets rank 0 write the average's artifacts, with what says what they are. All ranks come here.
pub(super) fn export<B: Tape<Base = B>>(training: &mut Training<'_, B>) -> Result<(), TrainError> {
    training.enter(Phase::Checkpoint, training.next)?;
    let dir = training.run.output_dir.join(AVERAGE_DIR);
    with_average(training, |training| match training.members.rank().0 {
        0 => write(training, &dir),
        _ => Ok(()),
    })?;
    Ok(())
}

/// Writes them to a directory that is nobody's yet.
pub(super) fn stage<B: Tape<Base = B>>(training: &mut Training<'_, B>, dir: &Path) -> Result<(), TrainError> {
    match fs::remove_dir_all(dir) {
        Err(source) if source.kind() != io::ErrorKind::NotFound => {
            Err(TrainError::Io { action: "clear", path: dir.to_owned(), source })
        }
        _ => write(training, dir),
    }
}

fn write<B: Tape<Base = B>>(training: &mut Training<'_, B>, dir: &Path) -> Result<(), TrainError> {
    let refused = |source| TrainError::Io { action: "create", path: dir.to_owned(), source };
    fs::create_dir_all(dir).map_err(refused)?;
    let written = training.export_artifacts(dir)?;
    let mut files: Vec<_> = written.into_iter().map(|artifact| (artifact.path, artifact.what)).collect();
    for TextFile { path, what, text } in training.feed.samples.files() {
        write_text(&dir.join(path), &text)?;
        files.push((path, what));
    }
    write_text(&dir.join(SPEC_FILE), &pretty(training.run.spec))?;
    files.push((SPEC_FILE, "the run"));
    ExportManifest::of(training).write(dir, &files)
}

impl<B: Tape<Base = B>> Learner<B> {
    /// Puts this rank's part of the average in the place of its part of the weights, which it returns; none
    /// if no average is kept.
    fn lend_to_average(&mut self) -> Option<Vec<f32>> {
        let (own, average) = self.held.as_ref()?.optimizer.average()?;
        let mut flat: B::Flat = self.trainables.take();
        let weights = flat.read(own.clone()).into_owned();
        let average = average.read(0..average.len());
        flat.edit(|values| values[own].copy_from_slice(&average));
        self.trainables.put(flat);
        Some(weights)
    }

    fn put_own_part(&mut self, weights: &[f32]) {
        let Some((own, _)) = self.held.as_ref().and_then(|held| held.optimizer.average()) else { return };
        let mut flat: B::Flat = self.trainables.take();
        flat.edit(|values| values[own].copy_from_slice(weights));
        self.trainables.put(flat);
    }

    /// All parts from the ranks that own them.
    fn gather(&mut self, members: &mut Members) -> Result<(), TrainError> {
        let mut flat: B::Flat = self.trainables.take();
        let gathered = members.comm.all_gather_in_place(flat.lend().into());
        self.trainables.put(flat);
        Ok(gathered?)
    }
}
