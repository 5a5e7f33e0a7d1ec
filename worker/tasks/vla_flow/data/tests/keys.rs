//! Names of samples follow exactly what the model sees of them.

use crate::vla_flow::config::VlaSpec;
use coxswain_models::families::shelf;
use std::{
    path::Path,
    time::{Duration, Instant},
};

use super::recording::{Recording, png_of};
use crate::vla_flow::data::Dataset;
use coxswain_feature_store::{SampleKey, Store};
use coxswain_task::SampleKeys;

/// Keys of a data set, with nothing remembered.
fn keys_of(recording: &Recording, dir: &Path) -> Vec<Option<SampleKey>> {
    let dataset = Dataset::from_spec(&recording.spec(dir), shelf()).unwrap();
    let store = tempfile::tempdir().unwrap();
    let keys = dataset.sample_keys(&Store::open(store.path(), None).unwrap()).unwrap();
    all(&dataset, &keys)
}

fn all(dataset: &Dataset, keys: &SampleKeys) -> Vec<Option<SampleKey>> {
    (0..dataset.len()).map(|index| keys.get(index)).collect()
}

fn written(recording: &Recording) -> Vec<Option<SampleKey>> {
    keys_of(recording, recording.write().path())
}

/// Samples whose keys differ.
fn changed(before: &[Option<SampleKey>], after: &[Option<SampleKey>]) -> Vec<usize> {
    assert_eq!(before.len(), after.len());
    (0..before.len()).filter(|i| before[*i] != after[*i]).collect()
}

#[test]
fn one_pixel_changes_the_key_of_its_sample_alone() {
    let before = written(&Recording::default());
    assert_eq!(before.len(), 17);
    assert!(before.iter().all(Option::is_some));
    let distinct: std::collections::HashSet<_> = before.iter().collect();
    assert_eq!(distinct.len(), 17, "every image has its own shade");
    let mut pixels = [60; 3 * 30 * 40];
    pixels[3 * (5 * 40 + 7) + 1] += 1;
    let changed_image = png_of(&pixels, 30, 40);
    let one_camera =
        Recording { cameras: vec![("observation.images.front", 30, 40)], ..Recording::default() };
    let spoiled = Recording { image: Some((6, Some(changed_image))), ..one_camera.clone() };
    assert_eq!(changed(&written(&one_camera), &written(&spoiled)), [6]);
}

#[test]
fn one_word_of_a_task_changes_its_samples_and_the_template_all() {
    let recording = Recording::default();
    let before = written(&recording);
    // Sample 3 gets the task of another episode.
    let moved = Recording { task: Some((3, 2)), ..recording.clone() };
    assert_eq!(changed(&before, &written(&moved)), [3]);
    let dir = recording.write();
    let mut spec = recording.spec(dir.path());
    spec.vla_mut().data.prompt = "{task} now".into();
    let dataset = Dataset::from_spec(&spec, shelf()).unwrap();
    let store = tempfile::tempdir().unwrap();
    let keys = dataset.sample_keys(&Store::open(store.path(), None).unwrap()).unwrap();
    assert_eq!(changed(&before, &all(&dataset, &keys)).len(), 17);
    assert!(dataset.prompt_template().contains("{task} now<|im_end|>"));
}

#[test]
fn numbers_that_the_vision_language_model_does_not_see_change_nothing() {
    let before = written(&Recording::default());
    let moved = Recording { poison: Some(("action", 4, 0.25)), ..Recording::default() };
    assert_eq!(changed(&before, &written(&moved)), [0usize; 0]);
    // Nor does where the samples lie.
    let elsewhere = Recording { episodes: vec![(5, 0), (1, 0), (7, 0), (4, 0)], ..Recording::default() };
    assert_eq!(changed(&before, &written(&elsewhere)), [0usize; 0]);
}

#[test]
fn the_order_of_cameras_counts() {
    let recording = Recording::default();
    let dir = recording.write();
    let mut swapped = recording.clone();
    swapped.cameras.reverse();
    assert_eq!(changed(&keys_of(&recording, dir.path()), &keys_of(&swapped, dir.path())).len(), 17);
}

#[test]
fn a_table_of_keys_holds_what_single_samples_say() {
    let recording = Recording::default();
    let dir = recording.write();
    let dataset = Dataset::from_spec(&recording.spec(dir.path()), shelf()).unwrap();
    for (index, key) in keys_of(&recording, dir.path()).into_iter().enumerate() {
        assert_eq!(Some(dataset.sample_key(index as u64).unwrap()), key);
    }
    assert!(dataset.sample_key(17).is_err());
}

