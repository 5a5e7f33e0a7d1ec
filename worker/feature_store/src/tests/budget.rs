//! Which namespaces give way, and when.

use std::{
    fs,
    sync::atomic::{AtomicBool, Ordering},
    time::{Duration, SystemTime},
};

use super::{
    super::{Coverage, usage},
    *,
};

/// A namespace of other weights.
fn other(number: u8) -> NamespaceDescription {
    let mut description = description(CacheDtype::Float32);
    description.ingredients.weights = Digest([number; 32]);
    description
}

/// A namespace of other weights with 50 records, unused since `age` seconds.
fn unused(store: &Store, number: u8, age: u64) -> std::path::PathBuf {
    let namespace = store.namespace(&other(number)).unwrap();
    let mut writer = namespace.writer().unwrap();
    (0..50).for_each(|i| assert!(append(&mut writer, i, 4)));
    writer.publish().unwrap();
    let dir = namespace.dir().to_path_buf();
    drop(namespace);
    let lock = fs::File::options().append(true).open(dir.join("in-use.lock")).unwrap();
    lock.set_modified(SystemTime::now() - Duration::from_secs(age)).unwrap();
    dir
}

#[test]
fn the_namespace_unused_for_longest_gives_way_and_one_in_use_never() {
    let dir = tempfile::tempdir().unwrap();
    let free = Store::open(dir.path(), None).unwrap();
    let (old, new, used) = (unused(&free, 1, 300), unused(&free, 2, 100), unused(&free, 3, 900));
    let in_use = free.namespace(&other(3)).unwrap();
    // One has to go.
    let bounded = Store::open(dir.path(), Some(free.bytes().unwrap() * 8 / 7 - 1)).unwrap();
    let namespace = bounded.namespace(&other(4)).unwrap();
    let mut writer = namespace.writer().unwrap();
    assert!(!old.exists() && new.exists() && used.exists());
    assert!(append(&mut writer, 1, 4));
    writer.publish().unwrap();

    // Everything unused goes, and it does not suffice.
    let tight = Store::open(dir.path(), Some(1000)).unwrap();
    let refused = tight.namespace(&other(4)).unwrap().writer().err().unwrap();
    assert!(refused.is_full() && refused.to_string().contains("cache.budget is 1000"), "{refused}");
    assert!(!new.exists() && used.exists());
    assert_eq!(read(&in_use, 49), Some(values(49, 4)));
    assert_eq!(read(&namespace, 1), Some(values(1, 4)));
}

#[test]
fn a_shard_ends_where_the_budget_does_and_can_be_published() {
    let dir = tempfile::tempdir().unwrap();
    let namespace = Store::open(dir.path(), Some(20_000)).unwrap().namespace(&other(1)).unwrap();
    let mut writer = namespace.writer().unwrap();
    let (ids, values) = (ids(0, 4), values(0, 4));
    let mut try_one = |i| writer.append(key(i), &Record { ids: &ids, shapes: &[], values: &values });
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
    assert_eq!(planned.namespaces, std::slice::from_ref(&old));
    assert!(old.exists());
    let done = store.gc(Some(budget), false).unwrap();
    assert_eq!((done.namespaces, done.bytes), (planned.namespaces, planned.bytes));
    assert!(!old.exists() && new.exists());
    assert!(store.gc(None, false).unwrap().bytes == 0 && new.exists());
}

#[test]
fn an_evictor_that_stands_still_is_not_waited_for_forever() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("evict.lock");
    let alone = |millis| usage::alone(&path, Some(Duration::from_millis(millis)));
    let first = alone(0).unwrap();
    let refused = alone(50).unwrap_err().to_string();
    assert!(refused.contains("evict.lock"), "{refused}");
    drop(first);
    alone(0).unwrap();
}

