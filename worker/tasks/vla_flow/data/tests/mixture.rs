//! Two data sets as one: numbers, padding, cameras that are missing, what cannot be mixed.

use coxswain_models::families::shelf;
use std::collections::BTreeMap;

use coxswain_data::DataError;
use coxswain_feature_store::Store;
use coxswain_task::Samples;

use super::{broken::refused, recording::Recording};
use crate::vla_flow::{
    config::{DataSet, VlaSpec},
    data::{Mixture, Outline, PolicyFile, Sample, SampleDims},
    testing::pair::{FRONT, TwoSets},
};

fn refused_pair(change: impl FnOnce(&mut Vec<DataSet>), says: &[&str]) {
    refused(Mixture::from_spec(&TwoSets::new(change).spec, shelf()), says);
}

#[test]
fn samples_are_those_of_each_set_padded_to_the_widest() {
    let pair = TwoSets::new(|_| {});
    let (mixture, sets) = (pair.mixture(), [pair.alone(0), pair.alone(1)]);
    let widest = SampleDims { state: 3, action: 3, ..sets[0].dims() };
    assert_eq!([sets[0].dims().action, sets[1].dims().state], [2, 2]);
    let all = (0..2).flat_map(|set| (0..sets[set].len()).map(move |own| (set, own)));
    for (index, (set, own)) in (0..).zip(all) {
        let (ours, theirs) = (mixture.sample(index).unwrap(), sets[set].sample(own).unwrap());
        let width = theirs.action_width;
        assert_eq!(ours.index, index);
        assert_eq!(ours.state[..theirs.state.len()], theirs.state[..]);
        assert!(ours.state[theirs.state.len()..].iter().all(|padding| *padding == 0.0));
        assert_eq!((ours.state.len(), ours.actions.len()), (widest.state, widest.horizon * widest.action));
        for (ours, theirs) in ours.actions.chunks(3).zip(theirs.actions.chunks(width)) {
            assert_eq!(&ours[..width], theirs);
            assert!(ours[width..].iter().all(|padding| *padding == 0.0));
        }
        let rest = |sample: &Sample| Sample { index: 0, state: vec![], actions: vec![], ..sample.clone() };
        assert_eq!(rest(&ours), rest(&theirs));
        assert_eq!(ours.image_shapes.len(), if set == 0 { 2 } else { 1 });
    }
    assert!(matches!(mixture.sample(26), Err(DataError::OutOfRange { index: 26, len: 26, .. })));
}

#[test]
fn an_epoch_has_of_each_set_what_its_weight_says_and_what_is_held_out_never_comes() {
    let mut pair = TwoSets::new(|sets| {
        sets[0].holdout_episodes = vec![0];
        sets[1].holdout_episodes = vec![1];
    });
    assert_eq!(Samples::holdout(&pair.mixture()), [0, 1, 2, 3, 4, 20, 21, 22, 23, 24, 25]);
    // Half as often by samples; half as much by sets.
    for ((weight, shares), taken) in
        [((None, [Some(1.0), Some(0.5)]), [6, 3]), ((Some(0.5), [None; 2]), [12, 2])]
    {
        let mut vla = pair.spec.vla_mut();
        vla.data.sets[1].weight = weight;
        vla.data.sets.iter_mut().zip(shares).for_each(|(set, share)| set.share = share);
        drop(vla);
        let mixture = pair.mixture();
        let samples: &dyn Samples = &mixture;
        assert_eq!(mixture.shares().iter().map(|share| share.taken).collect::<Vec<_>>(), taken);
        assert_eq!((samples.training_len(), samples.epoch_len()), (15, taken[0] + taken[1]));
        for epoch in 0..6 {
            let order = samples.order(5);
            let seen: Vec<u64> = (0..order.len()).filter_map(|at| order.sample(epoch, at)).collect();
            let lab = seen.iter().filter(|index| (5..17).contains(*index)).count() as u64;
            let field = seen.iter().filter(|index| (17..20).contains(*index)).count() as u64;
            assert_eq!([lab, field], taken, "epoch {epoch}: {seen:?}");
        }
    }
    let fingerprint = pair.mixture().fingerprint();
    pair.spec.vla_mut().data.sets[1].weight = Some(1.0);
    assert_ne!(pair.mixture().fingerprint(), fingerprint, "another order is another data set");
}

