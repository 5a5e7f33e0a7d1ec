//! Objects as files of a folder: whole or their beginnings, gone on with after an interruption, brought again
//! where they have changed.

use std::{
    fs,
    path::{Path, PathBuf},
    thread,
};

use coxswain_data::{
    DataError,
    place::{self, Piece},
};
use coxswain_remote::BLOCK_BYTES;

use super::{
    cache, content,
    server::{Fault, Server},
};

fn pieces(head: Option<u64>) -> [Piece; 2] {
    [("config.json", None), ("weights", head)].map(|(name, head)| Piece { name: name.into(), head })
}

/// The folder of an address, as a process sees it that has asked for nothing yet.
fn folder(server: &Server, head: Option<u64>) -> Result<PathBuf, String> {
    cache();
    coxswain_remote::install();
    let dir = place::folder(Path::new(&server.url()), &pieces(head));
    dir.map_err(|error: DataError| error.to_string())
}

fn at_server(len: usize) -> (tempfile::TempDir, Vec<u8>, Server) {
    let dir = tempfile::tempdir().unwrap();
    let bytes = content(len);
    fs::write(dir.path().join("config.json"), "{}").unwrap();
    fs::write(dir.path().join("weights"), &bytes).unwrap();
    let server = Server::files(dir.path());
    (dir, bytes, server)
}

#[test]
fn files_are_brought_once_by_the_first_that_asks() {
    let (_dir, bytes, server) = at_server(3 * BLOCK_BYTES as usize + 7);
    let folders: Vec<_> = thread::scope(|scope| {
        let asking: Vec<_> = (0..4).map(|_| scope.spawn(|| folder(&server, None).unwrap())).collect();
        asking.into_iter().map(|one| one.join().unwrap()).collect()
    });
    assert!(folders.iter().all(|dir| *dir == folders[0]));
    assert!(fs::read(folders[0].join("weights")).unwrap() == bytes);
    assert_eq!(fs::read_to_string(folders[0].join("config.json")).unwrap(), "{}");
    let asked = server.requests();
    // Heads may be asked for by each of them; content is asked for by one.
    assert!((2 + 1 + 4..=4 * 2 + 1 + 4).contains(&asked), "{asked}");
    folder(&server, None).unwrap();
    assert_eq!(server.requests(), asked);
    let unfinished = fs::read_dir(&folders[0])
        .unwrap()
        .flatten()
        .filter(|file| file.file_name().to_string_lossy().ends_with(".part"));
    assert_eq!(unfinished.count(), 0);
}

#[test]
fn of_what_is_wanted_for_its_size_only_the_beginning_comes() {
    let (_dir, bytes, server) = at_server(3 * BLOCK_BYTES as usize);
    let dir = folder(&server, Some(100)).unwrap();
    let there = fs::read(dir.join("weights")).unwrap();
    assert!(there.len() == bytes.len() && there[..100] == bytes[..100]);
    assert!(there[100..].iter().all(|byte| *byte == 0), "a hole");
    assert_ne!(folder(&server, None).unwrap(), dir, "whole files have a place of their own");
}

#[test]
fn what_has_come_is_gone_on_with() {
    let (_dir, bytes, server) = at_server(40 * BLOCK_BYTES as usize);
    // The second batch of blocks fails for good, after the first is on the disk.
    let faults = [Fault::None; 1 + 32].into_iter().chain([Fault::Forbidden; 8]);
    server.fail(&faults.collect::<Vec<_>>());
    let error = folder(&server, None).unwrap_err();
    assert!(error.contains("/weights: access is refused"), "{error}");
    let asked = server.requests();
    let dir = folder(&server, None).unwrap();
    assert!(fs::read(dir.join("weights")).unwrap() == bytes);
    assert_eq!(server.requests() - asked, 8, "the first 32 blocks were there");
}

#[test]
fn a_changed_object_is_named_and_what_is_missing_is() {
    let (dir, bytes, server) = at_server(2 * BLOCK_BYTES as usize);
    // Its head is asked for, then it changes.
    place_len(&server);
    let other: Vec<u8> = bytes.iter().map(|byte| !byte).collect();
    fs::write(dir.path().join("weights"), other).unwrap();
    let error = folder(&server, None).unwrap_err();
    assert!(error.contains("/weights: is no longer the same object"), "{error}");

    let (dir, _, server) = at_server(10);
    fs::remove_file(dir.path().join("weights")).unwrap();
    let error = folder(&server, None).unwrap_err();
    assert!(error.contains("/weights: there is no such object"), "{error}");
}

/// Makes this process see the object as it is.
fn place_len(server: &Server) {
    cache();
    coxswain_remote::install();
    place::bytes(Path::new(&format!("{}/weights", server.url()))).unwrap().expect("it is there");
}

#[test]
fn a_file_that_was_cut_or_is_of_another_version_is_brought_again() {
    let (_dir, bytes, server) = at_server(BLOCK_BYTES as usize);
    let there = folder(&server, None).unwrap();
    fs::write(there.join("weights"), "garbage").unwrap();
    folder(&server, None).unwrap();
    assert!(fs::read(there.join("weights")).unwrap() == bytes);
    // As if another process had brought what was there before.
    let objects = there.join(".objects");
    let text = fs::read_to_string(&objects).unwrap();
    fs::write(&objects, text.replace('"', "'")).unwrap();
    fs::write(there.join("weights"), vec![0; bytes.len()]).unwrap();
    folder(&server, None).unwrap();
    assert!(fs::read(there.join("weights")).unwrap() == bytes);
}
