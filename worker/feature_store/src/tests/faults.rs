//! Damage of any kind: named, a miss, stored again by itself, and never a wrong value.

use std::{fs, os::unix::process::CommandExt, path::PathBuf, process::Command};

use proptest::prelude::*;

use super::{super::shard, *};

const RECORDS: u64 = 6;
const TOKENS: usize = 3;

/// The only shard of a namespace.
fn only_shard(namespace: &Namespace) -> PathBuf {
    let mut names = super::super::namespace::shard_names(namespace.dir()).unwrap();
    assert_eq!(names.len(), 1);
    namespace.dir().join(names.remove(0))
}

/// Opens the store again and reads everything; numbers of the records that are misses. Whatever is read must
/// be right.
fn misses(dir: &Path) -> Vec<u64> {
    let namespace = open(dir, CacheDtype::Float32);
    let missing = |number: &u64| match read(&namespace, *number) {
        None => true,
        Some(found) => {
            assert_eq!(found, values(*number, TOKENS), "a wrong value of record {number}");
            false
        }
    };
    (0..RECORDS).filter(missing).collect()
}

/// Stores what is missing and checks that then nothing is.
fn heal(dir: &Path) {
    let namespace = open(dir, CacheDtype::Float32);
    let missing: Vec<u64> = (0..RECORDS).filter(|number| read(&namespace, *number).is_none()).collect();
    let mut writer = namespace.writer().unwrap();
    assert!(missing.iter().all(|number| append(&mut writer, *number, TOKENS)));
    assert_eq!(writer.publish().unwrap(), missing.len());
    assert_eq!(misses(dir), [0u64; 0]);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn a_flipped_bit_anywhere_costs_one_record_or_one_shard(at in 0.0f64..1.0, bit in 0u8..8) {
        let dir = tempfile::tempdir().unwrap();
        let path = only_shard(&filled(dir.path(), 0..RECORDS, TOKENS));
        let mut bytes = fs::read(&path).unwrap();
        let at = (at * bytes.len() as f64) as usize;
        bytes[at] ^= 1 << bit;
        // As the device does it: in place, under the shard's own name.
        fs::write(&path, &bytes).unwrap();
        let missing = misses(dir.path()).len() as u64;
        let in_a_record = at >= shard::HEADER && at < bytes.len() - shard::FOOTER - RECORDS as usize * 56;
        prop_assert!(missing == RECORDS || (in_a_record && missing <= 1), "{missing} misses from byte {at}");
        let store = Store::existing(dir.path()).unwrap().unwrap();
        let verified = store.verify().unwrap();
        // A bit of padding is nobody's.
        prop_assert_eq!(verified.is_sound(), missing == 0);
        prop_assert_eq!(verified.records, RECORDS - missing);
        // A bit of the version makes it a newer version's, which is not ours to repair.
        let repaired = store.repair(&verified.damaged).unwrap();
        let kept = if verified.damaged.is_empty() { vec![] } else { vec![RECORDS - missing] };
        prop_assert_eq!(repaired.iter().map(|shard| shard.kept).collect::<Vec<_>>(), kept);
        prop_assert!(store.verify().unwrap().damaged.is_empty());
        prop_assert_eq!(misses(dir.path()).len() as u64, missing);
        heal(dir.path());
    }

    #[test]
    fn a_shard_cut_short_anywhere_is_rebuilt_alone(at in 0.0f64..1.0) {
        let dir = tempfile::tempdir().unwrap();
        let path = only_shard(&filled(dir.path(), 0..RECORDS, TOKENS));
        let other = open(dir.path(), CacheDtype::Float32);
        let mut writer = other.writer().unwrap();
        append(&mut writer, 100, 2);
        writer.publish().unwrap();
        let bytes = fs::read(&path).unwrap();
        fs::write(&path, &bytes[..(at * bytes.len() as f64) as usize]).unwrap();
        prop_assert_eq!(misses(dir.path()), (0..RECORDS).collect::<Vec<_>>());
        prop_assert_eq!(read(&open(dir.path(), CacheDtype::Float32), 100), Some(values(100, 2)));
        heal(dir.path());
        let store = Store::existing(dir.path()).unwrap().unwrap();
        prop_assert_eq!(store.gc(None, false).unwrap().unusable, [path]);
        prop_assert!(store.verify().unwrap().is_sound());
        prop_assert_eq!(misses(dir.path()), [0u64; 0]);
    }
}

