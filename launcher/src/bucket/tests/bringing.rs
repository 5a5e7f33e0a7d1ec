//! From a bucket to an empty disk, or to one that is behind.

use std::{fs, path::Path};

use super::*;
use crate::bucket::{bring::bring, error::BucketError, local::Record, place::BucketPlace};

fn kept(steps: &[u64]) -> Fake {
    let fake = Fake::default();
    let mut owner = take(&fake, "there");
    for step in steps {
        owner.keep(*step, &set(*step), 9).unwrap();
    }
    fake
}

fn brought(fake: &Fake, output: &Path) -> Result<Option<u64>, BucketError> {
    Ok(bring(fake, AT, &fake.index().unwrap(), output)?.map(|brought| brought.step))
}

fn text(output: &Path, name: &str) -> String {
    fs::read_to_string(output.join(name)).unwrap_or_default()
}

#[test]
fn the_newest_set_is_brought_to_its_places() {
    let dir = tempfile::tempdir().unwrap();
    let output = dir.path().join("run");
    assert_eq!(brought(&kept(&[10, 20]), &output).unwrap(), Some(20));
    assert_eq!(text(&output, "checkpoints/step-00000020/trainables.safetensors"), "weights after 20");
    assert_eq!(text(&output, "coordinator/journal.redb"), "steps before 20");
    assert!(!output.join("checkpoints/step-00000010").exists() && !output.join("earlier-1").exists());
}

#[test]
fn a_damaged_set_gives_way_to_the_one_before_it_and_the_last_one_is_refused_by_its_object() {
    let dir = tempfile::tempdir().unwrap();
    let output = dir.path().join("run");
    let fake = kept(&[10, 20]);
    fake.damage("sets/000001-000002/coordinator/journal.redb");
    assert_eq!(brought(&fake, &output).unwrap(), Some(10));
    assert_eq!(text(&output, "coordinator/journal.redb"), "steps before 10");
    fs::remove_dir_all(&output).unwrap();
    let gone = "sets/000001-000001/checkpoints/step-00000010/manifest.json";
    fake.state().objects.remove(gone);
    let refused = brought(&fake, &output).unwrap_err().to_string();
    assert!(refused.contains("000002/coordinator/journal.redb") && refused.contains("restore the object"));
    assert!(!output.join("checkpoints").exists() && !output.join("coordinator").exists());
}

#[test]
fn a_disk_that_is_behind_is_set_aside_and_one_that_is_not_goes_on() {
    let dir = tempfile::tempdir().unwrap();
    let output = dir.path();
    let fake = kept(&[10, 20]);
    fs::create_dir_all(output.join("checkpoints/step-00000015")).unwrap();
    fs::create_dir_all(output.join("coordinator")).unwrap();
    fs::write(output.join("coordinator/journal.redb"), "of a launch before that one").unwrap();
    assert_eq!(brought(&fake, output).unwrap(), Some(20));
    assert_eq!(text(output, "earlier-1/coordinator/journal.redb"), "of a launch before that one");
    assert!(output.join("earlier-1/checkpoints/step-00000015").is_dir());

    // As far as anybody knows this directory's launch was the last, and its checkpoint cannot be read.
    let record = Record { address: AT.into(), launcher: "there".into(), ..Record::default() };
    record.write(output).unwrap();
    assert_eq!(brought(&fake, output).unwrap(), Some(20));
    let manifest = serde_json::json!({
        "format": 1, "step": 20, "epoch": 0, "world_size": 1, "spec_digest": "d", "version": "v",
        "dataset_fingerprint": "f", "micro_batch": 1, "files": {},
    });
    fs::write(output.join("checkpoints/step-00000020/manifest.json"), manifest.to_string()).unwrap();
    assert_eq!(brought(&fake, output).unwrap(), None, "it has what the bucket has");
    take(&fake, "elsewhere");
    assert_eq!(brought(&fake, output).unwrap(), Some(20), "the run has gone on elsewhere");
}

#[test]
fn a_path_that_leads_elsewhere_is_not_followed() {
    let dir = tempfile::tempdir().unwrap();
    let output = dir.path().join("run");
    for path in ["../outside", "/tmp/outside", "a/../../outside", ""] {
        let fake = Fake::default();
        take(&fake, "there").keep(10, &[source(path, "hostile")], 1).unwrap();
        let refused = brought(&fake, &output).unwrap_err();
        assert!(matches!(refused, BucketError::Damaged { .. }), "{path}: {refused}");
    }
    assert!(!dir.path().join("outside").exists());
}

/// The bucket as a launch finds it that is to have so many steps, with this output directory.
fn found(fake: &Fake, steps: u64, output: &Path) -> (BucketPlace, RunSpec) {
    let mut spec = spec(7);
    spec.train.steps = Some(steps);
    spec.run.output_dir = output.display().to_string();
    (BucketPlace::look_into(Box::new(fake.clone()), AT.to_owned(), &spec).unwrap(), spec)
}

#[test]
fn a_launch_that_is_to_end_before_what_is_done_is_refused_and_leaves_the_disk_as_it_is() {
    let dir = tempfile::tempdir().unwrap();
    let output = dir.path().join("run");
    let fake = kept(&[10, 20]);
    let (place, spec) = found(&fake, 19, &output);
    for refused in [place.coming(&spec).map(drop), place.bring(&spec).map(drop)] {
        let refused = refused.unwrap_err();
        assert!(matches!(refused, BucketError::BeyondItsEnd { step: 20, steps: 19, .. }), "{refused}");
    }
    assert!(!output.exists());
    // The same where an earlier launch has left something.
    fs::create_dir_all(output.join("checkpoints/step-00000015")).unwrap();
    assert!(place.coming(&spec).is_err() && place.bring(&spec).is_err());
    assert!(output.join("checkpoints/step-00000015").is_dir() && !output.join("earlier-1").exists());
    let (place, spec) = found(&fake, 20, &output);
    assert!(place.check_length(19).is_err(), "epochs may turn out to be fewer steps");
    assert_eq!(place.bring(&spec).unwrap().map(|brought| brought.step), Some(20));
}

#[test]
fn what_would_be_brought_is_known_by_its_step_and_data_set_before_it_is() {
    let dir = tempfile::tempdir().unwrap();
    let output = dir.path().join("run");
    let fake = Fake::default();
    let manifest = serde_json::json!({
        "format": 1, "step": 10, "epoch": 0, "world_size": 1, "spec_digest": "d", "version": "v",
        "dataset_fingerprint": "f", "micro_batch": 1, "files": {},
    });
    let manifest = source("checkpoints/step-00000010/manifest.json", &manifest.to_string());
    take(&fake, "there").keep(10, &[manifest], 1).unwrap();
    let (place, run) = found(&fake, 100, &output);
    let coming = place.coming(&run).unwrap().expect("this disk is empty");
    assert_eq!((coming.step.0, coming.dataset.as_deref()), (10, Some("f")));
    assert!(!output.exists());
    // One that cannot be read is found out where it is brought.
    let (place, run) = found(&kept(&[10]), 100, &output);
    assert!(place.coming(&run).unwrap().is_some_and(|coming| coming.dataset.is_none()));
}
