//! Storing beside training: what can be seen when, and what waiting looks like.

use std::time::Instant;

use coxswain_proto::run_spec::CacheDtype;

use super::*;
use coxswain_feature_store::{Digest, Ingredients, NamespaceDescription};

const TOKENS: usize = 4;
const WIDTH: usize = 8;

fn namespace(store: &Store) -> Namespace {
    let digest = Digest([0; 32]);
    let text = String::new;
    let ingredients = Ingredients {
        weights: digest,
        adapter: None,
        preprocessing: text(),
        prompt: text(),
        tokenizer: digest,
        compute: text(),
    };
    let dtype = CacheDtype::Float32;
    let width = WIDTH as u32;
    let description = NamespaceDescription { tap: text(), dtype, width, ingredients, made_by: "t".into() };
    store.namespace(&description).expect("a new namespace")
}

fn key(sample: u8) -> SampleKey {
    SampleKey(Digest([sample; 32]))
}

fn made(samples: Range<u8>) -> ComputedFeatures {
    let mut all = ComputedFeatures::default();
    for sample in samples {
        let values = vec![f32::from(sample); TOKENS * WIDTH];
        let inputs = Inputs { ids: vec![1; TOKENS], shapes: Vec::new() };
        let row = MadeRow { key: key(sample), inputs, place: 0..values.len() };
        all.append(ComputedFeatures { rows: vec![row], values });
    }
    all
}

fn stored(store: &Store) -> Vec<u8> {
    let namespace = namespace(store);
    let mut values = [0.0; TOKENS * WIDTH];
    let right = |sample: &u8| {
        let found = namespace.get(&key(*sample)).map(|record| record.read_f32(&mut values));
        assert!(!matches!(found, Some(Err(_))), "sample {sample} is damaged");
        found.is_some() && values == [f32::from(*sample); TOKENS * WIDTH]
    };
    (0..100).filter(right).collect()
}

#[test]
fn what_is_kept_can_be_seen_once_publishing_has_settled() {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::open(dir.path(), None).unwrap();
    let store_writer = StoreWriter::start(&store).unwrap();
    store_writer.begin(Some(namespace(&store)));
    store_writer.keep(made(0..3));
    store_writer.settle();
    assert!(stored(&store).is_empty(), "a shard appears whole, when it is asked for");
    store_writer.keep(made(3..4));
    store_writer.publish();
    store_writer.settle();
    assert_eq!(stored(&store), [0, 1, 2, 3]);
    let News { kept, published, complaints } = store_writer.news();
    assert_eq!((kept, published, complaints.len()), (4, 4, 0));
    assert_eq!(store_writer.news().kept, 0, "news are told once");
}

#[test]
fn whatever_ends_training_what_was_computed_is_published() {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::open(dir.path(), None).unwrap();
    let store_writer = StoreWriter::start(&store).unwrap();
    store_writer.begin(Some(namespace(&store)));
    store_writer.keep(made(5..7));
    drop(store_writer);
    assert_eq!(stored(&store), [5, 6]);
}

#[test]
fn a_budget_ends_storing_in_one_namespace_with_one_complaint_and_keeps_what_fitted() {
    let dir = tempfile::tempdir().unwrap();
    let generous = Store::open(dir.path(), None).unwrap();
    let room = generous.bytes().unwrap() + 4000;
    let store = Store::open(dir.path(), Some(room)).unwrap();
    let store_writer = StoreWriter::start(&store).unwrap();
    store_writer.begin(Some(namespace(&store)));
    store_writer.keep(made(0..50));
    store_writer.keep(made(50..90));
    store_writer.publish();
    store_writer.settle();
    let kept = stored(&generous);
    assert!(!kept.is_empty() && kept.len() < 50, "{kept:?}");
    let news = store_writer.news();
    assert!(matches!(&news.complaints[..], [one] if one.text.contains("budget")), "{:?}", news.complaints);
    assert_eq!((news.kept, news.published), (kept.len() as u64, kept.len()));
}

#[test]
fn a_store_that_has_room_again_is_written_again_after_the_next_publishing() {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::open(dir.path(), Some(100_000)).unwrap();
    let store_writer = StoreWriter::start(&store).unwrap();
    store_writer.begin(Some(namespace(&store)));
    std::fs::create_dir_all(store.keys_dir()).unwrap();
    let others = store.keys_dir().join("others");
    std::fs::write(&others, [0; 100_000]).unwrap();
    store_writer.keep(made(0..1));
    store_writer.settle();
    std::fs::remove_file(&others).unwrap();
    store_writer.keep(made(1..2));
    store_writer.publish();
    store_writer.keep(made(2..3));
    store_writer.publish();
    store_writer.settle();
    assert_eq!(stored(&store), [2], "one attempt before what there is is published");
    let complaints = store_writer.news().complaints;
    assert!(matches!(&complaints[..], [one] if one.text.contains("budget")), "{complaints:?}");
}

#[test]
fn a_trainer_that_waits_shows_motion_while_the_store_does_and_only_then() {
    let dir = tempfile::tempdir().unwrap();
    let store_writer = StoreWriter::start(&Store::open(dir.path(), None).unwrap()).unwrap();
    let (trainer, deadline) = (Arc::<Pulse>::default(), Instant::now() + Duration::from_secs(60));
    let until = |reached: &dyn Fn() -> bool| {
        while !reached() {
            assert!(Instant::now() < deadline, "{:?}", trainer.reading());
            thread::yield_now();
        }
    };
    // In the place of a disk: the thread is busy until this is sent, and then told to beat by hand.
    let (go, busy) = sync_channel(0);
    store_writer.order(Order::Settle(go));
    thread::scope(|scope| {
        scope.spawn(|| {
            trainer.clone().install();
            trainer.beat();
            store_writer.settle();
        });
        let still = || trainer.reading().still;
        until(&|| still() > 4 * pulse::LOOK);
        // The disk gets on, and so does the trainer that waits for it.
        until(&|| {
            store_writer.pulse.beat();
            still() < pulse::LOOK
        });
        until(&|| still() > 4 * pulse::LOOK);
        busy.recv().expect("the thread answers");
    });
}

#[test]
fn without_a_namespace_nothing_is_stored_and_nothing_is_wrong() {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::open(dir.path(), None).unwrap();
    let store_writer = StoreWriter::start(&store).unwrap();
    store_writer.begin(None);
    store_writer.keep(made(0..3));
    store_writer.publish();
    store_writer.settle();
    assert!(store_writer.news().complaints.is_empty());
    assert!(stored(&store).is_empty());
}
