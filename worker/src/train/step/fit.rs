//! What follows when memory runs out: less at a time, on all ranks; and what to change where one sample alone
//! does not fit.

use coxswain_nn::kernels::Tape;
use coxswain_proto::ids::{Rank, Step};

use super::{transaction::Transaction, vote::Verdict};
use crate::train::{Facts, Feed, Members, TrainError};
use crate::{feeder::RowBatch, link::Report, memory::Meter};

impl<B: Tape<Base = B>> Transaction<'_, '_, B> {
    /// Half the micro-batch for this step and all later ones; the samples and the global batch stay. `own` is
    /// this rank's own failure.
    pub(super) fn shrink(&mut self, verdict: &Verdict, own: Option<TrainError>) -> Result<(), TrainError> {
        let (_, rank) = verdict.fared;
        let bench = &mut *self.bench;
        if bench.feed.micro_batch == 1 {
            return Err(match own {
                Some(TrainError::DoesNotFit { step, source }) => {
                    TrainError::Exhausted { step, source: source.into(), advice: bench.run.advice() }
                }
                Some(other) => other,
                None => TrainError::PeerFailed(rank),
            });
        }
        if let Some(own) = &own {
            bench.members.link.report(Report::Note(own.to_string()))?;
        }
        let meanwhile = match verdict.gave_up {
            0 => String::new(),
            1 => "; one other rank stopped its attempt early".to_owned(),
            others => format!("; {others} other ranks stopped their attempts early"),
        };
        let words = Smaller { why: "out of memory", meanwhile: &meanwhile };
        bench.feed.halve(&mut bench.members, self.step, rank, &words)?;
        self.recut()
    }

    /// Puts what is ready, and the micro-batch that ran last, together anew in the size that counts now.
    pub(super) fn recut(&mut self) -> Result<(), TrainError> {
        self.bench.feed.recut(&mut self.bench.stats.meter, self.step, self.last.take())
    }
}

impl Feed {
    /// A rank is being swapped out: the next step takes less, as long as there is less to take.
    pub(super) fn relieve<B: Tape<Base = B>>(
        &mut self,
        run: &Facts<'_, B>,
        members: &mut Members,
        meter: &mut Meter,
        next: Step,
        rank: Rank,
    ) -> Result<(), TrainError> {
        if self.micro_batch == 1 {
            tracing::warn!(%rank, advice = run.advice(), "a rank's memory is being swapped out, and its micro-batch is already 1");
            return Ok(());
        }
        self.halve(members, next, rank, &Smaller { why: "memory is being swapped out", meanwhile: "" })?;
        self.recut(meter, next, None)
    }

    /// The process before that of `rank` was killed because memory ran out, which nothing here saw coming:
    /// all take less from now on, as long as there is less to take.
    pub(in crate::train) fn shrink_after_kill<B: Tape<Base = B>>(
        &mut self,
        run: &Facts<'_, B>,
        members: &mut Members,
        next: Step,
        rank: Rank,
    ) -> Result<(), TrainError> {
        self.asks_for_less = false;
        if self.micro_batch == 1 {
            let advice = run.advice();
            tracing::warn!(%rank, advice, "a rank was killed because memory ran out, and its micro-batch is already 1");
            return Ok(());
        }
        let why = "a process was killed because memory ran out";
        self.halve(members, next, rank, &Smaller { why, meanwhile: "" })
    }

    fn recut(&mut self, meter: &mut Meter, step: Step, last: Option<RowBatch>) -> Result<(), TrainError> {
        self.prefetch.replan(step, self.micro_batch, last)?;
        // Old and new rows were there side by side for a moment, which no step does: it is no reason to halve
        // again.
        meter.overlook();
        Ok(())
    }

    /// Takes half, and says so.
    fn halve(
        &mut self,
        members: &mut Members,
        step: Step,
        rank: Rank,
        words: &Smaller<'_>,
    ) -> Result<(), TrainError> {
        let (before, Smaller { why, meanwhile }) = (self.micro_batch, words);
        self.micro_batch = before.div_ceil(2);
        if members.assignment.rank == rank {
            members.link.report(Report::Note(format!(
                "{why}: all ranks go from a micro-batch of {before} to {} from step {step} on, with the \
                 same samples in each step{meanwhile}",
                self.micro_batch
            )))?;
        }
        tracing::warn!(step = step.0, %rank, micro_batch = self.micro_batch, "a rank must use less memory ({why}): all ranks halve the micro-batch");
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
