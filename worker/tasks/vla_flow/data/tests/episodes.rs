//! Which episodes are trained on.

use coxswain_models::families::shelf;
use std::collections::BTreeSet;

use coxswain_proto::run_spec::{EpisodeRange, RunSpec};
use coxswain_task::Samples;
use proptest::prelude::*;

use super::recording::Recording;
use crate::vla_flow::{config::VlaSpec, data::Dataset};

/// What is trained on of a recording of 5, 1, 7 and 4 frames.
fn trained(episodes: &[(u64, u64)], holdout: &[usize]) -> Result<Vec<u64>, String> {
    let recording = Recording::default();
    let dir = recording.write();
    let mut spec = recording.spec(dir.path());
    spec.vla_mut().data.episodes =
        episodes.iter().map(|&(first, last)| EpisodeRange { first, last }).collect();
    spec.data.holdout_episodes = holdout.to_vec();
    let dataset = Dataset::from_spec(&spec, shelf()).map_err(|error| error.to_string())?;
    Ok((0..dataset.training_len()).filter_map(|number| dataset.training_sample(number)).collect())
}

#[test]
fn episodes_that_are_listed_and_not_held_out_are_trained_on() {
    assert_eq!(trained(&[(1, 1), (3, 3)], &[0]).unwrap(), [5, 13, 14, 15, 16]);
    assert_eq!(trained(&[(0, 1), (1, 3)], &[2]).unwrap(), [0, 1, 2, 3, 4, 5, 13, 14, 15, 16]);
    let error = trained(&[(2, 4)], &[]).unwrap_err();
    assert!(error.contains("no episodes 2-4; there are 4") && error.contains("data.episodes"), "{error}");
    let error = trained(&[(1, 1)], &[1]).unwrap_err();
    assert!(error.contains("leave at least one episode"), "{error}");
}

#[test]
fn a_chunk_that_reaches_beyond_every_episode_is_told() {
    let recording = Recording::default();
    let dir = recording.write();
    let told = |horizon| {
        let mut spec = recording.spec(dir.path());
        spec.vla_mut().data.horizon = horizon;
        let warnings = Samples::warnings(&Dataset::from_spec(&spec, shelf()).unwrap());
        warnings.into_iter().find(|told| told.contains("data.horizon"))
    };
    assert_eq!(told(7), None, "the longest episode has 7 rows");
    assert!(told(8).is_some_and(|told| told.contains("reaches 7 rows ahead, but the longest episode has 7")));
}

/// Opens a recording of which this file of episode 2 is gone, with changes of the run.
fn without_a_file(change: impl FnOnce(&mut RunSpec)) -> Result<Dataset, String> {
    let recording = Recording::default();
    let dir = recording.write();
    std::fs::remove_file(dir.path().join("data/chunk-000/file-001.parquet")).unwrap();
    let mut spec = recording.spec(dir.path());
    change(&mut spec);
    let dataset = Dataset::from_spec(&spec, shelf()).map_err(|error| error.to_string());
    // Rows are read later than this, so the directory has to live on.
    drop(dir.keep());
    dataset
}

#[test]
fn files_of_episodes_that_are_not_selected_need_not_be_there() {
    let range = |first, last| EpisodeRange { first, last };
    let error = without_a_file(|_| ()).err().unwrap();
    for part in ["file-001.parquet", "there is no such file, but it should hold episodes 2", "[2]"] {
        assert!(error.contains(part), "{part:?} is not in: {error}");
    }
    let listed = without_a_file(|spec| spec.vla_mut().data.episodes = vec![range(0, 1), range(3, 3)]);
    let excluded = without_a_file(|spec| spec.vla_mut().data.exclude_episodes = vec![range(2, 2)]);
    for dataset in [listed.unwrap(), excluded.unwrap()] {
        assert_eq!(dataset.training_len(), 10);
        let trained = (0..10).filter_map(|number| dataset.training_sample(number));
        assert!(trained.map(|index| dataset.sample(index)).all(|sample| sample.is_ok()));
    }
}

#[test]
fn episodes_that_are_excluded_are_counted_and_contradictions_are_refused() {
    let range = |first, last| EpisodeRange { first, last };
    let excluded = |list: Vec<EpisodeRange>, holdout: Vec<usize>| {
        without_a_file(|spec| {
            spec.vla_mut().data.exclude_episodes = list;
            spec.data.holdout_episodes = holdout;
        })
    };
    let told = excluded(vec![range(1, 2)], vec![]).unwrap().describe().unwrap();
    let text = "2 episodes with 8 frames left out (data.exclude_episodes)";
    assert!(told.iter().any(|(_, line)| line == text), "{told:?}");
    let error = excluded(vec![range(2, 2)], vec![2]).err().unwrap();
    assert!(error.contains("episode 2 is in data.holdout_episodes and in data.exclude_episodes"), "{error}");
    let error = excluded(vec![range(2, 9)], vec![]).err().unwrap();
    assert!(error.contains("no episodes 2-9; there are 4") && error.contains("exclude_episodes"), "{error}");
    let error = excluded(vec![range(0, 3)], vec![]).err().unwrap();
    assert!(error.contains("leave at least one episode"), "{error}");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]
    #[test]
    fn the_order_of_a_list_and_repetitions_in_it_say_nothing(
        mut ranges in prop::collection::vec((0u64..4, 0u64..4), 1..5),
    ) {
        for range in &mut ranges {
            *range = (range.0.min(range.1), range.0.max(range.1));
        }
        let starts = [0u64, 5, 6, 13, 17];
        let listed: BTreeSet<u64> = ranges.iter().flat_map(|&(first, last)| first..=last).collect();
        let wanted: Vec<u64> =
            listed.iter().flat_map(|&n| starts[n as usize]..starts[n as usize + 1]).collect();
        prop_assert_eq!(trained(&ranges, &[]).unwrap(), wanted);
    }
}
