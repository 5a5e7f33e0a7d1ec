//! What a user sees for each kind of mistake.

mod hostile;
mod keys;
mod overrides;
mod rules;
mod sections;
mod task;
mod text;

use crate::{
    run_spec::{Offload, Recompute, RunSpec},
    toy::{SMALL, TASKS, read, settings, small},
};

#[track_caller]
fn refuses(text: &str, overrides: &[&str], expected: &str) {
    let error = read(text, overrides).expect_err("this configuration must be refused").to_string();
    assert_eq!(error, expected, "\n--- got ---\n{error}\n--- expected ---\n{expected}");
}

#[test]
fn a_missing_and_an_oversized_file_are_named() {
    let dir = tempfile::tempdir().unwrap();
    let missing = dir.path().join("none.yaml");
    let error = RunSpec::load(&missing, &[], TASKS).unwrap_err().to_string();
    assert!(error.contains("none.yaml: cannot read the configuration"), "{error}");
    let large = dir.path().join("large.yaml");
    std::fs::write(&large, vec![b'#'; (1 << 20) + 1]).unwrap();
    let error = RunSpec::load(&large, &[], TASKS).unwrap_err().to_string();
    assert!(error.contains("is this the right file?"), "{error}");
    // What says that it has no bytes may have any number.
    let endless = RunSpec::load(std::path::Path::new("/dev/zero"), &[], TASKS).unwrap_err().to_string();
    assert!(endless.contains("/dev/zero: has more than 1048576 bytes"), "{endless}");
}