#[test]
fn damage_is_named_by_file_record_and_both_checksums() {
    let dir = tempfile::tempdir().unwrap();
    let path = only_shard(&filled(dir.path(), 0..RECORDS, TOKENS));
    let mut bytes = fs::read(&path).unwrap();
    let span = (bytes.len() - shard::HEADER - shard::FOOTER - RECORDS as usize * 56) / RECORDS as usize;
    // Values of record 2, ids of record 4.
    bytes[shard::HEADER + 2 * span + 64 + 5] ^= 1;
    bytes[shard::HEADER + 4 * span + 1] ^= 1;
    fs::write(&path, &bytes).unwrap();

    let namespace = open(dir.path(), CacheDtype::Float32);
    assert!(namespace.get(&key(4)).is_none(), "ids are verified before they are shown");
    let record = namespace.get(&key(2)).unwrap();
    let mut out = vec![7.0; TOKENS * WIDTH as usize];
    let damage = record.read_f32(&mut out).unwrap_err();
    assert!(out.iter().all(|x| *x == 7.0), "something unverified was handed out");
    assert_eq!((damage.path.as_path(), damage.record), (path.as_path(), Some(2)));
    let text = damage.to_string();
    for says in ["record 2: values: checksum ", ", expected ", "computed again"] {
        assert!(text.contains(says), "{says:?} in {text}");
    }
    assert!(namespace.get(&key(2)).is_none() && namespace.known() == RECORDS as usize - 2);
    let (count, damages) = namespace.damaged();
    assert_eq!((count, damages.len()), (2, 2));
    assert_eq!(damages[0].record, Some(4));

    let verified = Store::existing(dir.path()).unwrap().unwrap().verify().unwrap();
    assert_eq!(verified.damaged.iter().map(|d| d.record).collect::<Vec<_>>(), [Some(2), Some(4)]);
}

#[test]
fn a_repair_leaves_the_bits_of_what_is_sound_and_readers_of_the_old_shard_alone() {
    for dtype in [CacheDtype::Float32, CacheDtype::Int8] {
        let dir = tempfile::tempdir().unwrap();
        let namespace = open(dir.path(), dtype);
        let mut writer = namespace.writer().unwrap();
        // Of different sizes: a shard with a table of offsets.
        (0..5).for_each(|number| assert!(append(&mut writer, number, 2 + number as usize)));
        writer.publish().unwrap();
        let before: Vec<_> = (0..5).map(|number| read(&namespace, number).unwrap()).collect();
        let path = only_shard(&namespace);
        let mut bytes = fs::read(&path).unwrap();
        bytes[shard::HEADER + 64] ^= 4;
        fs::write(&path, &bytes).unwrap();

        let store = Store::existing(dir.path()).unwrap().unwrap();
        let damaged = store.verify().unwrap().damaged;
        assert_eq!(damaged.iter().map(|damage| damage.record).collect::<Vec<_>>(), [Some(0)]);
        assert_eq!(store.repair(&damaged).unwrap(), [super::super::Repair { path: path.clone(), kept: 4 }]);
        let verified = store.verify().unwrap();
        assert!(verified.is_sound() && verified.records == 4, "{verified:?}");
        for namespace in [namespace, open(dir.path(), dtype)] {
            assert!(read(&namespace, 0).is_none());
            (1..5).for_each(|number| {
                assert_eq!(read(&namespace, number).as_ref(), Some(&before[number as usize]))
            });
        }
        let (namespaces, _) = store.list().unwrap();
        assert_eq!((namespaces[0].shards, namespaces[0].unfinished), (1, 0));
        assert_eq!(namespaces[0].rounding_error > 0.0, dtype == CacheDtype::Int8);
    }
}

