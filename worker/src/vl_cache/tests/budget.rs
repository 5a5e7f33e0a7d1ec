//! Which spaces give way, and when.

use std::{
    fs,
    sync::atomic::{AtomicBool, Ordering},
    time::{Duration, SystemTime},
};

use super::*;

/// A space of other weights.
fn other(number: u8) -> SpaceDescription {
    let mut description = description(CacheDtype::Float32);
    description.ingredients.weights = Digest([number; 32]);
    description
}

/// A space of other weights with 50 records, unused since `age` seconds.
fn unused(store: &Store, number: u8, age: u64) -> std::path::PathBuf {
    let space = store.space(&other(number)).unwrap();
    let mut writer = space.writer().unwrap();
    (0..50).for_each(|i| assert!(append(&mut writer, i, 4)));
    writer.publish().unwrap();
    let dir = space.dir().to_path_buf();
    drop(space);
    let lock = fs::File::options().append(true).open(dir.join("in-use.lock")).unwrap();
    lock.set_modified(SystemTime::now() - Duration::from_secs(age)).unwrap();
    dir
}

#[test]
fn the_space_unused_for_longest_gives_way_and_one_in_use_never() {
    let dir = tempfile::tempdir().unwrap();
    let free = Store::open(dir.path(), None).unwrap();
    let (old, new, used) = (unused(&free, 1, 300), unused(&free, 2, 100), unused(&free, 3, 900));
    let in_use = free.space(&other(3)).unwrap();
    // One has to go.
    let bounded = Store::open(dir.path(), Some(free.bytes().unwrap() * 8 / 7 - 1)).unwrap();
    let space = bounded.space(&other(4)).unwrap();
    let mut writer = space.writer().unwrap();
    assert!(!old.exists() && new.exists() && used.exists());
    assert!(append(&mut writer, 1, 4));
    writer.publish().unwrap();

    // Everything unused goes, and it does not suffice.
    let tight = Store::open(dir.path(), Some(1000)).unwrap();
    let refused = tight.space(&other(4)).unwrap().writer().err().unwrap();
    assert!(refused.is_full() && refused.to_string().contains("cache.budget 1000"), "{refused}");
    assert!(!new.exists() && used.exists());
    assert_eq!(read(&in_use, 49), Some(values(49, 4)));
    assert_eq!(read(&space, 1), Some(values(1, 4)));
}

#[test]
fn a_part_ends_where_the_budget_does_and_can_be_published() {
    let dir = tempfile::tempdir().unwrap();
    let space = Store::open(dir.path(), Some(20_000)).unwrap().space(&other(1)).unwrap();
    let mut writer = space.writer().unwrap();
    let (ids, values) = (ids(0, 4), values(0, 4));
    let mut try_one =
        |i| writer.append(key(i), &Record { input_ids: &ids, image_grids: &[], values: &values });
    let refused = (0..1000).map(&mut try_one).find_map(Result::err).unwrap();
    assert!(matches!(refused, StoreError::OverBudget { .. }), "{refused}");
    let stored = writer.publish().unwrap();
    assert!((25..50).contains(&stored), "{stored} records of 448 bytes and their index in 20,000");
    assert!(Store::existing(dir.path()).unwrap().unwrap().bytes().unwrap() <= 20_000);
}

#[test]
fn gc_removes_what_is_over_the_budget_and_says_so_beforehand() {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::open(dir.path(), None).unwrap();
    let (old, new) = (unused(&store, 1, 300), unused(&store, 2, 100));
    let budget = store.bytes().unwrap() - 1;
    let planned = store.gc(Some(budget), true).unwrap();
    assert_eq!(planned.spaces, std::slice::from_ref(&old));
    assert!(old.exists());
    let done = store.gc(Some(budget), false).unwrap();
    assert_eq!((done.spaces, done.bytes), (planned.spaces, planned.bytes));
    assert!(!old.exists() && new.exists());
    assert!(store.gc(None, false).unwrap().bytes == 0 && new.exists());
}

#[test]
fn spaces_come_and_go_under_eviction_without_errors_or_wrong_values() {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::open(dir.path(), None).unwrap();
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let evictor = scope.spawn(|| {
            let mut evicted = 0;
            while !over.load(Ordering::Relaxed) {
                evicted += store.gc(Some(0), false).unwrap().spaces.len();
            }
            evicted
        });
        let users = [1, 2].map(|number| {
            let store = &store;
            scope.spawn(move || {
                for round in 0..60 {
                    let space = store.space(&other(number)).unwrap();
                    if read(&space, round).is_none() {
                        let mut writer = space.writer().unwrap();
                        append(&mut writer, round, 2);
                        writer.publish().unwrap();
                    }
                    assert_eq!(read(&space, round), Some(values(round, 2)));
                }
            })
        });
        let ended = users.map(|user| user.join());
        over.store(true, Ordering::Relaxed);
        for user in ended {
            user.expect("a user of the store failed");
        }
        assert!(evictor.join().expect("the evictor failed") > 0);
    });
}
