//! A short run with workers killed in it, beside the same run undisturbed.

use std::{path::Path, process::Command};

use nix::sys::signal::Signal;

use super::{
    Running,
    processes::{signal, worker_of},
    tiny::{Held, audit},
};

/// Runs `command`, told its output directory and what is laid over its run file, on two ranks: once
/// undisturbed, once with workers killed in the forward pass, the backward pass and the optimizer. The audit
/// finds nothing missing or duplicate, and the file `left` of the results has the same bytes.
pub fn three_times(command: impl Fn(&Path, &[&str]) -> Command, left: &str) {
    let dir = tempfile::tempdir().expect("a directory");
    let short = ["train.steps=6", "train.checkpoint_every=2", "eval.samples=2", "optimizer.warmup_steps=2"];
    let whole = dir.path().join("whole");
    let (status, printed) = Running::of(command(&whole, &short)).finish();
    assert!(status.success(), "{printed}");

    let (output, hold) = (dir.path().join("killed"), dir.path().join("hold"));
    let stands = [(1, "forward", 1), (0, "backward", 3), (1, "optimizer", 4)];
    let held = stands.map(|(rank, phase, step)| (rank, Held::order(&hold, rank, phase, step)));
    let mut command = command(&output, &short);
    command.env("COX_TEST_HOLD", &hold);
    let mut running = Running::of(command);
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
    let [undisturbed, disturbed] =
        [&whole, &output].map(|run| std::fs::read(run.join(left)).expect("a run leaves its results"));
    assert!(undisturbed == disturbed, "another {left}\n{printed}");
}
