//! What follows when memory runs out: less at a time, on all ranks; and what to change where one sample alone
//! does not fit.

use coxswain_proto::ids::{Rank, Step};

use super::{TrainError, training::Training, vote::Verdict};
use crate::{feeder::Prepared, link::Report};
use coxswain_nn::kernels::Tape;

impl<B: Tape<Base = B>> Training<'_, B> {
    /// Half the micro-batch for this step and all later ones; the samples and the global batch stay. `own` is
    /// this rank's own failure, `last` the micro-batch that it ran last.
    pub(super) fn shrink(
        &mut self,
        step: Step,
        verdict: &Verdict,
        own: Option<TrainError>,
        last: Option<Prepared>,
    ) -> Result<(), TrainError> {
        let (_, rank) = verdict.fared;
        if self.feed.micro_batch == 1 {
            return Err(match own {
                Some(TrainError::DoesNotFit { step, source }) => {
                    TrainError::Exhausted { step, source: source.into(), advice: self.run.advice() }
                }
                Some(other) => other,
                None => TrainError::PeerFailed(rank),
            });
        }
        if let Some(own) = &own {
            self.members.link.report(Report::Note(own.to_string()))?;
        }
        let meanwhile = match verdict.gave_up {
            0 => String::new(),
            1 => "; one other rank gave its attempt up at once".to_owned(),
            others => format!("; {others} other ranks gave their attempts up at once"),
        };
        self.halve(step, rank, &Smaller { why: "out of memory", meanwhile: &meanwhile })?;
        self.recut(step, last)
    }

    /// A rank is being swapped out: the next step takes less, as long as there is less to take.
    pub(super) fn relieve(&mut self, next: Step, rank: Rank) -> Result<(), TrainError> {
        if self.feed.micro_batch == 1 {
            tracing::warn!(%rank, advice = self.run.advice(), "a rank is swapped out with one sample at a time");
            return Ok(());
        }
        self.halve(next, rank, &Smaller { why: "its memory is being swapped out", meanwhile: "" })?;
        self.recut(next, None)
    }

    /// The process before that of `rank` was killed because memory ran out, which nothing here saw coming:
    /// all take less from now on, as long as there is less to take.
    pub(super) fn shrink_after_kill(&mut self, rank: Rank) -> Result<(), TrainError> {
        self.feed.asks_for_less = false;
        if self.feed.micro_batch == 1 {
            let advice = self.run.advice();
            tracing::warn!(%rank, advice, "a rank was killed because memory ran out, with one sample at a time");
            return Ok(());
        }
        let why = "a process was killed because memory ran out";
        self.halve(self.next, rank, &Smaller { why, meanwhile: "" })
    }

    /// Puts what is ready, and this micro-batch, together anew in the size that counts now.
    pub(super) fn recut(&mut self, step: Step, last: Option<Prepared>) -> Result<(), TrainError> {
        self.feed.prefetch.replan(step, self.feed.micro_batch, last)?;
        // Old and new rows were there side by side for a moment, which no step does: it is no reason to halve
        // again.
        self.stats.meter.overlook();
        Ok(())
    }

    /// Takes half, and says so.
    fn halve(&mut self, step: Step, rank: Rank, words: &Smaller<'_>) -> Result<(), TrainError> {
        let (before, Smaller { why, meanwhile }) = (self.feed.micro_batch, words);
        self.feed.micro_batch = before.div_ceil(2);
        if self.members.assignment.rank == rank {
            self.members.link.report(Report::Note(format!(
                "{why}: all ranks go from {before} to {} samples at a time, the same samples a step, from step {step} on{meanwhile}",
                self.feed.micro_batch
            )))?;
        }
        tracing::warn!(step = step.0, %rank, micro_batch = self.feed.micro_batch, "a rank needs less ({why}): all ranks halve the micro-batch");
        Ok(())
    }
}

/// Words around a smaller micro-batch.
struct Smaller<'a> {
    /// What befell the rank that follows.
    why: &'static str,
    /// What the others did; may be empty.
    meanwhile: &'a str,
}