#[test]
fn a_damaged_row_is_blamed_on_the_samples_that_cannot_be_read() {
    // The second set's actions are its states.
    let episodes = vec![(3, 0), (6, 0)];
    let poison = Some(("observation.state", 6, f32::NAN));
    let pair = TwoSets::with_second(Recording { episodes, poison, ..Recording::default() }, |sets| {
        sets[0].holdout_episodes = vec![1];
    });
    let mixture = pair.mixture();
    let numbers = 0..mixture.training().len();
    let of = |number| mixture.training().get(number).unwrap();
    let broken: Vec<u64> = numbers.filter(|number| mixture.read(of(*number)).is_err()).collect();
    assert_eq!(broken.len(), 4, "the row, and the chunks that reach it");
    for &number in &broken {
        let row = mixture.damaged_row(of(number), &mixture.sample(of(number)).unwrap_err());
        assert_eq!(row.row, 17 + 6);
        assert_eq!((row.begin..row.end).collect::<Vec<_>>(), broken);
    }
}

#[test]
fn features_are_kept_under_the_names_that_each_set_alone_has() {
    let (pair, dir) =
        (TwoSets::new(|sets| sets[1].prompt = Some("do {task}".into())), tempfile::tempdir().unwrap());
    let store = Store::open(dir.path(), None).unwrap();
    let (mixture, sets) = (pair.mixture(), [pair.alone(0), pair.alone(1)]);
    let keys = Samples::keys(&mixture, &store).unwrap();
    assert_eq!(keys.len(), 26);
    for index in 0..26 {
        let own = if index < 17 { sets[0].sample_key(index) } else { sets[1].sample_key(index - 17) };
        assert_eq!(keys.get(index), Some(own.unwrap()), "sample {index}");
    }
    let ingredients = Samples::ingredients(&mixture).unwrap();
    assert!(ingredients.prompt.contains("do {task}"), "{ingredients:?}");
}

#[test]
fn every_set_leaves_its_own_statistics_and_description() {
    let pair = TwoSets::new(|_| {});
    let files = Samples::files(&pair.mixture());
    let paths: Vec<_> = files.iter().map(|file| file.path.as_str()).collect();
    let wanted =
        ["sets/lab/stats.json", "sets/lab/policy.json", "sets/field/stats.json", "sets/field/policy.json"];
    assert_eq!(paths, wanted);
    for (at, set) in [pair.alone(0), pair.alone(1)].iter().enumerate() {
        assert_eq!(files[2 * at].text, set.stats().to_json());
        let mut file: PolicyFile = serde_json::from_str(&files[2 * at + 1].text).unwrap();
        let padded = file.padded.take().expect("the other set is wider in one of them");
        assert_eq!((padded.state, padded.action), (3, 3));
        let alone = Samples::files(set).pop().unwrap();
        assert_eq!(file, serde_json::from_str(&alone.text).unwrap());
    }
}

#[test]
fn the_longest_sample_of_any_set_is_what_memory_is_predicted_for() {
    let pair = TwoSets::new(|_| {});
    let [lab, field] = [0, 1].map(|at| {
        let vla = pair.spec.vla();
        Outline::from_spec(&vla.spec_of_set(&pair.spec, &vla.data.sets[at]), shelf()).unwrap()
    });
    let both = Outline::from_spec(&pair.spec, shelf()).unwrap();
    assert_eq!((both.dims.state, both.dims.action, both.frames), (3, 3, 26));
    assert_eq!((both.images, both.prompt_tokens), (lab.images, lab.prompt_tokens.max(field.prompt_tokens)));
    assert_eq!(both.data_bytes, lab.data_bytes + field.data_bytes);
}

#[test]
fn what_cannot_be_mixed_is_named_with_its_set() {
    refused_pair(
        |sets| sets[1].path = "/nowhere".into(),
        &["data.sets.1 (`field`)", "/nowhere/meta/info.json"],
    );
    refused_pair(
        |sets| sets[1].cameras = Some(BTreeMap::from([(FRONT.into(), "observation.images.frnt".into())])),
        &["data.sets.1 (`field`)", "`observation.images.frnt`", "did you mean `observation.images.front`?"],
    );
    refused_pair(
        |sets| sets[1].holdout_episodes = vec![0, 1],
        &["data.sets.1 (`field`)", "leave no episode to train on", "leave at least one"],
    );
    refused_pair(
        |sets| sets[0].sensor = Some("observation.sensor".into()),
        &["features.observation.sensor.shape", "[3, 2] in `lab`", "cannot be padded"],
    );
    let twin = TwoSets::with_second(Recording::default(), |_| {});
    refused(
        Mixture::from_spec(&twin.spec, shelf()),
        &["data.sets.1 (`field`)", "the same data set as `lab`", "`weight`"],
    );
}
