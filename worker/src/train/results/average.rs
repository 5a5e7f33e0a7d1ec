//! The average of the weights (`optimizer.ema_decay`) in the place of the weights, for a look at held-out
//! samples or an export; and what is exported of it beside them.
//!
//! ```text
//! RUN/ema/..        the task's artifacts of the average, the run, and a manifest: as of `cox export`
//! RUN/best/ema/..   the same of the best checkpoint, which is chosen by the weights themselves
//! ```
//!
//! Every rank exchanges its part of the average with its part of the weights, and all gather. Its own weights
//! wait where the average was, and are put back whatever has happened meanwhile: they are the only copy of
//! this version that recovery asks this rank for.

use std::{fs, io, path::Path};

use coxswain_nn::kernels::{Tape, flat::Flat};
use coxswain_proto::ids::{Rank, Step};

use super::export::{ExportManifest, texts};
use crate::train::{Learner, Members, TrainError, Workbench};
use crate::{link::Phase, memory};

/// The directory of the artifacts of the weights' average, below that of the weights'.
pub(super) const AVERAGE_DIR: &str = "ema";

/// Writes them to a directory, which is made.
pub(super) fn write_average<B: Tape<Base = B>>(
    bench: &mut Workbench<'_, B>,
    dir: &Path,
) -> Result<(), TrainError> {
    let refused = |source| TrainError::Io { action: "create", path: dir.to_owned(), source };
    fs::create_dir_all(dir).map_err(refused)?;
    let artifacts = bench.learner.export_artifacts(dir, bench.next, &bench.stats.meter)?;
    let texts = texts(&*bench.feed.samples, bench.run.spec);
    ExportManifest::from_bench(bench).write(dir, artifacts, texts)
}

impl<B: Tape<Base = B>> Workbench<'_, B> {
    /// Lets all ranks work with the average where the weights are; none if none is kept, on all ranks alike.
    pub(in crate::train) fn with_average<R>(
        &mut self,
        work: impl FnOnce(&mut Self) -> Result<R, TrainError>,
    ) -> Result<Option<R>, TrainError> {
        if !self.learner.exchange_average() {
            return Ok(None);
        }
        let step = self.next;
        let lent = self.learner.gather(&mut self.members).and_then(|()| self.learner.settled(step));
        let outcome = lent.and_then(|()| work(self));
        self.learner.exchange_average();
        self.learner.settled(step)?;
        let outcome = outcome?;
        self.learner.gather(&mut self.members)?;
        self.learner.settled(step)?;
        Ok(Some(outcome))
    }

    /// Lets rank 0 write the average's artifacts, with what says what they are; where none is kept, those of
    /// an earlier launch go, which are not of this end. All ranks come here.
    pub(in crate::train) fn export_average(&mut self) -> Result<(), TrainError> {
        self.enter(Phase::Checkpoint, self.next)?;
        let dir = self.run.output_dir.join(AVERAGE_DIR);
        let is_writer = self.members.rank() == Rank(0);
        let kept = self.with_average(|bench| if is_writer { write_average(bench, &dir) } else { Ok(()) })?;
        if kept.is_some() || !is_writer {
            return Ok(());
        }
        match fs::remove_dir_all(&dir) {
            Err(source) if source.kind() != io::ErrorKind::NotFound => {
                Err(TrainError::Io { action: "remove", path: dir, source })
            }
            _ => Ok(()),
        }
    }
}

impl<B: Tape<Base = B>> Learner<B> {
    /// Puts this rank's part of the average in the place of its part of the weights, or back; whether one is
    /// kept.
    fn exchange_average(&mut self) -> bool {
        let Some(held) = &mut self.held else { return false };
        let mut flat: B::Flat = self.trainables.take();
        let kept = held.optimizer.exchange_average(&mut flat);
        self.trainables.put(flat);
        kept
    }

    /// All parts from the ranks that own them.
    fn gather(&mut self, members: &mut Members) -> Result<(), TrainError> {
        let mut flat: B::Flat = self.trainables.take();
        let gathered = members.comm.all_gather_parts(flat.lend().into(), self.optimizer().cuts());
        self.trainables.put(flat);
        Ok(gathered?)
    }

    /// Waits for the device: refused now, memory is missing where weights should be, and what this rank holds
    /// is its replica's to give (`Workbench::update`).
    fn settled(&self, step: Step) -> Result<(), TrainError> {
        let settled = B::sync(&self.trainables.device()).map_err(|error| error.to_string());
        match memory::refused().or(settled.err()) {
            Some(detail) => Err(TrainError::Device { step, detail }),
            None => Ok(()),
        }
    }
}
