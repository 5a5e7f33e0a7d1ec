//! Several handles, writers and processes on one store.

use std::{fs, io::Read, process::Command};

use super::{super::shard, *};

#[test]
fn nothing_is_visible_before_it_is_published_and_everything_after() {
    let dir = tempfile::tempdir().unwrap();
    let (writing, reading) = (open(dir.path(), CacheDtype::Float32), open(dir.path(), CacheDtype::Float32));
    let mut writer = writing.writer().unwrap();
    (0..5).for_each(|number| assert!(append(&mut writer, number, 3)));
    reading.refresh().unwrap();
    assert_eq!((writing.known(), reading.known()), (0, 0));
    assert_eq!(writer.publish().unwrap(), 5);
    assert_eq!(writing.known(), 5);
    assert_eq!((reading.refresh().unwrap(), reading.known()), (1, 5));
    assert_eq!(read(&reading, 4), Some(values(4, 3)));
    assert_eq!(read(&reading, 5), None);
}

#[test]
fn a_writer_that_is_dropped_leaves_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let namespace = open(dir.path(), CacheDtype::Float32);
    let before = fs::read_dir(namespace.dir()).unwrap().count();
    let mut writer = namespace.writer().unwrap();
    append(&mut writer, 1, 3);
    drop(writer);
    assert_eq!(fs::read_dir(namespace.dir()).unwrap().count(), before);
    assert_eq!(namespace.writer().unwrap().publish().unwrap(), 0);
    assert_eq!(fs::read_dir(namespace.dir()).unwrap().count(), before);
}

#[test]
fn writers_at_once_never_meet_and_what_both_store_is_harmless() {
    let dir = tempfile::tempdir().unwrap();
    std::thread::scope(|scope| {
        for thread in 0..4u64 {
            let dir = dir.path();
            scope.spawn(move || {
                let namespace = open(dir, CacheDtype::Bfloat16);
                for round in 0..5 {
                    let mut writer = namespace.writer().unwrap();
                    // Neighbours share half of their records.
                    for i in 0..10 {
                        append(&mut writer, round * 100 + thread * 5 + i, 2);
                    }
                    writer.publish().unwrap();
                }
            });
        }
    });
    let namespace = open(dir.path(), CacheDtype::Bfloat16);
    let numbers: Vec<u64> = (0..5).flat_map(|round| (0..25).map(move |i| round * 100 + i)).collect();
    assert_eq!(namespace.known(), numbers.len());
    for number in numbers {
        let mut expected = values(number, 2);
        crate::round_trip(CacheDtype::Bfloat16, WIDTH as usize, &mut expected);
        assert_eq!(read(&namespace, number), Some(expected));
    }
}

#[test]
fn what_is_known_already_is_not_stored_again() {
    let dir = tempfile::tempdir().unwrap();
    let namespace = filled(dir.path(), 0..3, 2);
    let mut writer = namespace.writer().unwrap();
    let (ids, values) = (ids(2, 2), values(2, 2));
    let record = Record { ids: &ids, shapes: &[], values: &values };
    assert!(!writer.append(key(2), &record).unwrap());
    assert!(writer.is_empty());
    assert!(append(&mut writer, 3, 2));
    assert!(!append(&mut writer, 3, 2), "equal frames of one shard are one record");
    assert_eq!(writer.publish().unwrap(), 1);
}

/// Not a test by itself: the process that the next one kills while it writes.
#[test]
fn writes_until_it_is_killed() {
    let Some(dir) = std::env::var_os("COX_TEST_STORE") else { return };
    let namespace = open(Path::new(&dir), CacheDtype::Float32);
    let mut writer = namespace.writer().unwrap();
    for number in 0.. {
        append(&mut writer, number, 40);
        if number == 9 {
            writer.publish().unwrap();
            writer = namespace.writer().unwrap();
        }
        // One shard is published and the next has been begun on disk.
        if number == 2000 {
            println!("WRITING");
        }
    }
}

#[test]
fn a_killed_writer_costs_its_open_shard_and_nothing_else() {
    let dir = tempfile::tempdir().unwrap();
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["tests::sharing::writes_until_it_is_killed", "--exact", "--nocapture"])
        .env("COX_TEST_STORE", dir.path())
        .stdout(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    let (mut seen, mut out) = (Vec::new(), child.stdout.take().unwrap());
    while !String::from_utf8_lossy(&seen).contains("WRITING") {
        let mut chunk = [0; 64];
        let len = out.read(&mut chunk).unwrap();
        assert!(len > 0, "the writer ended: {}", String::from_utf8_lossy(&seen));
        seen.extend_from_slice(&chunk[..len]);
    }
    let store = Store::existing(dir.path()).unwrap().unwrap();
    let living = store.list().unwrap().0.remove(0);
    assert!(living.in_use && living.unfinished == 1, "{living:?}");
    assert!(store.gc(Some(0), false).unwrap().namespaces.is_empty(), "a namespace in use was evicted");
    child.kill().unwrap();
    child.wait().unwrap();

    let namespace = open(dir.path(), CacheDtype::Float32);
    assert_eq!(namespace.known(), 10);
    assert!((0..10).all(|number| read(&namespace, number) == Some(values(number, 40))));
    let open_shard = unfinished(namespace.dir());
    // Just written, so it might be a living writer's that has not locked it yet.
    assert!(store.gc(None, false).unwrap().unfinished.is_empty());
    let old = std::time::SystemTime::now() - std::time::Duration::from_secs(60);
    fs::File::options().append(true).open(&open_shard).unwrap().set_modified(old).unwrap();
    assert_eq!(store.gc(None, true).unwrap().unfinished, std::slice::from_ref(&open_shard));
    assert!(open_shard.exists(), "a dry run removed something");
    let collected = store.gc(None, false).unwrap();
    assert_eq!(collected.unfinished, std::slice::from_ref(&open_shard));
    assert!(collected.bytes > 0 && !open_shard.exists());
    assert_eq!(open(dir.path(), CacheDtype::Float32).known(), 10);
}

fn unfinished(dir: &Path) -> std::path::PathBuf {
    let paths = fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path());
    let mut open: Vec<_> = paths.filter(|path| path.extension().is_some_and(|e| e == "tmp")).collect();
    assert_eq!(open.len(), 1);
    open.remove(0)
}

#[test]
fn records_of_equal_counts_need_no_table_of_offsets() {
    let dir = tempfile::tempdir().unwrap();
    let (even, uneven) =
        (filled(&dir.path().join("a"), 0..8, 2), open(&dir.path().join("b"), CacheDtype::Float32));
    let mut writer = uneven.writer().unwrap();
    (0..8).for_each(|number| assert!(append(&mut writer, number, if number == 7 { 1 } else { 2 })));
    writer.publish().unwrap();
    let record = (8 + 12usize).next_multiple_of(64) + (2 * WIDTH as usize * 4).next_multiple_of(64);
    let rest = shard::HEADER + shard::FOOTER;
    assert_eq!(even.bytes() as usize, rest + 8 * (record + 56));
    let shorter = (4 + 12usize).next_multiple_of(64) + (WIDTH as usize * 4).next_multiple_of(64);
    assert_eq!(uneven.bytes() as usize, rest + 7 * record + shorter + 8 * 80);
    assert_eq!(read(&uneven, 7), Some(values(7, 1)));
    assert_eq!(read(&uneven, 6), Some(values(6, 2)));
}
