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
    export::{pretty, write_text},
    held_out::HeldOutError,
    learner::Learner,
    members::Members,
    training::Training,
};
use coxswain_task::TextFile;

impl<B: Tape<Base = B>> Training<'_, B> {
    /// Lets all ranks work with the average where the weights are; none if none is kept, on all ranks alike.
    pub(super) fn with_average<R>(
        &mut self,
        work: impl FnOnce(&mut Self) -> Result<R, TrainError>,
    ) -> Result<Option<R>, TrainError> {
        let Some(weights) = self.learner.lend_to_average() else { return Ok(None) };
        let outcome = self.learner.gather(&mut self.members).and_then(|()| work(self));
        self.learner.put_own_part(&weights);
        let outcome = outcome?;
        self.learner.gather(&mut self.members)?;
        Ok(Some(outcome))
    }

    /// The held-out error of the average; none if none is kept, or there is none to tell.
    pub(super) fn evaluate_average(&mut self) -> Result<Option<HeldOutError>, TrainError> {
        Ok(self.with_average(Self::evaluate)?.flatten())
    }

    /// Lets rank 0 write the average's artifacts below `dir`, with what says what they are. All ranks come
    /// here.
    pub(super) fn export_average(&mut self, dir: &Path) -> Result<(), TrainError> {
        self.with_average(|training| match training.members.rank().0 {
            0 => training.write_average(dir),
            _ => Ok(()),
        })?;
        Ok(())
    }

    /// Writes them to a directory that is nobody's yet.
    pub(super) fn stage_average(&mut self, dir: &Path) -> Result<(), TrainError> {
        match fs::remove_dir_all(dir) {
            Err(source) if source.kind() != io::ErrorKind::NotFound => {
                Err(TrainError::Io { action: "clear", path: dir.to_owned(), source })
            }
            _ => self.write_average(dir),
        }
    }

    fn write_average(&mut self, dir: &Path) -> Result<(), TrainError> {
        let refused = |source| TrainError::Io { action: "create", path: dir.to_owned(), source };
        fs::create_dir_all(dir).map_err(refused)?;
        let written = self.export_artifacts(dir)?;
        let mut files: Vec<_> = written.into_iter().map(|artifact| (artifact.path, artifact.what)).collect();
        for TextFile { path, what, text } in self.feed.samples.files() {
            write_text(&dir.join(path), &text)?;
            files.push((path, what));
        }
        write_text(&dir.join(SPEC_FILE), &pretty(self.run.spec))?;
        files.push((SPEC_FILE, "the run"));
        self.manifest().write(dir, &files)
    }
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
