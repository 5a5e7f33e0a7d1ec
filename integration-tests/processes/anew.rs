//! Runs that begin anew in the directory of an earlier one (`train.resume=false`), and are then disturbed.

use nix::sys::signal::Signal;

use crate::support::{
    processes::{coordinator_of, signal, wait_for_coordinator, worker_of},
    tiny::Tiny,
};

#[test]
fn checkpoints_of_an_earlier_run_are_neither_resumed_from_nor_kept_instead_of_new_ones() {
    let tiny = Tiny::new(6, 2);
    let (status, printed) = tiny.start(&["train.steps=12"]).finish();
    assert!(status.success(), "{printed}");
    assert!(tiny.output().join("checkpoints/step-00000012").exists(), "{printed}");

    let held = tiny.hold(1, "backward", 3);
    let mut running = tiny.start(&["train.resume=false"]);
    held.wait(&mut running);
    // The state of step 3 is lost with both workers, and the new coordinator knows of this run's checkpoint
    // of step 2 alone.
    let coordinator = coordinator_of(running.pid()).expect("it lives");
    signal(coordinator, Signal::SIGKILL);
    wait_for_coordinator(running.pid(), coordinator);
    for rank in [0, 1] {
        signal(worker_of(running.pid(), rank).expect("it lives"), Signal::SIGKILL);
    }
    tiny.assert_undisturbed(running, "a run that started over");

    let names = |directory: &str| {
        let entries = std::fs::read_dir(tiny.output().join(directory)).expect("a directory");
        let mut names: Vec<_> =
            entries.map(|entry| entry.expect("an entry").file_name().into_string().expect("text")).collect();
        names.sort();
        names
    };
    // The witness of the earlier run was set aside with its checkpoints.
    let last = |names: Vec<String>| names.into_iter().rfind(|name| name.starts_with("step-"));
    assert_eq!(last(names("checkpoints")).as_deref(), Some("step-00000006"));
    assert_eq!(last(names("checkpoints.earlier-1")).as_deref(), Some("step-00000012"));
}