#[test]
fn a_second_copy_takes_the_place_of_a_damaged_one() {
    let dir = tempfile::tempdir().unwrap();
    // Two writers that did not know of each other.
    let namespaces = [open(dir.path(), CacheDtype::Float32), open(dir.path(), CacheDtype::Float32)];
    let mut writers = namespaces.each_ref().map(|namespace| namespace.writer().unwrap());
    writers.iter_mut().for_each(|writer| assert!(append(writer, 1, TOKENS)));
    for writer in writers {
        assert_eq!(writer.publish().unwrap(), 1);
    }
    let mut names = super::super::namespace::shard_names(namespaces[0].dir()).unwrap();
    let newest = namespaces[0].dir().join(names.pop().unwrap());
    let mut bytes = fs::read(&newest).unwrap();
    bytes[shard::HEADER + 64] ^= 0x80;
    fs::write(&newest, &bytes).unwrap();

    let namespace = open(dir.path(), CacheDtype::Float32);
    assert_eq!(read(&namespace, 1), None, "the newest copy is tried first");
    assert_eq!(read(&namespace, 1), Some(values(1, TOKENS)));
    assert_eq!(namespace.damaged().0, 1);
}

#[test]
fn a_shard_that_cannot_be_opened_today_is_tried_again() {
    let dir = tempfile::tempdir().unwrap();
    let path = only_shard(&filled(dir.path(), 0..RECORDS, TOKENS));
    let aside = path.with_extension("aside");
    // In the place of a file system that does not answer: a name that leads round in a circle.
    fs::rename(&path, &aside).unwrap();
    std::os::unix::fs::symlink(&path, &path).unwrap();
    let namespace = open(dir.path(), CacheDtype::Float32);
    assert_eq!((namespace.known(), namespace.damaged().0), (0, 0));
    fs::rename(&aside, &path).unwrap();
    assert_eq!((namespace.refresh().unwrap(), namespace.known() as u64), (1, RECORDS));
    assert_eq!(read(&namespace, 1), Some(values(1, TOKENS)));
}

