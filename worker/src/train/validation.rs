//! Evaluation while training goes on: every `eval.every` steps all ranks look at the held-out samples
//! together, and where the first measure is the least so far, that state is kept as the best.
//!
//! Nothing of it reaches training: weights, moments, draws and the order of samples are as without it. Its
//! figures go with the report of a step, the one that was done before it; those of an evaluation that a fault
//! has broken off are made again where the next generation begins, and go with the report of its first step.

use std::{fs, io};

use coxswain_nn::kernels::Tape;
use coxswain_proto::{
    ids::{Rank, Step},
    report::Metric,
};

use super::{
    TrainError,
    average::{self, AVERAGE_DIR},
    best::Best,
    export::{place, texts},
    held_out::HeldOutError,
    training::Training,
};
use crate::{
    collective::BufMut,
    link::{Phase, Report, StepReport},
};

/// Whether held-out samples are looked at after so many steps.
pub(super) fn is_validated<B: Tape<Base = B>>(training: &Training<'_, B>, done: Step) -> bool {
    let every = training.run.spec.eval.every;
    every > 0 && done.0 > 0 && (done.0.is_multiple_of(every) || done.0 == training.run.plan.total_steps())
}

/// Looks at them, unless `found` says what there is to see. What is better than all before is to be kept.
pub(super) fn validate<B: Tape<Base = B>>(
    training: &mut Training<'_, B>,
    found: Option<Option<HeldOutError>>,
) -> Result<Option<Best>, TrainError> {
    let step = training.next;
    let found = match found {
        Some(found) => found,
        None => training.evaluate()?,
    };
    let of_average = average::evaluate(training)?;
    training.validation.newest = Some((step, found.clone(), of_average.clone()));
    let Some(error) = found else { return Ok(None) };
    training.validation.unreported = error.figures();
    training.validation.unreported.extend(of_average.iter().flat_map(HeldOutError::figures_of_average));
    let spec = training.run.spec;
    let Some(found) = Best::of(step, &error, spec.eval.seed.unwrap_or(spec.run.seed)) else {
        return Ok(None);
    };
    let before = best_so_far(training, &found)?;
    let is_better = found.value.is_finite() && before.is_none_or(|(_, best)| found.value < best);
    let best = if is_better { Some((step, found.value)) } else { before };
    if let Some((step, value)) = best {
        let told = [Metric::best("step", step.0 as f64), Metric::best(&found.measure, value)];
        training.validation.unreported.extend(told);
    }
    if training.members.rank().0 == 0 {
        let better = best.filter(|_| !is_better);
        let line =
            format!("held-out error after step {step}: {}", words(&error, of_average.as_ref(), better));
        training.members.link.report(Report::Note(line))?;
        for (set, measures) in error.by_set() {
            let line = format!("held-out error of {set} after step {step}: {measures}");
            training.members.link.report(Report::Note(line))?;
        }
    }
    Ok(is_better.then_some(found))
}

/// The best checkpoint that rank 0 finds, of those that `found` compares with: its step, and how good it is.
fn best_so_far<B: Tape<Base = B>>(
    training: &mut Training<'_, B>,
    found: &Best,
) -> Result<Option<(Step, f64)>, TrainError> {
    let mut told = [0.0; 3];
    if training.members.rank().0 == 0
        && let Some(best) = Best::read(&training.run.output_dir).filter(|best| best.compares_with(found))
    {
        told = [1.0, best.step as f64, best.value];
    }
    training.members.comm.broadcast(BufMut::F64(&mut told), Rank(0))?;
    Ok((told[0] > 0.0).then_some((Step(told[1] as u64), told[2])))
}

/// Saves a checkpoint, and lets rank 0 export what the run would leave here. What the file system refuses
/// is told and survived: the best before stays the best.
pub(super) fn keep<B: Tape<Base = B>>(training: &mut Training<'_, B>, best: &Best) -> Result<(), TrainError> {
    let step = training.next;
    if training.saved != Some(step) {
        training.save()?;
    }
    if training.saved != Some(step) {
        return Ok(());
    }
    training.enter(Phase::Checkpoint, step)?;
    // All ranks lend their part of the average; what the file system refuses rank 0 is told below.
    let (output_dir, is_writer) = (training.run.output_dir.clone(), training.members.rank() == Rank(0));
    let mut staged = is_writer.then(|| Best::stage(&output_dir));
    average::with_average(training, |training| {
        if let Some(Ok(into)) = &staged
            && let Err(error) = average::write(training, &into.join(AVERAGE_DIR))
        {
            staged = Some(Err(io::Error::other(error)));
        }
        Ok(())
    })?;
    let Some(staged) = staged else { return Ok(()) };
    let texts = texts(&*training.feed.samples, training.run.spec);
    let exported = best.publish(&output_dir, |into| {
        staged?;
        training.export_artifacts(into).map_err(io::Error::other)?;
        texts.iter().try_for_each(|file| fs::write(place(into, file)?, &file.text))
    });
    if let Err(error) = exported {
        tracing::error!(step = step.0, %error, "the best checkpoint is not exported; training goes on");
    }
    Ok(())
}

/// Looks at held-out samples behind a step that is done, if that is due. Their figures go with its report,
/// whatever else becomes of this.
pub(super) fn behind<B: Tape<Base = B>>(
    training: &mut Training<'_, B>,
    done: &mut StepReport,
) -> Result<Option<Best>, TrainError> {
    let validated = if is_validated(training, training.next) { validate(training, None) } else { Ok(None) };
    let figures = std::mem::take(&mut training.validation.unreported);
    if training.members.rank().0 == 0 && !figures.is_empty() {
        done.metrics = done.metrics.iter().cloned().chain(figures).collect();
    }
    validated
}

/// The measures, those of the average, and beside them the best, if another step's is.
fn words(error: &HeldOutError, of_average: Option<&HeldOutError>, better: Option<(Step, f64)>) -> String {
    let measures = error.measures.iter().map(|(name, value)| format!("{name} {value:.4}"));
    let averaged = of_average.into_iter().flat_map(|of| of.measures.iter());
    let measures: Vec<_> =
        measures.chain(averaged.map(|(name, value)| format!("ema/{name} {value:.4}"))).collect();
    let beside = better.map(|(step, value)| format!("; the best is {value:.4}, after step {step}"));
    format!("{}{}", measures.join(", "), beside.unwrap_or_else(|| "; the best so far".into()))
}
