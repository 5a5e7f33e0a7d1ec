//! Tar shards: what Python's `webdataset` reads of its own and of `tarfile`'s, and files that are damaged or
//! made to do harm.

use std::{
    collections::BTreeMap,
    fs,
    io::Read,
    path::{Path, PathBuf},
};

use coxswain_data::{DataError, shards::Shards};
use proptest::prelude::*;
use serde::Deserialize;
use tar::{Builder, EntryType, Header};

/// A sample as `webdataset` has read it.
#[derive(Deserialize)]
struct Golden {
    shard: String,
    key: String,
    members: BTreeMap<String, String>,
}

fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/shards")
}

/// Ending and digest of every member of a sample, as the golden file has them.
fn members(shards: &Shards, sample: u64) -> BTreeMap<String, String> {
    let member = |member| {
        (
            shards.ending(member).to_owned(),
            format!("{:08x}", crc32fast::hash(&shards.read_member(member).unwrap())),
        )
    };
    shards.members(sample).map(member).collect()
}

#[test]
fn samples_are_those_that_webdataset_reads_in_its_order() {
    let golden: Vec<Golden> =
        serde_json::from_str(&fs::read_to_string(fixtures().join("golden.json")).unwrap()).unwrap();
    // It makes a sample of hidden files, which macOS adds to archives; here they are of none.
    let golden: Vec<_> = golden.into_iter().filter(|sample| !sample.key.ends_with('/')).collect();
    assert_eq!(Shards::open(&fixtures().join("*-000{3..3}.tar")).unwrap().len(), 2);
    let shards = Shards::open(&fixtures().join("*.tar")).unwrap();
    assert_eq!(shards.len(), golden.len() as u64);
    for (sample, golden) in golden.iter().enumerate() {
        assert_eq!(members(&shards, sample as u64), golden.members, "{} {}", golden.shard, golden.key);
        let first = shards.members(sample as u64).next().unwrap();
        assert!(shards.path(first).ends_with(&golden.shard));
        assert!(shards.place(first).contains(golden.key.get(..40).unwrap_or(&golden.key)));
    }
    let told = shards.warnings().join("\n");
    assert!(told.contains("(3 in all)") && told.contains("(6 in all)"), "{told}");
    // A member is a file of its own.
    let seg = shards.with_ending(0, "seg.png").unwrap();
    let mut bytes = Vec::new();
    shards.section(seg).unwrap().read_to_end(&mut bytes).unwrap();
    assert_eq!((bytes.len() as u64, &bytes[..6]), (shards.bytes(seg), &b"pngpng"[..]));
    assert_eq!(shards.head(seg, 4).unwrap(), b"pngp");
}

fn shard(dir: &Path, name: &str, members: &[(&str, &[u8])]) -> PathBuf {
    let path = dir.join(name);
    let mut tar = Builder::new(fs::File::create(&path).unwrap());
    for (name, content) in members {
        let mut header = Header::new_gnu();
        header.set_size(content.len() as u64);
        header.set_mode(0o644);
        tar.append_data(&mut header, name, *content).unwrap();
    }
    tar.finish().unwrap();
    path
}

const TWO: [(&str, &[u8]); 4] = [("a.jpg", b"one"), ("a.json", b"{}"), ("b.jpg", b"two"), ("b.json", b"{}")];

fn refused(path: &Path) -> String {
    let error = Shards::open(path).unwrap_err();
    assert!(matches!(error, DataError::Invalid { .. }), "{error:?}");
    error.to_string()
}

#[test]
fn the_fingerprint_knows_samples_not_files() {
    let dir = tempfile::tempdir().unwrap();
    shard(dir.path(), "all.tar", &TWO);
    shard(dir.path(), "x-0.tar", &TWO[..2]);
    shard(dir.path(), "x-1.tar", &TWO[2..]);
    let of = |pattern: &str| Shards::open(&dir.path().join(pattern)).unwrap().fingerprint();
    assert_eq!(of("all.tar"), of("x-{0..1}.tar"));
    assert_ne!(of("all.tar"), of("x-{1,0}.tar"));
    shard(dir.path(), "x-1.tar", &[("b.jpg", b"longer"), TWO[3]]);
    assert_ne!(of("all.tar"), of("x-{0..1}.tar"));
}

#[test]
fn damage_is_named_with_file_byte_and_remedy() {
    let dir = tempfile::tempdir().unwrap();
    let path = shard(dir.path(), "s.tar", &TWO);
    let whole = fs::read(&path).unwrap();
    let damaged = |bytes: Vec<u8>| {
        fs::write(&path, bytes).unwrap();
        refused(&path)
    };
    let mut flipped = whole.clone();
    flipped[1024 + 3] ^= 1;
    for (bytes, wanted) in [
        // The two bytes of `a.json` begin at 1536.
        (whole[..1537].to_vec(), "byte 1024: `a.json` has 2 bytes, but the shard has only 1 of them; copy"),
        (whole[..1024 + 100].to_vec(), "byte 1024: the shard ends within a header; copy"),
        (flipped, "byte 1024: not a valid tar header (wrong checksum); copy or write the shard again"),
        (b"\x1f\x8b\x08".repeat(300), "byte 0: compressed data; unpack"),
    ] {
        let found = damaged(bytes);
        assert!(found.contains("s.tar") && found.contains(wanted), "{found}");
    }
    for (members, wanted) in [
        (vec![TWO[0], TWO[1], ("a.JSON", b"{}")], "byte 2048: `a.JSON` occurs twice"),
        (
            vec![TWO[0], TWO[2], TWO[1]],
            "byte 2048: `a.json` does not follow the other members of sample `a`, which are at byte 0",
        ),
    ] {
        let found = refused(&shard(dir.path(), "s.tar", &members));
        assert!(found.contains(wanted), "{found}");
    }
    let many: Vec<String> = (0..1100).map(|number| format!("img.{number}.jpg")).collect();
    let many: Vec<(&str, &[u8])> = many.iter().map(|name| (&**name, &b""[..])).collect();
    let found = refused(&shard(dir.path(), "s.tar", &many));
    assert!(found.contains("more than 1024 members; rename them"), "{found}");
    // A shard that changes under way.
    fs::write(&path, &whole).unwrap();
    let opened = Shards::open(&path).unwrap();
    shard(dir.path(), "s.tar", &[("other.txt", b"something else"), ("other.b", &[0; 3000])]);
    let found = opened.read_member(opened.with_ending(1, "jpg").unwrap()).unwrap_err().to_string();
    assert!(found.contains("s.tar: byte 2048"), "{found}");
}

