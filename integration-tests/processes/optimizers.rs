//! Update rules besides AdamW: a run of processes that is disturbed, and goes on with another number of them.

use nix::sys::signal::Signal;

use crate::support::{
    CoxProcess,
    processes::{signal, worker_of},
    read_json,
    tiny::{Tiny, audit, results},
};

const EIGHT_BITS: &str = "optimizer.name=adamw8bit";

/// Nothing of the plan is missing, and nothing came twice.
fn assert_whole(tiny: &Tiny, steps: u64, printed: &str) {
    let audit = audit(&tiny.output());
    assert_eq!((&audit["missing"], &audit["duplicate"]), (&0.into(), &0.into()), "{audit:#}\n{printed}");
    assert_eq!(audit["committed_steps"], steps, "{audit:#}\n{printed}");
}

fn finish(running: CoxProcess) -> String {
    let (status, printed) = running.finish();
    assert!(status.success(), "{printed}");
    printed
}

#[test]
fn moments_of_eight_bits_survive_a_killed_worker_and_go_on_in_another_world() {
    let undisturbed = Tiny::new(8, 4);
    finish(undisturbed.start(&[EIGHT_BITS]));
    let tiny = Tiny::new(8, 4);
    let held = tiny.hold(1, "backward", 5);
    let mut running = tiny.start(&[EIGHT_BITS]);
    held.wait(&mut running);
    signal(worker_of(running.pid(), 1).expect("it lives"), Signal::SIGKILL);
    held.release();
    let printed = finish(running);
    assert!(results(&tiny.output()) == results(&undisturbed.output()), "another run's bits\n{printed}");
    assert_whole(&tiny, 8, &printed);

    // The shards of two ranks become those of three, cut at other blocks.
    let printed = finish(tiny.start(&[EIGHT_BITS, "train.steps=12", "--nproc-per-node=3"]));
    assert_whole(&tiny, 12, &printed);
    let checkpoint = tiny.output().join("checkpoints/step-00000012");
    let third = std::fs::read(checkpoint.join("optimizer-rank0002-of-0003.safetensors"));
    let third = String::from_utf8_lossy(&third.expect("its shard")).into_owned();
    assert!(third.contains("\"exp_avg_sq_absmax."), "a part of the blocks is its own");

    // Another rule's state is of no use: that is said, and nothing is touched.
    let (status, printed) = tiny.start(&["train.steps=14"]).finish();
    assert!(!status.success() && printed.contains("optimizer.name"), "{status}\n{printed}");
    assert_eq!(read_json(&tiny.output().join("summary.json"))["steps"], 12, "{printed}");
}
