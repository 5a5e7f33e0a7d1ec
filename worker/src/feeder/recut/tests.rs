//! What is cut against what would be read anew.

use std::{
    collections::BTreeSet,
    ops::Range,
    sync::{Arc, LazyLock},
    time::{Duration, Instant},
};

use proptest::prelude::*;

use super::*;
use crate::feeder::{
    DeferredRow, KeptFeatures, Prefetcher, UncachedRow,
    rows::{SampleRequest, prepare},
    tests::{dataset, keys},
};
use coxswain_feature_store::SampleKey;
use coxswain_task::{FeatureShape, Sample};
use coxswain_tasks::vla_flow::data::Dataset;

const SHARE: u64 = 6;
const STEPS: u64 = 3;

static DATASET: LazyLock<(Arc<Dataset>, KeptFeatures)> = LazyLock::new(|| {
    let dataset = dataset();
    let kept = KeptFeatures { namespace: None, keys: keys(&dataset), shape: FeatureShape::every_token(2) };
    (dataset, kept)
});

fn request(step: u64, micro_batch: usize, kept: Option<&KeptFeatures>) -> StepRequest {
    let positions = vec![step * SHARE..step * SHARE + 2, step * SHARE + 3..(step + 1) * SHARE];
    StepRequest { step: Step(step), epoch: 0, positions, micro_batch, kept: kept.cloned() }
}

/// Waits until nothing more can be made ready, and ends the threads: from then on nothing is read.
fn rest(prefetcher: &mut Prefetcher) {
    let deadline = Instant::now() + Duration::from_secs(60);
    let idle = |state: &State, depth: u64| {
        let due = (state.taken + depth).min(state.planned);
        (state.taken..due).all(|number| state.done.contains_key(&number))
    };
    while !idle(&prefetcher.shared.lock(), prefetcher.shared.depth) {
        assert!(Instant::now() < deadline, "the data threads do not get ready");
        std::thread::yield_now();
    }
    prefetcher.shared.lock().stop = true;
    prefetcher.shared.wanted.notify_all();
    prefetcher.makers.drain(..).for_each(|maker| maker.join().expect("panics are caught"));
}

/// As the trainer would have computed them.
fn features(sample: u64, values: &mut [f32]) {
    values.fill(sample as f32 + 0.5);
}

/// What reading a micro-batch anew gives, with the features of these samples in their places.
fn anew(request: &StepRequest, number: u64, computed: &BTreeSet<u64>) -> RowBatch {
    let (dataset, _) = &*DATASET;
    let order = dataset.order();
    let at = |position| Some(SampleRequest { position, index: order.sample(request.epoch, position)? });
    let wanted: Vec<_> = request.part(number).filter_map(at).collect();
    let read = prepare(&**dataset, request.step, request.epoch, &wanted, request.kept.as_ref());
    let mut read = read.map_err(|(_, error)| error).expect("sound samples");
    for missing in std::mem::take(&mut read.missing) {
        if computed.contains(&missing.seen.index()) {
            let batch = read.batch.features_mut().as_mut().expect("they were asked for");
            features(missing.seen.index(), &mut batch.values[missing.place]);
            read.computed.push(missing.row);
        } else {
            read.missing.push(missing);
        }
    }
    read
}

type Parts<'a> = (usize, Range<usize>, Option<SampleKey>, &'a (dyn Sample + 'static));

/// What there is to compare of missing rows.
fn parts(missing: &[UncachedRow]) -> Vec<Parts<'_>> {
    missing.iter().map(|row| (row.row, row.place.clone(), row.key, &*row.seen)).collect()
}

/// When and how micro-batches are cut anew.
#[derive(Debug)]
struct Cut {
    before: usize,
    after: usize,
    depth: usize,
    /// Micro-batches that the trainer has taken.
    taken: usize,
    /// Whether it gives the last of them back.
    last: bool,
    /// Whether features are kept.
    kept: bool,
    /// Rows that the trainer has borrowed to compute their features, and how many of them it has brought
    /// back.
    lent: usize,
    back: usize,
}

