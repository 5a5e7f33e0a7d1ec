//! The best checkpoint so far is kept, with what the run would leave had it ended there.

use std::{fs, io};

use coxswain_nn::kernels::Tape;
use coxswain_proto::ids::Rank;

use super::average::{AVERAGE_DIR, write_average};
use super::export::{place, texts};
use crate::link::Phase;
use crate::train::{Best, Results, TrainError, Workbench};

impl Results {
    /// Saves a checkpoint, and lets rank 0 export what the run would leave here. What the file system refuses
    /// is told and survived: the best before stays the best.
    pub fn keep<B: Tape<Base = B>>(
        &mut self,
        bench: &mut Workbench<'_, B>,
        best: &Best,
    ) -> Result<(), TrainError> {
        let step = bench.next;
        self.save_once(bench)?;
        if self.saved != Some(step) {
            return Ok(());
        }
        bench.enter(Phase::Checkpoint, step)?;
        // All ranks lend their part of the average; what the file system refuses rank 0 is told below.
        let (output_dir, is_writer) = (bench.run.output_dir.clone(), bench.members.rank() == Rank(0));
        let mut staged = is_writer.then(|| Best::stage(&output_dir));
        bench.with_average(|bench| {
            if let Some(Ok(into)) = &staged
                && let Err(error) = write_average(bench, &into.join(AVERAGE_DIR))
            {
                staged = Some(Err(io::Error::other(error)));
            }
            Ok(())
        })?;
        let Some(staged) = staged else { return Ok(()) };
        let texts = texts(&*bench.feed.samples, bench.run.spec);
        let exported = best.publish(&output_dir, |into| {
            staged?;
            bench.learner.export_artifacts(into, step, &bench.stats.meter).map_err(io::Error::other)?;
            texts.iter().try_for_each(|file| fs::write(place(into, file)?, &file.text))
        });
        if let Err(error) = exported {
            tracing::error!(step = step.0, %error, "the best checkpoint is not exported; training continues");
        }
        Ok(())
    }
}
