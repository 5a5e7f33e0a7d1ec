//! Evaluation while training goes on: every `eval.every` steps all ranks look at the held-out samples
//! together, and where the first measure is the least so far, that state is kept as the best.
//!
//! Nothing of it reaches training: weights, moments, draws and the order of samples are as without it. Its
//! figures go with the report of a step, the one that was done before it; those of an evaluation that a fault
//! has broken off are made again where the next generation begins, and go with the report of its first step.

use coxswain_nn::kernels::Tape;
use coxswain_proto::{
    ids::{Rank, Step},
    report::Metric,
};

use super::{
    evaluate::{evaluate, evaluate_average},
    held_out::HeldOutError,
};
use crate::train::{Best, Facts, Members, TrainError, Workbench};
use crate::{
    collective::BufMut,
    link::{Report, StepReport},
};

/// What was found on held-out samples, and told.
#[derive(Debug, Default)]
pub(in crate::train) struct ValidationState {
    /// The held-out error before the first step, once it has been looked at.
    pub before: Option<Option<HeldOutError>>,
    /// Steps done at the newest evaluation, and what it found of the weights and of their average.
    newest: Option<(Step, Option<HeldOutError>, Option<HeldOutError>)>,
    /// Figures, until a step's report takes them along.
    unreported: Vec<Metric>,
    /// Whether the run was described in the log.
    pub(super) announced: bool,
}

impl ValidationState {
    /// Where a run or a generation begins: looks at what was not looked at yet. It may be that a fault has
    /// broken off the evaluation that was due here. What is better than all before is to be kept.
    pub fn begin<B: Tape<Base = B>>(
        &mut self,
        bench: &mut Workbench<'_, B>,
    ) -> Result<Option<Best>, TrainError> {
        let seen = if self.before.is_none() { Some(evaluate(bench)?) } else { None };
        self.before = self.before.take().or_else(|| seen.clone());
        if is_due(&bench.run, bench.next) { self.validate(bench, seen) } else { Ok(None) }
    }

    /// Looks at held-out samples behind a step that is done, if that is due. Their figures go with its
    /// report, whatever else becomes of this.
    pub fn behind<B: Tape<Base = B>>(
        &mut self,
        bench: &mut Workbench<'_, B>,
        done: &mut StepReport,
    ) -> Result<Option<Best>, TrainError> {
        let validated = if is_due(&bench.run, bench.next) { self.validate(bench, None) } else { Ok(None) };
        let figures = std::mem::take(&mut self.unreported);
        if bench.members.rank().0 == 0 && !figures.is_empty() {
            done.metrics = done.metrics.iter().cloned().chain(figures).collect();
        }
        validated
    }

    /// What there is to see of the weights and of their average where a run ends.
    pub fn end<B: Tape<Base = B>>(
        &mut self,
        bench: &mut Workbench<'_, B>,
    ) -> Result<[Option<HeldOutError>; 2], TrainError> {
        match self.newest.take() {
            Some((step, found, of_average)) if step == bench.next => Ok([found, of_average]),
            _ => Ok([evaluate(bench)?, evaluate_average(bench)?]),
        }
    }

    /// Whether the held-out error was a number in the beginning and is none in the end.
    pub fn is_spoilt(&self, after: Option<&HeldOutError>) -> bool {
        let is_finite = |error: &HeldOutError| error.first().map(|(_, value)| value.is_finite());
        let before = self.before.as_ref().and_then(Option::as_ref).and_then(is_finite);
        before == Some(true) && after.and_then(is_finite) == Some(false)
    }

    /// Looks at held-out samples, unless `found` says what there is to see. What is better than all before is
    /// to be kept.
    fn validate<B: Tape<Base = B>>(
        &mut self,
        bench: &mut Workbench<'_, B>,
        found: Option<Option<HeldOutError>>,
    ) -> Result<Option<Best>, TrainError> {
        let step = bench.next;
        let found = match found {
            Some(found) => found,
            None => evaluate(bench)?,
        };
        let of_average = evaluate_average(bench)?;
        self.newest = Some((step, found.clone(), of_average.clone()));
        let Some(error) = found else { return Ok(None) };
        self.unreported = error.figures();
        self.unreported.extend(of_average.iter().flat_map(HeldOutError::figures_of_average));
        let spec = bench.run.spec;
        let Some(found) = Best::from_measures(step, &error, spec.eval.seed.unwrap_or(spec.run.seed)) else {
            return Ok(None);
        };
        let before = best_so_far(&bench.run, &mut bench.members, &found)?;
        let is_better = found.value.is_finite() && before.is_none_or(|(_, best)| found.value < best);
        let best = if is_better { Some((step, found.value)) } else { before };
        if let Some((step, value)) = best {
            let told = [Metric::best("step", step.0 as f64), Metric::best(&found.measure, value)];
            self.unreported.extend(told);
        }
        if bench.members.rank().0 == 0 {
            let better = best.filter(|_| !is_better);
            let line =
                format!("held-out error after step {step}: {}", words(&error, of_average.as_ref(), better));
            bench.members.link.report(Report::Note(line))?;
            for (set, measures) in error.by_set() {
                let line = format!("held-out error of {set} after step {step}: {measures}");
                bench.members.link.report(Report::Note(line))?;
            }
        }
        Ok(is_better.then_some(found))
    }
}

/// Whether held-out samples are looked at after so many steps.
fn is_due<B: Tape<Base = B>>(run: &Facts<'_, B>, done: Step) -> bool {
    let every = run.spec.eval.every;
    every > 0 && done.0 > 0 && (done.0.is_multiple_of(every) || done.0 == run.plan.total_steps())
}

/// The best checkpoint that rank 0 finds, of those that `found` compares with: its step, and how good it is.
fn best_so_far<B: Tape<Base = B>>(
    run: &Facts<'_, B>,
    members: &mut Members,
    found: &Best,
) -> Result<Option<(Step, f64)>, TrainError> {
    let mut told = [0.0; 3];
    if members.rank().0 == 0
        && let Some(best) = Best::load(&run.output_dir).filter(|best| best.compares_with(found))
    {
        told = [1.0, best.step as f64, best.value];
    }
    members.comm.broadcast(BufMut::F64(&mut told), Rank(0))?;
    Ok((told[0] > 0.0).then_some((Step(told[1] as u64), told[2])))
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
