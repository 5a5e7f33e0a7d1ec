//! Whether a run can be launched here: one answer for `cox run`, which asks before it writes its first byte,
//! and for `cox check`.
//!
//! ```text
//! run         is it the one in the output directory, and is that not further than it is to go?
//! model, data do they open, and are they what the run has trained on?
//! machine     the device, its memory, the port, and the token that strangers would be asked for
//! ```
//!
//! What a launch finds out later is what may change meanwhile: another launcher, a disk, a network.

use std::path::Path;

use coxswain_coordinator::{Opening, ServeError, StartError, journal::Chronicle};
use coxswain_proto::{document, ids::Step, plan, run_spec::RunSpec};
use coxswain_task::Samples;
use coxswain_worker::train::{TrainError, check_base, check_features, check_writable};

use crate::{
    credentials, endpoint,
    exit::{Exit, Failed, Outcome},
    launch::{
        inputs::process_env,
        plan::Plan,
        rendezvous::{self, stays_here},
    },
    plan::check::{Forecast, refuse_float16_on_cpu},
    tasks::tasks,
};

/// Digits of a fingerprint that are shown.
const SHOWN: usize = 16;

/// A run that can be launched.
pub struct Accepted {
    /// What it will take of this machine's memory; none where a network keeps the data away for now.
    pub forecast: Option<Forecast>,
    /// The step of the checkpoint that it goes on from, if there is one.
    pub resumes_at: Option<Step>,
}

impl From<StartError> for Failed {
    fn from(error: StartError) -> Self {
        Self::usage(ServeError::from(error))
    }
}

/// Refuses what cannot be launched as planned. Leaves nothing on the disk.
pub fn accept(spec: &RunSpec, plan: &Plan) -> Result<Accepted, Failed> {
    refuse_float16_on_cpu(spec, plan.device)?;
    let output_dir = Path::new(&spec.run.output_dir);
    check_writable(output_dir).map_err(|error| {
        let place = output_dir.display();
        Failed::usage(format!("run.output_dir: {place} cannot be written: {error}; choose another one"))
    })?;
    let opening = Opening::read(output_dir)?;
    let records = opening.records.as_ref().filter(|_| spec.train.resume);
    if let Some(ran) = records.and_then(|records| records.spec.as_ref()) {
        same_model(ran, spec)?;
    }
    let resumes_at = opening.accept(spec)?;
    let task = tasks().of(spec).map_err(|unknown| Failed::new(Exit::BadInput, unknown))?;
    check_base(task, spec)?;
    check_features(spec)?;
    let forecast = match task.open(spec) {
        Ok(samples) => {
            same_data(records, spec, &*samples)?;
            Some(forecast(spec, plan)?)
        }
        // Workers wait for it.
        Err(error) if error.passes() => None,
        Err(error) => return Err(TrainError::from(error).into()),
    };
    take_place(spec, plan)?;
    Ok(Accepted { forecast, resumes_at })
}

/// A run that no micro-batch makes fit is refused; one that is too large as it is lowers its micro-batch.
fn forecast(spec: &RunSpec, plan: &Plan) -> Result<Forecast, Failed> {
    let local = u64::from(plan.nproc_per_node);
    let ranks = u64::from(plan.ranks(plan.nnodes.min));
    let forecast = Forecast::of(spec, plan.device, ranks, local)?;
    match &forecast.shortfall {
        Some(shortfall) if shortfall.is_certain() => Err(shortfall.refusal()),
        _ => Ok(forecast),
    }
}

/// The output directory and the port are free, and strangers are kept out. A launcher of several may come to
/// a run that lives already.
fn take_place(spec: &RunSpec, plan: &Plan) -> Outcome {
    credentials::check(&process_env, stays_here(plan))?;
    if plan.nnodes.max > 1 {
        return Ok(());
    }
    endpoint::refuse_active(Path::new(&spec.run.output_dir))?;
    rendezvous::take_role(plan).map(drop)
}

/// Refuses another data set than the one that the run has trained on, and one that leaves nothing to train
/// on.
fn same_data(records: Option<&Chronicle>, spec: &RunSpec, samples: &dyn Samples) -> Outcome {
    plan::Plan::new(&spec.train, samples.epoch_len()).map_err(TrainError::from)?;
    let before = records.and_then(|records| Some((records.dataset.as_ref()?, records.spec.as_ref()?)));
    let Some((dataset, before)) = before else { return Ok(()) };
    let found = samples.fingerprint().to_string();
    if found == dataset.fingerprint {
        return Ok(());
    }
    Err(Failed::new(
        Exit::BadInput,
        format!(
            "data.path {}: another data set than the one that this run has trained on: fingerprint {}, {} training samples here; \
             {}, {} training samples in {} before. Name the data set that it was begun with, which may have been moved; or \
             begin another run, with a run.output_dir of its own, or anew in this one with train.resume=false",
            spec.data.path,
            short(&found),
            samples.epoch_len(),
            short(&dataset.fingerprint),
            dataset.training_samples,
            before.data.path,
        ),
    ))
}

fn same_model(before: &RunSpec, spec: &RunSpec) -> Result<(), Failed> {
    let (Some(here), Some(differences)) = (spec.base(), document::other_base(before, spec)) else {
        return Ok(());
    };
    let moved = differences.iter().find(|difference| difference.key == here.key);
    let there = moved.map_or_else(|| format!("{:?}", here.path), |moved| moved.left.clone());
    let named = |spec: &RunSpec| match &spec.train.base_digest {
        Some(digest) => format!("digest {}", short(digest)),
        None => "no digest".to_owned(),
    };
    Err(Failed::new(
        Exit::BadInput,
        format!(
            "{} {}: another pretrained model than the one that this run was begun with, as far as is known: {} here; {} before, in \
             {}. Name the model that it was begun with, which may have been moved if it has a digest; or begin another run, with a \
             run.output_dir of its own, or anew in this one with train.resume=false",
            here.key,
            here.path,
            named(spec),
            named(before),
            there,
        ),
    ))
}

fn short(fingerprint: &str) -> &str {
    fingerprint.get(..SHOWN).unwrap_or(fingerprint)
}