#[test]
fn a_sample_that_cannot_be_read_has_no_key_and_fails_later_as_before() {
    let lost = Recording { image: Some((3, None)), ..Recording::default() };
    let dir = lost.write();
    let keys = keys_of(&lost, dir.path());
    assert_eq!((0..17).filter(|i| keys[*i].is_none()).collect::<Vec<_>>(), [3]);
    let dataset = Dataset::from_spec(&lost.spec(dir.path()), shelf()).unwrap();
    assert!(dataset.sample_key(3).unwrap_err().to_string().contains("no image bytes"));
    assert!(dataset.sample(3).unwrap_err().to_string().contains("no image bytes"));
    let untold = Recording { task: Some((2, 99)), ..Recording::default() };
    assert!(written(&untold)[2].is_none());
}

#[test]
fn a_second_launch_reads_no_images() {
    // Files that have not changed for longer than the clock's resolution: those of the repository.
    let dataset = Dataset::from_spec(&super::spec(&super::mini()), shelf()).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let store = Store::open(dir.path(), None).unwrap();
    let first = dataset.sample_keys(&store).unwrap();
    assert_eq!((first.inputs_read, first.len() as u64), (dataset.len(), dataset.len()));
    let second = dataset.sample_keys(&store).unwrap();
    assert_eq!(second.inputs_read, 0);
    assert_eq!(all(&dataset, &first), all(&dataset, &second));

    // Another prompt makes other keys of the same digests.
    let mut spec = super::spec(&super::mini());
    spec.vla_mut().data.prompt = "please {task}".into();
    let third = Dataset::from_spec(&spec, shelf()).unwrap().sample_keys(&store).unwrap();
    assert_eq!(third.inputs_read, 0);
    assert_ne!(third.get(0), first.get(0));
    // What a garbled memo knew is read again.
    let memo = std::fs::read_dir(store.keys_dir()).unwrap().map(|e| e.unwrap().path());
    let memo = memo.into_iter().find(|path| path.extension().is_some_and(|e| e == "memo")).unwrap();
    let bytes = std::fs::read(&memo).unwrap();
    std::fs::write(&memo, &bytes[..bytes.len() / 2]).unwrap();
    let again = dataset.sample_keys(&store).unwrap();
    assert_eq!((again.inputs_read, all(&dataset, &again)), (dataset.len(), all(&dataset, &first)));
}

#[test]
fn what_could_not_be_read_is_not_remembered_as_having_no_key() {
    let (recording, dir) = (Recording::default(), Recording::default().write());
    let [lost, sound] = ["file-000.parquet", "file-001.parquet"];
    let path = dir.path().join("data/chunk-000").join(lost);
    let mut bytes = std::fs::read(&path).unwrap();
    let footer = u32::from_le_bytes(bytes[bytes.len() - 8..][..4].try_into().unwrap()) as usize;
    let end = bytes.len() - 8 - footer;
    bytes[4..end].fill(0xa5);
    std::fs::write(&path, bytes).unwrap();
    // The younger of the two: when it is remembered, the other one could have been.
    let path = path.with_file_name(sound);
    std::fs::write(&path, std::fs::read(&path).unwrap()).unwrap();
    let dataset = Dataset::from_spec(&recording.spec(dir.path()), shelf()).unwrap();
    let (store, deadline) = (tempfile::tempdir().unwrap(), Instant::now() + Duration::from_secs(60));
    let store = Store::open(store.path(), None).unwrap();
    let remembered = |file: &str| {
        let files = std::fs::read_dir(store.keys_dir()).into_iter().flatten();
        let mut files = files.map(|entry| entry.unwrap().path());
        let memo = files.find(|path| path.extension().is_some_and(|end| end == "memo"));
        let bytes = memo.map_or(Vec::new(), |memo| std::fs::read(memo).unwrap());
        bytes.windows(file.len()).any(|name| name == file.as_bytes())
    };
    // Files that have just been written are remembered a little later.
    while !remembered(sound) {
        assert!(Instant::now() < deadline, "nothing is ever remembered");
        assert!(!dataset.sample_keys(&store).unwrap().is_empty());
    }
    assert!(!remembered(lost));
}

#[test]
fn bounds_of_pixels_change_the_description_of_preprocessing() {
    let describe = |max_pixels| {
        let mut spec = super::spec(&super::mini());
        spec.vla_mut().data.max_pixels = max_pixels;
        Dataset::from_spec(&spec, shelf()).unwrap().preprocessing()
    };
    assert_eq!(describe(None), describe(None));
    assert_ne!(describe(None), describe(Some(28 * 28 * 40)));
}
