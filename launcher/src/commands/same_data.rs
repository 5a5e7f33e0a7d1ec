//! A run that goes on sees the data set that it has trained on, wherever that lies by now. Said at launch:
//! workers would find out when they join, and could not say what to do.

use std::path::Path;

use coxswain_coordinator::journal;
use coxswain_proto::{document, run_spec::RunSpec};

use crate::{
    exit::{Exit, Failed},
    tasks::tasks,
};

/// Digits of a fingerprint that are shown.
const SHOWN: usize = 16;

/// Refuses another data set than that of the run's records. Where there are none, where they are another
/// run's, or where the data cannot be opened, it is for the coordinator and the workers to say.
pub fn check(spec: &RunSpec) -> Result<(), Failed> {
    if !spec.train.resume {
        return Ok(());
    }
    let Ok(before) = journal::read(&Path::new(&spec.run.output_dir).join("coordinator")) else {
        return Ok(());
    };
    let (Some(dataset), Some(before)) = (before.dataset, before.spec) else { return Ok(()) };
    if document::core_digest(&before) != document::core_digest(spec) {
        return Ok(());
    }
    let Some(samples) = tasks().of(spec).ok().and_then(|task| task.open(spec).ok()) else { return Ok(()) };
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

fn short(fingerprint: &str) -> &str {
    fingerprint.get(..SHOWN).unwrap_or(fingerprint)
}
