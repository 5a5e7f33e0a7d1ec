//! Which episodes are trained on.

use coxswain_models::families::shelf;
use std::collections::BTreeSet;

use proptest::prelude::*;

use super::recording::Recording;
use crate::vla_flow::{
    config::{EpisodeRange, VlaSpec},
    data::Dataset,
};

/// What is trained on of a recording of 5, 1, 7 and 4 frames.
fn trained(episodes: &[(u64, u64)], holdout: &[usize]) -> Result<Vec<u64>, String> {
    let recording = Recording::default();
    let dir = recording.write();
    let mut spec = recording.spec(dir.path());
    spec.vla_mut().data.episodes =
        episodes.iter().map(|&(first, last)| EpisodeRange { first, last }).collect();
    spec.data.holdout_episodes = holdout.to_vec();
    let dataset = Dataset::open(&spec, shelf()).map_err(|error| error.to_string())?;
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
