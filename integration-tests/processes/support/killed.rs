//! A short run with workers killed in it, beside the same run undisturbed.

use std::{collections::BTreeSet, path::Path, process::Command};

use nix::sys::signal::Signal;

use super::{
    CoxProcess,
    processes::{signal, worker_of},
    read_json,
    tiny::{HoldFile, audit},
};

/// Runs `command`, told its output directory and what is laid over its run file, on two ranks: once
/// undisturbed, once with workers killed in the forward pass, the backward pass and the optimizer. The audit
/// finds nothing missing or duplicate, and all that the run leaves, the file `left` among it, has the same
/// bytes.
pub fn three_times(command: impl Fn(&Path, &[&str]) -> Command, left: &str) {
    let dir = tempfile::tempdir().expect("a directory");
    let short = ["train.steps=6", "train.checkpoint_every=2", "eval.samples=2", "optimizer.warmup_steps=2"];
    let whole = dir.path().join("whole");
    let (status, printed) = CoxProcess::of(command(&whole, &short)).finish();
    assert!(status.success(), "{printed}");

    let (output, hold) = (dir.path().join("killed"), dir.path().join("hold"));
    let stands = [(1, "forward", 1), (0, "backward", 3), (1, "optimizer", 4)];
    let held = stands.map(|(rank, phase, step)| (rank, HoldFile::order(&hold, rank, phase, step)));
    let mut command = command(&output, &short);
    command.env("COX_TEST_HOLD", &hold);
    let mut running = CoxProcess::of(command);
    for (rank, held) in held {
        held.wait(&mut running);
        signal(worker_of(running.pid(), rank).expect("it lives"), Signal::SIGKILL);
        // Its replacement finds nothing left of it.
        held.release();
    }
    let (status, printed) = running.finish();
    assert!(status.success(), "{printed}");
    let found = audit(&output);
    assert_eq!((&found["missing"], &found["duplicate"]), (&0.into(), &0.into()), "{found:#}\n{printed}");
    assert_eq!(found["faults"].as_array().map(Vec::len), Some(3), "{found:#}");
    assert_same(&whole, &output, left);
}

/// Two runs have left files of the same names and bytes, `left` among them.
pub fn assert_same(one: &Path, other: &Path, left: &str) {
    let names = results(one);
    assert!(names.contains(left) && names == results(other), "{names:?}");
    for name in names {
        let [one, other] = [one, other].map(|run| std::fs::read(run.join(&name)).expect("it is listed"));
        assert!(one == other, "another {name}");
    }
}

/// What a run has left, by its manifest, without what says how long it took and where it was.
pub fn results(run: &Path) -> BTreeSet<String> {
    let manifest = read_json(&run.join("manifest.json"));
    let files = manifest["files"].as_array().expect("an array").iter();
    let named = files.map(|file| file["path"].as_str().expect("a path").to_owned());
    named.filter(|path| !["summary.json", "run_spec.json"].contains(&path.as_str())).collect()
}
