//! Rows whose features are kept, next to rows whose features are missing.

use std::sync::Arc;

use coxswain_feature_store::{Digest, Ingredients, Namespace, NamespaceDescription, Record, Store};
use coxswain_proto::{ids::Step, run_spec::CacheDtype};
use coxswain_task::FeatureShape;
use coxswain_tasks::vla_flow::data::{Dataset, MicroBatch, Sample, collate};

use super::{dataset, keys};
use crate::feeder::rows::{KeptFeatures, SampleRequest, prepare};

/// These samples, at positions that do not matter.
fn wanted(indices: &[u64]) -> Vec<SampleRequest> {
    indices.iter().map(|&index| SampleRequest { position: index, index }).collect()
}

/// What is kept of a row: two values for each of its tokens.
fn kept(dataset: &Dataset, namespace: Option<Namespace>) -> KeptFeatures {
    KeptFeatures { namespace, keys: keys(dataset), shape: FeatureShape::every_token(2) }
}

fn namespace(store: &Store) -> Namespace {
    let ingredients = Ingredients {
        weights: Digest([1; 32]),
        adapter: None,
        preprocessing: String::new(),
        prompt: String::new(),
        tokenizer: Digest([2; 32]),
        compute: String::new(),
    };
    let (tap, made_by) = ("final".to_owned(), "t".to_owned());
    let description =
        NamespaceDescription { tap, dtype: CacheDtype::Float32, width: 2, ingredients, made_by };
    store.namespace(&description).expect("a new namespace")
}

/// Stores features that count from 1 for one sample.
fn store_features(dataset: &Dataset, kept: &KeptFeatures, index: u64) -> Vec<f32> {
    let sample = dataset.sample(index).expect("a sound sample");
    let values: Vec<f32> = (1..=2 * sample.input_ids.len()).map(|n| n as f32).collect();
    let mut shard = kept.namespace.as_ref().expect("there is one").writer().expect("there is room");
    let record = Record { ids: &sample.input_ids, shapes: &sample.image_shapes, values: &values };
    shard.append(kept.keys.get(index).expect("readable"), &record).expect("written");
    shard.publish().expect("published");
    values
}

#[test]
fn a_hit_brings_features_without_pixels_and_a_miss_pixels_and_room() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let store = Store::open(dir.path(), None).expect("a new store");
    let dataset = dataset();
    let kept = kept(&dataset, Some(namespace(&store)));
    let values = store_features(&dataset, &kept, 5);
    let prepared = prepare(&*dataset, Step(3), 0, &wanted(&[9, 5]), Some(&kept)).expect("sound samples");

    let whole = [9, 5].map(|index| dataset.sample(index).expect("a sound sample"));
    let [missing] = &prepared.missing[..] else { panic!("sample 9 alone is missing") };
    assert_eq!((missing.seen.index(), missing.key), (9, kept.keys.get(9)));
    assert_eq!(missing.seen.content::<Sample>().pixel_values, whole[0].pixel_values);
    assert_eq!(missing.place, 0..2 * whole[0].input_ids.len());
    let features = prepared.batch.features().cloned().expect("they were asked for");
    assert!(features.values[missing.place.clone()].iter().all(|value| *value == 0.0));
    assert_eq!(features.values[missing.place.end..], values);

    let expected = collate(Step(3), &whole.each_ref(), dataset.pad_token());
    let unseen = MicroBatch { features: Some(features), pixel_values: vec![Arc::default(); 2], ..expected };
    assert_eq!(
        prepared.batch.content::<MicroBatch>(),
        &unseen,
        "everything but pixels is as without a cache"
    );
    assert!(prepared.damaged.is_empty());
}

#[test]
fn without_a_namespace_everything_is_missing() {
    let dataset = dataset();
    let kept = kept(&dataset, None);
    let prepared = prepare(&*dataset, Step(0), 0, &wanted(&[0, 1, 2]), Some(&kept)).expect("sound samples");
    assert_eq!(prepared.missing.len(), 3);
    assert!(prepared.batch.content::<MicroBatch>().pixel_values.iter().all(|row| row.is_empty()));
}
