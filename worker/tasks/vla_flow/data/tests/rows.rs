//! One bad row among many of its row group costs the samples that need it, and no others.

use coxswain_models::families::shelf;
use coxswain_task::Samples;

use super::{broken::refused, recording::Recording};
use crate::vla_flow::data::Dataset;

/// The data set of a recording whose files have a row group each, as aggregated data sets have them.
fn opened(recording: Recording) -> Dataset {
    let recording = Recording { group_per_episode: false, ..recording };
    let dir = recording.write();
    let dataset = Dataset::from_spec(&recording.spec(dir.path()), shelf()).unwrap();
    // Rows are read later than this, so the directory has to live on.
    drop(dir.keep());
    dataset
}

#[test]
fn a_row_without_a_value_costs_the_samples_that_need_it() {
    let whole = opened(Recording::default());
    // Row 1 of the first file, whose two episodes share its row group.
    for (feature, lost) in [("observation.state", vec![1]), ("action", vec![0, 1])] {
        let dataset = opened(Recording { missing: Some((feature, 1)), ..Recording::default() });
        let failing: Vec<_> = (0..dataset.len()).filter(|index| dataset.sample(*index).is_err()).collect();
        assert_eq!(failing, lost, "{feature}");
        let fault = dataset.sample(0).map(drop).err();
        let says = ["sample 1 (episode 0, frame 1)", feature, "a value is missing (null)", "repair"];
        refused(dataset.sample(1), &says);
        if let Some(fault) = fault {
            let row = dataset.damaged_row(0, &fault);
            assert_eq!((row.row, row.begin, row.end), (1, 0, 2));
        }
        assert_eq!(dataset.sample(3).unwrap(), whole.sample(3).unwrap());
        assert_eq!(dataset.sample(5).unwrap(), whole.sample(5).unwrap());
    }
}

#[test]
fn a_row_of_an_episode_that_is_not_trained_on_costs_nothing() {
    let recording = Recording {
        missing: Some(("observation.state", 1)),
        group_per_episode: false,
        ..Recording::default()
    };
    let dir = recording.write();
    let mut spec = recording.spec(dir.path());
    spec.data.holdout_episodes = vec![0];
    let dataset = Dataset::from_spec(&spec, shelf()).unwrap();
    let trained = (0..dataset.training_len()).filter_map(|number| dataset.training_sample(number));
    assert!(trained.map(|index| dataset.read(index)).all(|sample| sample.is_ok()));
}

#[test]
fn a_column_that_holds_nothing_of_the_kind_blames_the_row_that_is_asked_for() {
    let dataset = opened(Recording { state_width: 2, ..Recording::default() });
    refused(dataset.sample(3), &["sample 3 (episode 0, frame 3)", "length 2, but info.json says 3"]);
    refused(dataset.sample(8), &["sample 8 (episode 2, frame 2)", "length 2, but info.json says 3"]);
}
