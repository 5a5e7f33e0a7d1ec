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

use coxswain_coordinator::{Opening, Resumption, ServeError, StartError, journal::Chronicle};
use coxswain_data::DataError;
use coxswain_proto::{document, ids::Step, plan, run_spec::RunSpec};
use coxswain_task::Samples;
use coxswain_worker::train::{
    TrainError, check_base, check_features, check_start, check_writable, lack_of_room,
};

use crate::{
    bucket::BucketPlace,
    credentials, endpoint,
    exit::{CliError, Exit, Outcome},
    launch::{
        inputs::process_env,
        plan::Plan,
        rendezvous::{self, stays_here},
    },
    plan::check::{Forecast, refuse_for_device},
    tasks::tasks,
};

/// Digits of a fingerprint that are shown.
const SHOWN: usize = 16;

/// A run as it is told before it begins.
pub struct Outline {
    /// What it will take of this machine's memory.
    pub forecast: Forecast,
    /// Data, in words.
    pub data: String,
    /// Steps.
    pub steps: plan::Plan,
    /// Why its checkpoints will not fit on the disk.
    lack_of_room: Option<String>,
}

/// A run that can be launched.
pub struct LaunchableRun {
    /// What is known of it with its data; none where a network keeps them away for now.
    pub outline: Option<Outline>,
    /// The step of the checkpoint that it goes on from, if there is one.
    pub resumes_at: Option<Step>,
    /// What there is of the run here; none where its bucket has more, which is to be brought.
    pub opening: Option<Opening>,
    /// Steps that are recorded, and lost: the run is to go on, and has no checkpoint.
    lost: usize,
    /// Newer checkpoints than that, which and how they are damaged.
    damaged: Vec<String>,
}

impl LaunchableRun {
    /// Says what a user may want to know before the run begins.
    pub fn warn(&self) {
        let shortfall = self.outline.as_ref().and_then(|outline| outline.forecast.shortfall.as_ref());
        if let Some(shortfall) = shortfall {
            tracing::warn!("{shortfall}; if a step runs out of memory, the micro-batch is halved");
        }
        if let Some(lack) = self.outline.as_ref().and_then(|outline| outline.lack_of_room.as_ref()) {
            tracing::warn!("{lack}");
        }
        if let Some(step) = self.resumes_at.filter(|_| !self.damaged.is_empty()) {
            let damaged = self.damaged.join(", ");
            tracing::warn!(
                "damaged checkpoints: {damaged}; the run continues from step {step}; to keep later steps, \
                 restore copies of the damaged checkpoints before starting it"
            );
        }
        if self.lost > 0 {
            tracing::warn!(
                "recorded steps: {}, but there is no checkpoint, so the run starts over; restore \
                 checkpoints/ to resume, or set train.resume=false if this is intended",
                self.lost,
            );
        }
    }
}

/// A run as it was before this launch.
struct PriorRun<'a> {
    spec: Option<&'a RunSpec>,
    /// Fingerprint of its data set.
    fingerprint: Option<&'a str>,
    /// Training samples of that, if they are known.
    samples: Option<u64>,
}

impl<'a> PriorRun<'a> {
    fn recorded(records: &'a Chronicle) -> Self {
        let dataset = records.dataset.as_ref();
        Self {
            spec: records.spec.as_ref(),
            fingerprint: dataset.map(|dataset| dataset.fingerprint.as_str()),
            samples: dataset.map(|dataset| dataset.training_samples),
        }
    }
}

impl From<StartError> for CliError {
    fn from(error: StartError) -> Self {
        let exit = match error {
            StartError::AllDamaged { .. } => Exit::BadInput,
            _ => Exit::Usage,
        };
        Self::new(exit, ServeError::from(error))
    }
}

