//! From a bucket to an empty disk, or to one that is behind.

use std::{fs, path::Path};

use super::*;
use crate::bucket::{bring::bring, error::BucketError, local::Record};

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
    assert!(refused.contains("000002/coordinator/journal.redb") && refused.contains("put the object back"));
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
