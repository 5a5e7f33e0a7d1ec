//! A server that fails in every way a server can: what may pass is tried again, what may not is named.

use std::{fs, net::TcpListener, time::Duration};

use coxswain_remote::{BLOCK_BYTES, open};

use super::{
    cache, content, read,
    server::{Answers, Fault, Server},
};

#[test]
fn ranges_are_the_objects_bytes_and_are_asked_for_once() {
    let dir = tempfile::tempdir().unwrap();
    let bytes = content(3 * BLOCK_BYTES as usize + 1000);
    fs::write(dir.path().join("file"), &bytes).unwrap();
    let server = Server::files(dir.path());
    let address = format!("{}/file", server.url());
    for (offset, len) in [(0, 10), (BLOCK_BYTES - 5, 10), (BLOCK_BYTES + 1, 2 * BLOCK_BYTES as usize), (7, 0)]
    {
        assert!(read(&address, offset, len).unwrap() == bytes[offset as usize..][..len], "{offset} {len}");
    }
    assert_eq!(read(&address, bytes.len() as u64 - 3, 3).unwrap(), bytes[bytes.len() - 3..]);
    assert!(read(&address, bytes.len() as u64 - 3, 4).is_err(), "beyond the end");
    assert_eq!(server.requests(), 1 + 4, "its head, and each block");
    open(&address).unwrap().bring(&[0..bytes.len() as u64]).unwrap();
    assert_eq!(server.requests(), 5);
}

#[test]
fn the_blocks_of_one_read_come_side_by_side() {
    let dir = tempfile::tempdir().unwrap();
    let bytes = content(6 * BLOCK_BYTES as usize);
    fs::write(dir.path().join("page"), &bytes).unwrap();
    let server = Server::start(Answers::Files(dir.path().to_path_buf()), Duration::from_millis(200));
    assert!(read(&format!("{}/page", server.url()), 0, bytes.len()).unwrap() == bytes);
    assert!(server.most_under_way() > 1, "one block after the other");
}

#[test]
fn what_passes_is_tried_again() {
    let dir = tempfile::tempdir().unwrap();
    let bytes = content(2 * BLOCK_BYTES as usize);
    fs::write(dir.path().join("file"), &bytes).unwrap();
    let server = Server::files(dir.path());
    let address = format!("{}/file", server.url());
    server.fail(&[Fault::Unavailable, Fault::Cut, Fault::Halting]);
    assert!(read(&address, 0, bytes.len()).unwrap() == bytes);
    assert_eq!(server.requests(), 1 + 2 + 2, "two of the answers were of no use");
}

#[test]
fn an_object_that_changes_under_way_is_refused_by_name() {
    let dir = tempfile::tempdir().unwrap();
    let bytes = content(2 * BLOCK_BYTES as usize);
    fs::write(dir.path().join("file"), &bytes).unwrap();
    let server = Server::files(dir.path());
    let address = format!("{}/file", server.url());
    assert!(read(&address, 0, 100).unwrap() == bytes[..100]);
    let other: Vec<u8> = bytes.iter().map(|byte| !byte).collect();
    fs::write(dir.path().join("file"), &other).unwrap();
    let error = read(&address, BLOCK_BYTES, 100).unwrap_err();
    assert!(error.contains("is no longer the same object") && error.contains("start again"), "{error}");
    assert!(read(&address, 50, 100).unwrap() == bytes[50..150], "what was brought before is what it was");
    let error = open(&address).unwrap().bring(&[0..bytes.len() as u64]).unwrap_err().to_string();
    assert!(error.contains("is no longer the same object"), "{error}");
}

#[test]
fn a_block_that_is_damaged_on_the_disk_is_brought_again() {
    let dir = tempfile::tempdir().unwrap();
    let bytes = content(5000);
    fs::write(dir.path().join("file"), &bytes).unwrap();
    let server = Server::files(dir.path());
    let address = format!("{}/file", server.url());
    read(&address, 0, 100).unwrap();
    // As another process that opens the object would find it.
    let blocks = walk(cache());
    let block = blocks.iter().find(|path| fs::read(path).unwrap().starts_with(&bytes)).expect("it is kept");
    fs::write(block, "garbage").unwrap();
    assert!(read(&address, 0, 5000).unwrap() == bytes);
    assert!(fs::read(block).unwrap().starts_with(&bytes), "it is whole again");
    fs::remove_file(block).unwrap();
    assert!(read(&address, 0, 5000).unwrap() == bytes);
    assert_eq!(server.requests(), 4);
}

fn walk(dir: &std::path::Path) -> Vec<std::path::PathBuf> {
    let entries = fs::read_dir(dir).into_iter().flatten().flatten().map(|entry| entry.path());
    entries.flat_map(|path| if path.is_dir() { walk(&path) } else { vec![path] }).collect()
}

#[test]
fn missing_forbidden_and_silent_are_told_apart() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("file"), "four").unwrap();
    let server = Server::files(dir.path());
    let error = read(&format!("{}/other", server.url()), 0, 1).unwrap_err();
    assert!(error.contains("no such object"), "{error}");
    server.fail(&[Fault::Forbidden]);
    let error = read(&format!("{}/file", server.url()), 0, 1).unwrap_err();
    assert!(error.contains("access is refused") && error.contains("403"), "{error}");
    // It listens, and answers nobody.
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let error = read(&format!("http://{}/file", listener.local_addr().unwrap()), 0, 1).unwrap_err();
    assert!(error.contains("no answer within 15 s") && error.contains("check the network"), "{error}");
}