/// Refuses what cannot be launched as planned, with what a bucket has of it, perhaps with a new journal.
/// Leaves nothing on the disk.
pub fn accept(
    spec: &RunSpec,
    plan: &Plan,
    place: Option<&BucketPlace>,
    new_journal: bool,
) -> Result<LaunchableRun, CliError> {
    refuse_for_device(spec, plan.device)?;
    let output_dir = Path::new(&spec.run.output_dir);
    check_writable(output_dir).map_err(|error| {
        let place = output_dir.display();
        CliError::usage(format!("run.output_dir: {place} cannot be written: {error}; choose another one"))
    })?;
    let coming = place.map(|place| place.coming(spec)).transpose()?.flatten();
    // What lies here will be set aside for what comes.
    let opening = coming.is_none().then(|| Opening::read(spec, new_journal)).transpose()?;
    let launched = place.and_then(BucketPlace::launched);
    let before = match (&coming, &opening) {
        (Some(coming), _) => {
            let fingerprint = coming.dataset.as_deref();
            Some(PriorRun { spec: launched.as_ref(), fingerprint, samples: None })
        }
        (None, Some(opening)) => opening.records.as_ref().map(PriorRun::recorded),
        (None, None) => None,
    };
    let before = before.filter(|_| spec.train.resume);
    if let Some(ran) = before.as_ref().and_then(|before| before.spec) {
        same_model(ran, spec)?;
    }
    let here = opening.as_ref().map(|opening| opening.accept(spec)).transpose()?;
    let Resumption { step, damaged } = here.unwrap_or_default();
    let resumes_at = coming.as_ref().map(|coming| coming.step).or(step);
    let task = tasks().of(spec).map_err(CliError::bad_input)?;
    check_base(task, spec)?;
    check_features(spec)?;
    let outline = match task.open(spec) {
        Ok(samples) => {
            same_data(before, spec, &*samples)?;
            let steps = plan::Plan::new(&spec.train, samples.epoch_len()).map_err(TrainError::from)?;
            place.map(|place| place.check_length(steps.total_steps())).transpose()?;
            // One of the first samples can be read.
            let told = samples.describe().or_else(|error| unless_it_passes(error).map(|()| Vec::new()))?;
            let place = match spec.data.path.as_str() {
                "" => String::new(),
                path => format!("{path}: "),
            };
            let (trained, held_out) = (samples.training_len(), samples.holdout().len());
            let told: String = told.iter().map(|(_, text)| format!(", {text}")).collect();
            let data = format!("{place}{trained} training samples, {held_out} held out{told}");
            let forecast = forecast(spec, plan)?;
            if resumes_at.is_none() {
                check_start(task, spec, forecast.question.layout()).map_err(TrainError::from)?;
            }
            let lack_of_room = lack_of_room(spec, forecast.question.layout(), resumes_at.is_some());
            Some(Outline { forecast, data, steps, lack_of_room })
        }
        Err(error) => unless_it_passes(error).map(|()| None)?,
    };
    take_place(spec, plan)?;
    let records = opening.as_ref().and_then(|opening| opening.records.as_ref());
    let recorded = records.filter(|_| spec.train.resume).map_or(0, |records| records.steps.len());
    let lost = if resumes_at.is_none() { recorded } else { 0 };
    Ok(LaunchableRun { outline, resumes_at, opening, lost, damaged })
}

/// What passes by itself workers wait for.
fn unless_it_passes(error: DataError) -> Outcome {
    if error.passes() { Ok(()) } else { Err(TrainError::from(error).into()) }
}

/// A run that no micro-batch makes fit is refused; one that is too large as it is lowers its micro-batch.
fn forecast(spec: &RunSpec, plan: &Plan) -> Result<Forecast, CliError> {
    let local = u64::from(plan.nproc_per_node);
    let ranks = u64::from(plan.ranks(plan.nnodes.min));
    let forecast = Forecast::predict(spec, plan.device, ranks, local)?;
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

/// Refuses another data set than the one that the run has trained on.
fn same_data(before: Option<PriorRun<'_>>, spec: &RunSpec, samples: &dyn Samples) -> Outcome {
    let known = before.and_then(|before| Some((before.fingerprint?, before.spec?, before.samples)));
    let Some((fingerprint, ran, training_samples)) = known else { return Ok(()) };
    let found = samples.fingerprint().to_string();
    if found == fingerprint {
        return Ok(());
    }
    let counted = training_samples.map(|samples| format!(" and {samples} training samples"));
    Err(CliError::bad_input(format!(
        "data.path {}: not the data set that this run has trained on: it has fingerprint {} and {} training samples; \
             the run's data set had fingerprint {}{} (data.path {}). Set data.path to that data set (it may have \
             been moved), or choose another run.output_dir. To start over in this one, set train.resume=false",
        spec.data.path,
        short(&found),
        samples.epoch_len(),
        short(fingerprint),
        counted.unwrap_or_default(),
        ran.data.path,
    )))
}

fn same_model(before: &RunSpec, spec: &RunSpec) -> Result<(), CliError> {
    let (Some(here), Some(differences)) = (spec.base(), document::other_base(before, spec)) else {
        return Ok(());
    };
    let moved = differences.iter().find(|difference| difference.key == here.key);
    let there = moved.map_or_else(|| format!("{:?}", here.path), |moved| moved.left.clone());
    let named = |spec: &RunSpec| match &spec.train.base_digest {
        Some(digest) => format!("digest {}", short(digest)),
        None => "no digest".to_owned(),
    };
    Err(CliError::bad_input(format!(
        "{} {}: apparently not the pretrained model that this run began with: it has {}; the run's model had {} \
             ({}). Use that model (one with a digest may be at another path), or choose another \
             run.output_dir. To start over in this one, remove {}/coordinator and set train.resume=false",
        here.key,
        here.path,
        named(spec),
        named(before),
        there,
        spec.run.output_dir,
    )))
}

fn short(fingerprint: &str) -> &str {
    fingerprint.get(..SHOWN).unwrap_or(fingerprint)
}
