//! Files of the store that others wrote, or that a disk changed.

use std::fs;

use coxswain_fuzz::Target;

use super::*;
use crate::{
    memo_file,
    shard::{FOOTER, HEADER, Shard, shard_digest},
    stamp::Stamp,
};

/// The footer's digest of whatever the shard now is, and the index where the file says it is.
fn seal(bytes: &mut [u8]) {
    let Some(footer_at) = bytes.len().checked_sub(FOOTER).filter(|at| *at >= HEADER) else { return };
    let index_at: [u8; 8] = std::array::from_fn(|i| bytes[footer_at + i]);
    let index_at =
        usize::try_from(u64::from_le_bytes(index_at)).unwrap_or(usize::MAX).clamp(HEADER, footer_at);
    let digest = shard_digest(&bytes[..HEADER], &bytes[index_at..footer_at + 56]);
    bytes[footer_at + 56..footer_at + 72].copy_from_slice(&digest);
    bytes[footer_at + 72..].copy_from_slice(b"COXVLEND");
}

/// The digest of a memo, at its end.
fn seal_memo(bytes: &mut [u8]) {
    if let Some((rest, digest)) = bytes.split_last_chunk_mut::<16>() {
        digest.copy_from_slice(&blake3::hash(rest).as_bytes()[..16]);
    }
}

/// The only shard below `dir`.
fn shard_of(dir: &Path) -> Vec<u8> {
    let mut found = vec![dir.to_owned()];
    while let Some(path) = found.pop() {
        if path.is_dir() {
            found.extend(fs::read_dir(path).unwrap().map(|entry| entry.unwrap().path()));
            continue;
        }
        let bytes = fs::read(path).unwrap();
        if bytes.starts_with(b"COXVLPT\0") {
            return bytes;
        }
    }
    panic!("no shard in {}", dir.display());
}

#[test]
fn a_hostile_shard_is_damaged_or_read_within_its_own_size() {
    let dir = tempfile::tempdir().unwrap();
    let equal = filled(&dir.path().join("equal"), 0..4, 3);
    let key = equal.key();
    let namespace = open(&dir.path().join("differing"), CacheDtype::Float32);
    let mut writer = namespace.writer().unwrap();
    (0..4).for_each(|number| assert!(append(&mut writer, number, 1 + number as usize)));
    writer.publish().unwrap();
    let samples = ["equal", "differing"].map(|name| shard_of(&dir.path().join(name)));
    let path = dir.path().join("hostile");
    Target::new("shards", samples).mended_by(seal).check(|bytes| {
        fs::write(&path, bytes).unwrap();
        let Ok(shard) = Shard::open(&path, &key, CacheDtype::Float32, WIDTH) else { return };
        assert!(shard.keys().count() == shard.len());
        for record in 0..shard.len().min(64) {
            drop(shard.lead(record));
            if let Ok((entry, _)) = shard.sound(record) {
                let mut out = vec![0.0; entry.counts.tokens as usize * WIDTH as usize];
                drop(shard.read(record, &mut out));
            }
        }
    });
}

#[test]
fn a_hostile_memo_is_damaged_or_read_within_its_own_size() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("memo");
    let digests = |count: u8| (0..count).map(|i| Digest([i; 32])).collect();
    let columns = [("a/file", "images", 3), ("another", "state", 1)];
    let columns =
        columns.map(|(path, what, count)| ((path.into(), what.into()), (Stamp([7; 4]), digests(count))));
    memo_file::write(&path, &columns.into()).unwrap();
    let sample = fs::read(&path).unwrap();
    Target::new("memos", [sample]).mended_by(seal_memo).check(|bytes| {
        fs::write(&path, bytes).unwrap();
        drop(memo_file::read(&path));
    });
}