#[test]
fn what_a_newer_version_wrote_is_refused_with_both_versions() {
    let dir = tempfile::tempdir().unwrap();
    let namespace = filled(dir.path(), 0..RECORDS, TOKENS);
    let (shard, file) = (only_shard(&namespace), namespace.dir().join("space.json"));
    drop(namespace);
    let mut bytes = fs::read(&shard).unwrap();
    bytes[8] = 9;
    fs::write(&shard, &bytes).unwrap();
    assert_eq!(misses(dir.path()).len() as u64, RECORDS);
    let store = Store::existing(dir.path()).unwrap().unwrap();
    let unusable = store.verify().unwrap().unusable;
    assert!(unusable[0].contains("format 9") && unusable[0].contains("up to 1"), "{unusable:?}");
    assert!(
        store.gc(None, false).unwrap().unusable.is_empty(),
        "what a newer version wrote is not ours to remove"
    );

    let newer = fs::read_to_string(&file).unwrap().replace("\"format\": 1", "\"format\": 3");
    fs::write(&file, newer).unwrap();
    let refused = store.namespace(&description(CacheDtype::Float32)).err().unwrap();
    assert!(matches!(refused, StoreError::Newer { found: 3, known: 1, .. }), "{refused}");
    let whole = dir.path().join("store.json");
    fs::write(&whole, r#"{"format": 2}"#).unwrap();
    let refused = Store::open(dir.path(), None).unwrap_err().to_string();
    assert!(refused.contains("store.json: written in format 2") && refused.contains("up to 1"), "{refused}");
}

#[test]
fn a_directory_that_is_no_store_is_not_taken_for_one() {
    let dir = tempfile::tempdir().unwrap();
    assert!(Store::existing(dir.path()).unwrap().is_none());
    fs::write(dir.path().join("store.json"), "{}").unwrap();
    assert!(Store::open(dir.path(), None).unwrap_err().to_string().contains("has no `format`"));
    fs::write(dir.path().join("store.json"), "half a").unwrap();
    assert!(Store::open(dir.path(), None).unwrap_err().to_string().contains("not JSON"));
}

/// Runs a test of this file in a process whose files may not grow beyond so many blocks; what it says.
fn limited_to(blocks: u32, test: &str, (name, value): (&str, &Path)) -> String {
    // The limit's signal is ignored across `exec`, so that a write fails as it does on a full disk.
    let script = format!(
        r#"trap "" XFSZ; ulimit -f {blocks}; exec "$0" tests::faults::{test} --exact --nocapture 2>&1 | cat"#
    );
    let mut command = Command::new("sh");
    command.arg0("sh").args(["-c", &script]).arg(std::env::current_exe().unwrap()).env(name, value);
    String::from_utf8_lossy(&command.output().unwrap().stdout).into_owned()
}

/// Not a test by itself: the process whose files may not grow beyond a limit.
#[test]
fn writes_against_a_limit() {
    let Some(dir) = std::env::var_os("COX_TEST_STORE_FULL") else { return };
    let namespace = open(Path::new(&dir), CacheDtype::Float32);
    let mut writer = namespace.writer().unwrap();
    assert!(append(&mut writer, 0, TOKENS));
    writer.publish().unwrap();
    let mut writer = namespace.writer().unwrap();
    let (ids, values) = (ids(1, 2000), values(1, 2000));
    let record = |i: u64| writer.append(key(i), &Record { ids: &ids, shapes: &[], values: &values });
    let error = (1..1000).map(record).find_map(Result::err).expect("the limit is far below this");
    assert!(error.is_full(), "{error}");
    assert!(error.to_string().contains("no more features are stored, and training continues"), "{error}");
    assert!(writer.publish().unwrap_err().to_string().contains("its records are not published"));
    // What was there is still served.
    assert_eq!(read(&namespace, 0), Some(super::values(0, TOKENS)));
    println!("FULL");
}

/// Not a test by itself: a process for which there is no room at all.
#[test]
fn opens_a_store_without_any_room() {
    let Some(dir) = std::env::var_os("COX_TEST_STORE_NO_ROOM") else { return };
    let store = Store::open(Path::new(&dir), None).expect("a full disk costs time, not the run");
    assert!(store.read_only().is_some_and(|why| why.contains("large")), "{:?}", store.read_only());
    let digest = store.digest_of::<StoreError>([].into_iter(), "none", || Ok(Digest([3; 32])));
    assert_eq!(digest.unwrap(), Digest([3; 32]));
    println!("NO ROOM");
}

#[test]
fn a_store_that_there_is_no_room_for_opens_as_an_empty_one() {
    let dir = tempfile::tempdir().unwrap();
    let limited = "opens_a_store_without_any_room";
    let message = limited_to(0, limited, ("COX_TEST_STORE_NO_ROOM", &dir.path().join("store")));
    assert!(message.contains("NO ROOM"), "{message}");
}

#[test]
fn a_full_disk_is_an_error_that_leaves_what_is_stored_and_nothing_else() {
    let dir = tempfile::tempdir().unwrap();
    let message = limited_to(1024, "writes_against_a_limit", ("COX_TEST_STORE_FULL", dir.path()));
    assert!(message.contains("FULL"), "{message}");
    let namespace = open(dir.path(), CacheDtype::Float32);
    assert_eq!(namespace.known(), 1);
    let left = fs::read_dir(namespace.dir()).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap());
    assert!(left.into_iter().all(|name| !name.ends_with(".tmp")), "the unfinished shard takes space");
}
