//! The prefetch pipeline against the samples it should bring.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use coxswain_models::families::shelf;
use coxswain_proto::ids::Step;
use coxswain_task::{Batch, FeatureShape};
use coxswain_tasks::vla_flow::{
    config::{Augmentation, VlaSpec},
    data::{Dataset, Sample, take_apart},
    testing::{mini, spec},
};

use super::{dataset, keys};
use crate::feeder::{DataError, KeptFeatures, Prefetcher, StepRequest};

fn start(dataset: Arc<Dataset>, depth: usize, threads: usize) -> Prefetcher {
    let order = dataset.order();
    Prefetcher::start(dataset, order, depth, threads).unwrap()
}

fn request(step: u64, positions: std::ops::Range<u64>, micro_batch: usize) -> StepRequest {
    StepRequest { step: Step(step), epoch: 0, positions: vec![positions], micro_batch, kept: None }
}

fn take(prefetcher: &mut Prefetcher, step: u64) -> Vec<Box<dyn Batch>> {
    std::iter::from_fn(|| prefetcher.next(Step(step)).unwrap()).map(|prepared| prepared.batch).collect()
}

fn indices(batches: &[Box<dyn Batch>]) -> Vec<u64> {
    batches.iter().flat_map(|b| b.samples().to_vec()).collect()
}

#[test]
fn batches_come_in_order_and_hold_the_samples_of_their_positions() {
    let dataset = dataset();
    let order = dataset.order();
    for threads in [1, 3] {
        let mut prefetcher = start(dataset.clone(), 2, threads);
        for step in 10..13 {
            prefetcher.request(request(step, step * 5..step * 5 + 5, 2)).unwrap();
        }
        for step in 10..13u64 {
            let batches = take(&mut prefetcher, step);
            assert_eq!(batches.iter().map(|b| b.len()).collect::<Vec<_>>(), [2, 2, 1]);
            let want: Vec<u64> = (step * 5..step * 5 + 5).filter_map(|p| order.sample(0, p)).collect();
            assert_eq!(indices(&batches), want);
            assert!(batches.iter().all(|b| b.step() == Step(step)));
        }
    }
}

#[test]
fn a_retried_step_brings_the_same_samples_in_smaller_batches() {
    let mut prefetcher = start(dataset(), 3, 2);
    prefetcher.request(request(0, 0..8, 4)).unwrap();
    prefetcher.request(request(1, 8..16, 4)).unwrap();
    let first = prefetcher.next(Step(0)).unwrap().unwrap();
    let samples = first.batch.samples().to_vec();
    prefetcher.replan(Step(0), 2, Some(first)).unwrap();
    let again = take(&mut prefetcher, 0);
    assert_eq!(again.iter().map(|b| b.len()).collect::<Vec<_>>(), [2, 2, 2, 2]);
    assert_eq!(indices(&again[..2]), samples);
    prefetcher.replan(Step(0), 1, None).unwrap();
    assert_eq!(indices(&take(&mut prefetcher, 0)), indices(&again));
    assert_eq!(take(&mut prefetcher, 1).len(), 8);
}

/// A retry, another micro-batch and another number of ranks cut the same positions otherwise; pictures are
/// those of the sample in its epoch all the same.
#[test]
fn changed_images_are_those_of_their_epoch_however_a_step_is_cut() {
    let mut spec = spec(&mini());
    spec.vla_mut().data.augmentation = Augmentation::Lerobot;
    let dataset = Arc::new(Dataset::from_spec(&spec, shelf()).expect("the data set opens"));
    let seen = |epoch, cuts: &[std::ops::Range<u64>], micro_batch| {
        let mut prefetcher = start(dataset.clone(), 2, 2);
        let mut rows = Vec::new();
        for (step, cut) in (0..).zip(cuts) {
            let request = StepRequest { epoch, ..request(step, cut.clone(), micro_batch) };
            prefetcher.request(request).unwrap();
            let batches = take(&mut prefetcher, step);
            rows.extend(batches.iter().flat_map(|batch| take_apart(batch.content())));
        }
        rows
    };
    let whole = seen(1, &[0..8], 4);
    assert_eq!(seen(1, &[0..3, 3..8], 1), whole);
    let order = dataset.order();
    let differs = |epoch: u64, rows: &[Sample]| {
        let of = (0..8).filter_map(|position| order.sample(epoch, position));
        of.zip(rows).all(|(index, row)| dataset.sample(index).unwrap().pixel_values != row.pixel_values)
    };
    assert!(differs(1, &whole) && differs(0, &seen(0, &[0..8], 4)));
    let [one, other] = [0, 1].map(|epoch| dataset.sample_in_epoch(5, epoch).unwrap().pixel_values);
    assert_ne!(one, other);
}

#[test]
fn a_step_that_is_not_requested_yet_has_nothing_to_start_again() {
    let mut prefetcher = start(dataset(), 3, 2);
    prefetcher.request(request(0, 0..8, 4)).unwrap();
    let before = indices(&take(&mut prefetcher, 0));
    // As where a rank swaps in the last step of a run, or in the one before a phase change.
    prefetcher.replan(Step(1), 2, None).unwrap();
    prefetcher.request(request(1, 0..8, 2)).unwrap();
    let after = take(&mut prefetcher, 1);
    assert_eq!(after.iter().map(|b| b.len()).collect::<Vec<_>>(), [2, 2, 2, 2]);
    assert_eq!(indices(&after), before);
}

