//! A run that goes on sees the data set and the pretrained model that it has trained on, wherever they lie by
//! now. Said at launch: workers would find out when they join, and could not say what to do.

use std::path::Path;

use coxswain_coordinator::journal;
use coxswain_proto::{document, run_spec::RunSpec};

use crate::{
    exit::{Exit, Failed},
    tasks::tasks,
};

/// Digits of a fingerprint that are shown.
const SHOWN: usize = 16;

/// Refuses another data set or another pretrained model than that of the run's records. Where there are
/// none, where they are another run's, or where the data cannot be opened, it is for the coordinator and the
/// workers to say.
pub fn check(spec: &RunSpec) -> Result<(), Failed> {
    if !spec.train.resume {
        return Ok(());
    }
    let Ok(before) = journal::read(&Path::new(&spec.run.output_dir).join("coordinator")) else {
        return Ok(());
    };
    let Some(ran) = before.spec else { return Ok(()) };
    same_model(&ran, spec)?;
    let (Some(dataset), before) = (before.dataset, ran) else { return Ok(()) };
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