fn check(cut: &Cut) -> Result<(), TestCaseError> {
    let &Cut { before, after, depth, taken, last, kept, lent, back } = cut;
    let (dataset, features_of) = &*DATASET;
    let kept = kept.then_some(features_of);
    let mut prefetcher =
        Prefetcher::start(dataset.clone(), dataset.order(), depth, 2).expect("threads start");
    for step in 0..STEPS {
        prefetcher.request(request(step, before, kept)).expect("in order");
    }
    let mut newest = None;
    for _ in 0..taken {
        newest = prefetcher.next(Step(0)).expect("sound samples");
    }
    rest(&mut prefetcher);
    let rows = prefetcher.upcoming(lent);
    let (returned, away) = rows.split_at(back.min(rows.len()));
    for row in returned {
        let mut values = vec![0.0; row.missing.place.len()];
        features(row.missing.seen.index(), &mut values);
        prefetcher.put_back(row, &values, true);
    }
    let index = |row: &DeferredRow| row.missing.seen.index();
    let (computed, away): (BTreeSet<u64>, BTreeSet<u64>) =
        (returned.iter().map(index).collect(), away.iter().map(index).collect());
    let mut there: BTreeSet<(Step, u64)> = prefetcher
        .shared
        .lock()
        .done
        .values()
        .flatten()
        .chain(newest.as_ref().filter(|_| last))
        .flat_map(|ready| ready.batch.samples().iter().map(|index| (ready.batch.step(), *index)))
        .collect();
    there.retain(|(_, index)| !away.contains(index));

    prefetcher.replan(Step(0), after, newest.filter(|_| last)).expect("step 0 is on record");
    let mut state = prefetcher.shared.lock();
    let (mut number, start) = (state.taken, state.taken);
    for step in 0..STEPS {
        let request = request(step, after, kept);
        for part in 0..request.micro_batches() {
            let expected = anew(&request, part, &computed);
            let all = expected.batch.samples().iter();
            let all = all.map(|index| (Step(step), *index)).all(|row| there.contains(&row));
            let cut = state.done.remove(&number);
            prop_assert_eq!(cut.is_some(), all && number <= start + depth as u64);
            if let Some(cut) = cut {
                let cut = cut.expect("a micro-batch");
                prop_assert_eq!(&*cut.batch, &*expected.batch);
                prop_assert_eq!(parts(&cut.missing), parts(&expected.missing));
                prop_assert_eq!(cut.computed, expected.computed);
                prop_assert!(cut.lent.is_empty());
            }
            number += 1;
        }
    }
    prop_assert!(state.done.is_empty());
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn what_is_cut_is_what_reading_anew_gives_and_nothing_is_read(
        (before, after) in (1..7usize, 1..5usize),
        (depth, taken) in (1..4usize, 0..2usize),
        (last, kept) in any::<(bool, bool)>(),
        (lent, back) in (0..4usize, 0..4usize),
    ) {
        check(&Cut { before, after, depth, taken, last, kept, lent, back })?;
    }
}

#[test]
fn both_halves_of_the_micro_batch_that_did_not_fit_are_there_at_once() {
    let cut = Cut { before: 4, after: 2, depth: 1, taken: 1, last: true, kept: false, lent: 0, back: 0 };
    check(&cut).expect("as above");
}

#[test]
fn what_was_cut_and_taken_is_not_made_again() {
    let (dataset, _) = &*DATASET;
    let mut prefetcher = Prefetcher::start(dataset.clone(), dataset.order(), 1, 1).expect("a thread starts");
    (0..STEPS).for_each(|step| prefetcher.request(request(step, 4, None)).expect("in order"));
    let last = prefetcher.next(Step(0)).expect("sound samples");
    rest(&mut prefetcher);
    prefetcher.replan(Step(0), 2, last).expect("step 0 is on record");
    for _ in 0..2 {
        prefetcher.next(Step(0)).expect("sound samples").expect("cut");
    }
    // A thread that has been busy all the time.
    prefetcher.shared.lock().stop = false;
    let job = prefetcher.shared.claim().expect("nobody stops it");
    assert_eq!(job.number, prefetcher.shared.lock().taken);
}

#[test]
fn threads_make_what_is_not_cut_and_leave_what_is() {
    let (dataset, _) = &*DATASET;
    let mut prefetcher = Prefetcher::start(dataset.clone(), dataset.order(), 1, 2).expect("threads start");
    (0..STEPS).for_each(|step| prefetcher.request(request(step, 3, None)).expect("in order"));
    let last = prefetcher.next(Step(0)).expect("sound samples");
    prefetcher.replan(Step(0), 2, last).expect("step 0 is on record");
    for step in 0..STEPS {
        let request = request(step, 2, None);
        for part in 0..request.micro_batches() {
            let made = prefetcher.next(Step(step)).expect("sound samples").expect("one more");
            assert_eq!(&*made.batch, &*anew(&request, part, &BTreeSet::new()).batch);
        }
        assert!(prefetcher.next(Step(step)).expect("sound samples").is_none());
    }
}