/// A tar file of one header with these changes.
fn hostile(change: impl FnOnce(&mut Header)) -> Vec<u8> {
    let mut header = Header::new_gnu();
    header.set_path("a.jpg").unwrap();
    header.set_size(0);
    change(&mut header);
    header.set_cksum();
    let mut bytes = header.as_bytes().to_vec();
    bytes.extend([0; 1024]);
    bytes
}

#[test]
fn hostile_shards_are_harmless() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("s.tar");
    let sizes = [1 << 33, 1 << 60, u64::MAX >> 1, u64::MAX];
    let huge = sizes.map(|size| hostile(move |header| header.set_size(size)));
    let name = hostile(|header| {
        header.set_entry_type(EntryType::GNULongName);
        header.set_size(1 << 40);
    });
    for bytes in huge.into_iter().chain([name]) {
        fs::write(&path, bytes).unwrap();
        let found = refused(&path);
        assert!(found.contains("bytes, but the shard has only"), "{found}");
    }
    let long = hostile(|header| {
        header.set_entry_type(EntryType::GNULongName);
        header.set_size(70_000);
    });
    fs::write(&path, [long, vec![b'x'; 100_000]].concat()).unwrap();
    assert!(refused(&path).contains("an extended header has 70000 bytes"));
    // Names that lead elsewhere are names; links lead nowhere.
    let outside = [
        hostile(|header| header.as_old_mut().name[..14].copy_from_slice(b"../../tmp/x.jp")),
        hostile(|header| header.set_entry_type(EntryType::Symlink)),
        hostile(|header| header.set_entry_type(EntryType::Link)),
        hostile(|header| header.set_entry_type(EntryType::Char)),
    ];
    for (bytes, samples) in outside.into_iter().zip([1, 0, 0, 0]) {
        fs::write(&path, bytes).unwrap();
        let shards = Shards::open(&path).unwrap();
        assert_eq!(shards.len(), samples);
        assert_eq!(shards.warnings().is_empty(), samples == 1);
    }
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1, "nothing was unpacked");
}

proptest! {
    #[test]
    fn whatever_is_changed_is_read_or_refused(
        shard in prop::sample::select(vec!["ustar-0000", "gnu-0001", "pax-0002", "wds-0003"]),
        changes in prop::collection::vec((0usize..8192, any::<u8>()), 1..6),
        mended in any::<bool>(),
        cut in 0usize..8192,
    ) {
        let mut bytes = fs::read(fixtures().join(format!("{shard}.tar"))).unwrap();
        for (at, value) in changes {
            bytes[at] = value;
            let start = at / 512 * 512;
            if mended && bytes[start + 257..start + 262] == *b"ustar" {
                let mut header = Header::new_old();
                header.as_mut_bytes().copy_from_slice(&bytes[start..start + 512]);
                header.set_cksum();
                bytes[start..start + 512].copy_from_slice(header.as_bytes());
            }
        }
        bytes.truncate(bytes.len() - cut);
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s.tar");
        fs::write(&path, &bytes).unwrap();
        if let Ok(shards) = Shards::open(&path) {
            for member in (0..shards.len()).flat_map(|sample| shards.members(sample)) {
                let read = shards.read_member(member).unwrap();
                prop_assert_eq!(read.len() as u64, shards.bytes(member));
            }
        }
    }
}

/// The checksums of headers, wherever one may begin.
fn mend(bytes: &mut [u8]) {
    for header in bytes.as_chunks_mut::<512>().0 {
        if header.starts_with(&[0]) {
            continue;
        }
        header[148..156].fill(b' ');
        let sum: u32 = header.iter().map(|byte| u32::from(*byte)).sum();
        header[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
    }
}

#[test]
fn hostile_shards_are_refused_or_read_within_their_own_size() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("hostile.tar");
    let samples = ["gnu-0001.tar", "pax-0002.tar", "wds-0003.tar"].map(|name| {
        let bytes = fs::read(fixtures().join(name)).unwrap();
        bytes[..bytes.len().min(10 << 10)].to_vec()
    });
    coxswain_fuzz::Target::new("tar shards", samples).mended_by(mend).check(|bytes| {
        fs::write(&path, bytes).unwrap();
        let Ok(shards) = Shards::open(&path) else { return };
        for sample in 0..shards.len() {
            shards.members(sample).for_each(|member| drop(shards.read_member(member)));
        }
    });
}