#[test]
fn a_step_left_early_does_not_hold_up_the_next() {
    let mut prefetcher = start(dataset(), 2, 1);
    for step in 0..4 {
        prefetcher.request(request(step, step * 8..step * 8 + 8, 1)).unwrap();
    }
    prefetcher.next(Step(0)).unwrap().unwrap();
    let order = dataset().order();
    let want: Vec<u64> = (16..24).filter_map(|p| order.sample(0, p)).collect();
    assert_eq!(indices(&take(&mut prefetcher, 2)), want);
    prefetcher.clear();
    prefetcher.request(request(1, 8..10, 2)).unwrap();
    assert_eq!(take(&mut prefetcher, 1).len(), 1);
}

#[test]
fn a_rank_without_samples_in_a_step_gets_no_batch() {
    let mut prefetcher = start(dataset(), 2, 1);
    prefetcher.request(request(0, 3..3, 2)).unwrap();
    prefetcher.request(request(1, 3..4, 2)).unwrap();
    assert!(take(&mut prefetcher, 0).is_empty());
    assert_eq!(take(&mut prefetcher, 1).len(), 1);
}

#[test]
fn misuse_and_positions_past_the_epoch_are_values() {
    let mut prefetcher = start(dataset(), 1, 1);
    assert!(matches!(prefetcher.next(Step(0)), Err(DataError::Pipeline(_))));
    prefetcher.request(request(3, 1000..1001, 1)).unwrap();
    assert!(matches!(prefetcher.request(request(3, 0..1, 1)), Err(DataError::Pipeline(_))));
    assert!(matches!(prefetcher.replan(Step(1), 1, None), Err(DataError::Pipeline(_))));
    prefetcher.clear();
    prefetcher.request(request(3, 1000..1001, 1)).unwrap();
    let error = prefetcher.next(Step(3)).unwrap_err();
    assert!(matches!(error, DataError::OutOfRange { index: 1000, .. }), "{error}");
}

#[test]
fn a_panic_costs_its_micro_batch_and_no_thread() {
    let dataset = dataset();
    let keys = keys(&dataset);
    // Between 16 and 127 tokens of this width are more than an allocation can be, and no overflow.
    let shape = FeatureShape::every_token(1 << 57);
    let kept = Some(KeptFeatures { namespace: None, keys, shape });
    let mut prefetcher = start(dataset, 1, 2);
    prefetcher.request(StepRequest { kept, ..request(0, 0..1, 1) }).unwrap();
    prefetcher.request(request(1, 1..2, 1)).unwrap();
    let error = prefetcher.next(Step(0)).unwrap_err();
    assert!(error.to_string().contains("panicked in step 0: capacity overflow"), "{error}");
    assert_eq!(take(&mut prefetcher, 1).len(), 1);
}

#[test]
fn dropping_the_pipeline_joins_its_threads_while_they_wait() {
    let dataset = dataset();
    let mut prefetcher = start(dataset.clone(), 1, 3);
    prefetcher.request(request(0, 0..100, 1)).unwrap();
    prefetcher.next(Step(0)).unwrap();
    drop(prefetcher);
    assert_eq!(Arc::strong_count(&dataset), 1);
}

#[test]
fn rows_of_micro_batches_that_wait_are_completed_ahead_within_a_bound() {
    let dataset = dataset();
    let keys = keys(&dataset);
    let shape = FeatureShape::every_token(1);
    let kept = Some(KeptFeatures { namespace: None, keys, shape });
    let mut prefetcher = start(dataset, 1, 1);
    prefetcher.keep_ahead(6);
    for step in 0..4 {
        let request = request(step, step * 4..step * 4 + 4, 2);
        prefetcher.request(StepRequest { kept: kept.clone(), ..request }).unwrap();
    }
    let due = prefetcher.next(Step(0)).unwrap().unwrap();
    assert_eq!((due.missing.len(), due.computed.len()), (2, 0));
    let mut rows = prefetcher.upcoming(0);
    assert!(rows.is_empty());
    let deadline = Instant::now() + Duration::from_secs(30);
    while rows.len() < 5 && Instant::now() < deadline {
        rows.extend(prefetcher.upcoming(5 - rows.len()));
        std::thread::yield_now();
    }
    assert_eq!(rows.len(), 5, "six samples may be ready, in three micro-batches");
    for row in &rows {
        let values = vec![row.missing.seen.index() as f32; row.missing.place.len()];
        prefetcher.put_back(row, &values, row.missing.seen.index() != rows[0].missing.seen.index());
    }
    let made: Vec<_> = [0, 1, 1].map(|step| prefetcher.next(Step(step)).unwrap().unwrap()).into();
    let ahead: Vec<_> = made.iter().map(|made| (made.missing.len(), made.computed.len())).collect();
    assert_eq!(
        ahead,
        [(0, 1), (0, 2), (1, 1)],
        "the first was found and not computed, the last is still missing"
    );
    for (made, rows) in made.iter().zip(rows.chunks(2)) {
        let values = &made.batch.features().unwrap().values;
        for row in rows {
            assert!(values[row.missing.place.clone()].iter().all(|x| *x == row.missing.seen.index() as f32));
        }
    }
}