#[test]
fn evictors_at_once_take_every_namespace_and_none_of_them_fails() {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::open(dir.path(), None).unwrap();
    for _ in 0..20 {
        let namespaces = [1, 2, 3, 4].map(|number| {
            let namespace = store.namespace(&other(number)).unwrap();
            let mut writer = namespace.writer().unwrap();
            append(&mut writer, 0, 4);
            writer.publish().unwrap();
            namespace.dir().to_path_buf()
        });
        let used = store.bytes().unwrap();
        std::thread::scope(|scope| {
            for number in 10..14 {
                let bounded = Store::open(dir.path(), Some(used * 8 / 7)).unwrap();
                scope.spawn(move || drop(bounded.namespace(&other(number)).unwrap().writer().unwrap()));
            }
        });
        assert!(!namespaces[0].exists(), "nobody has made room");
        store.gc(Some(0), false).unwrap();
    }
}

#[test]
fn a_namespace_that_cannot_be_evicted_stays_and_the_next_one_goes() {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::open(dir.path(), None).unwrap();
    let (stuck, next) = (unused(&store, 1, 300), unused(&store, 2, 100));
    fs::remove_file(stuck.join("in-use.lock")).unwrap();
    fs::create_dir(stuck.join("in-use.lock")).unwrap();
    let evicted = store.gc(Some(0), false).unwrap().namespaces;
    assert_eq!(evicted, std::slice::from_ref(&next));
    assert!(stuck.exists() && !next.exists());
}

#[test]
fn what_an_eviction_that_was_broken_off_has_left_counts_and_goes_first() {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::open(dir.path(), None).unwrap();
    let (left, unused) = (unused(&store, 1, 300), unused(&store, 2, 100));
    let before = store.bytes().unwrap();
    fs::rename(&left, dir.path().join(".evicted-1")).unwrap();
    assert_eq!(store.bytes().unwrap(), before);
    let bounded = Store::open(dir.path(), Some(before)).unwrap();
    bounded.namespace(&other(3)).unwrap().writer().unwrap();
    assert!(!dir.path().join(".evicted-1").exists() && unused.exists());
}

#[test]
fn people_may_look_at_a_store_that_runs_evict_from() {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::open(dir.path(), None).unwrap();
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let looks = scope.spawn(|| {
            let mut looks = 0;
            while !over.load(Ordering::Relaxed) {
                store.list().unwrap();
                assert!(store.verify().unwrap().damaged.is_empty());
                store.gc(None, false).unwrap();
                looks += 1;
            }
            looks
        });
        let run = scope.spawn(|| {
            let coverage = Coverage { run: "run".into(), total: 2, stored: 1, among: 1 };
            for round in 0..30 {
                for number in 1..4 {
                    let namespace = store.namespace(&other(number)).unwrap();
                    let mut writer = namespace.writer().unwrap();
                    append(&mut writer, round, 4);
                    writer.publish().unwrap();
                    namespace.note_coverage(&coverage).unwrap();
                }
                store.directory.evict_down_to(0, None).unwrap();
            }
        });
        let ended = run.join();
        over.store(true, Ordering::Relaxed);
        ended.expect("the run failed");
        assert!(looks.join().expect("a look failed") > 0);
    });
}

#[test]
fn namespaces_come_and_go_under_eviction_without_errors_or_wrong_values() {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::open(dir.path(), None).unwrap();
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let evictor = scope.spawn(|| {
            let mut evicted = 0;
            while !over.load(Ordering::Relaxed) {
                evicted += store.gc(Some(0), false).unwrap().namespaces.len();
            }
            evicted
        });
        let users = [1, 2].map(|number| {
            let store = &store;
            scope.spawn(move || {
                for round in 0..60 {
                    let namespace = store.namespace(&other(number)).unwrap();
                    if read(&namespace, round).is_none() {
                        let mut writer = namespace.writer().unwrap();
                        append(&mut writer, round, 2);
                        writer.publish().unwrap();
                    }
                    assert_eq!(read(&namespace, round), Some(values(round, 2)));
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
