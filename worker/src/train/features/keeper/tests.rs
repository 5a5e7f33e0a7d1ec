//! Storing beside training: what can be seen when, and what waiting looks like.

use std::time::Instant;

use coxswain_proto::run_spec::CacheDtype;

use super::*;
use coxswain_feature_store::{Digest, Ingredients, SpaceDescription};

const TOKENS: usize = 4;
const WIDTH: usize = 8;

fn space(store: &Store) -> Space {
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
    let description = SpaceDescription { tap: text(), dtype, width, ingredients, made_by: "t".into() };
    store.space(&description).expect("a new space")
}

fn key(sample: u8) -> SampleKey {
    SampleKey(Digest([sample; 32]))
}

fn made(samples: Range<u8>) -> Made {
    let mut all = Made::default();
    for sample in samples {
        let values = vec![f32::from(sample); TOKENS * WIDTH];
        let inputs = Inputs { ids: vec![1; TOKENS], grids: Vec::new() };
        let row = MadeRow { key: key(sample), inputs, place: 0..values.len() };
        all.append(Made { rows: vec![row], values });
    }
    all
}

fn stored(store: &Store) -> Vec<u8> {
    let space = space(store);
    let mut values = [0.0; TOKENS * WIDTH];
    let right = |sample: &u8| {
        let found = space.get(&key(*sample)).map(|record| record.read_f32(&mut values));
        assert!(!matches!(found, Some(Err(_))), "sample {sample} is damaged");
        found.is_some() && values == [f32::from(*sample); TOKENS * WIDTH]
    };
    (0..100).filter(right).collect()
}

#[test]
fn what_is_kept_can_be_seen_once_publishing_has_settled() {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::open(dir.path(), None).unwrap();
    let keeper = Keeper::start(&store).unwrap();
    keeper.begin(Some(space(&store)));
    keeper.keep(made(0..3));
    keeper.settle();
    assert!(stored(&store).is_empty(), "a part appears whole, when it is asked for");
    keeper.keep(made(3..4));
    keeper.publish();
    keeper.settle();
    assert_eq!(stored(&store), [0, 1, 2, 3]);
    let News { kept, published, complaints } = keeper.news();
    assert_eq!((kept, published, complaints.len()), (4, 4, 0));
    assert_eq!(keeper.news().kept, 0, "news are told once");
}

#[test]
fn whatever_ends_training_what_was_computed_is_published() {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::open(dir.path(), None).unwrap();
    let keeper = Keeper::start(&store).unwrap();
    keeper.begin(Some(space(&store)));
    keeper.keep(made(5..7));
    drop(keeper);
    assert_eq!(stored(&store), [5, 6]);
}

#[test]
fn a_budget_ends_storing_in_one_space_with_one_complaint_and_keeps_what_fitted() {
    let dir = tempfile::tempdir().unwrap();
    let generous = Store::open(dir.path(), None).unwrap();
    let room = generous.bytes().unwrap() + 4000;
    let store = Store::open(dir.path(), Some(room)).unwrap();
    let keeper = Keeper::start(&store).unwrap();
    keeper.begin(Some(space(&store)));
    keeper.keep(made(0..50));
    keeper.keep(made(50..90));
    keeper.publish();
    keeper.settle();
    let kept = stored(&generous);
    assert!(!kept.is_empty() && kept.len() < 50, "{kept:?}");
    let news = keeper.news();
    assert!(matches!(&news.complaints[..], [one] if one.text.contains("budget")), "{:?}", news.complaints);
    assert_eq!((news.kept, news.published), (kept.len() as u64, kept.len()));
}

#[test]
fn a_store_that_has_room_again_is_written_again_after_the_next_publishing() {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::open(dir.path(), Some(100_000)).unwrap();
    let keeper = Keeper::start(&store).unwrap();
    keeper.begin(Some(space(&store)));
    std::fs::create_dir_all(store.keys_dir()).unwrap();
    let others = store.keys_dir().join("others");
    std::fs::write(&others, [0; 100_000]).unwrap();
    keeper.keep(made(0..1));
    keeper.settle();
    std::fs::remove_file(&others).unwrap();
    keeper.keep(made(1..2));
    keeper.publish();
    keeper.keep(made(2..3));
    keeper.publish();
    keeper.settle();
    assert_eq!(stored(&store), [2], "one attempt before what there is is published");
    let complaints = keeper.news().complaints;
    assert!(matches!(&complaints[..], [one] if one.text.contains("budget")), "{complaints:?}");
}

#[test]
fn a_trainer_that_waits_shows_motion_while_the_store_does_and_only_then() {
    let dir = tempfile::tempdir().unwrap();
    let keeper = Keeper::start(&Store::open(dir.path(), None).unwrap()).unwrap();
    let (trainer, deadline) = (Arc::<Pulse>::default(), Instant::now() + Duration::from_secs(60));
    let until = |reached: &dyn Fn() -> bool| {
        while !reached() {
            assert!(Instant::now() < deadline, "{:?}", trainer.reading());
            thread::yield_now();
        }
    };
    // In the place of a disk: the thread is busy until this is sent, and then told to beat by hand.
    let (go, busy) = sync_channel(0);
    keeper.order(Order::Settle(go));
    thread::scope(|scope| {
        scope.spawn(|| {
            trainer.clone().install();
            trainer.beat();
            keeper.settle();
        });
        let still = || trainer.reading().still;
        until(&|| still() > 4 * pulse::LOOK);
        // The disk gets on, and so does who waits for it.
        until(&|| {
            keeper.pulse.beat();
            still() < pulse::LOOK
        });
        until(&|| still() > 4 * pulse::LOOK);
        busy.recv().expect("the thread answers");
    });
}

#[test]
fn without_a_space_nothing_is_stored_and_nothing_is_wrong() {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::open(dir.path(), None).unwrap();
    let keeper = Keeper::start(&store).unwrap();
    keeper.begin(None);
    keeper.keep(made(0..3));
    keeper.publish();
    keeper.settle();
    assert!(keeper.news().complaints.is_empty());
    assert!(stored(&store).is_empty());
}
