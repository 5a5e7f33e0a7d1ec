//! What is sick is found: weights that differ between ranks, and samples that end their reader. What is gone
//! for good is replaced by a spare.

use nix::sys::signal::Signal;
use serde_json::{Value, json};

use crate::{
    processes::{signal, worker_of},
    support::{Toy, free_endpoint},
};

const ROWS: usize = 500;
/// Two epochs of eight steps.
const RUN: [&str; 3] = ["train.steps=16", "optimizer.warmup_steps=2", "eval.samples=0"];

/// What a rank says that may be wrong.
const DIFFER: &str = "check this rank's memory and device";

/// Trains with a fault in its environment.
fn with_fault(toy: &Toy, name: &str, overrides: &[&str], fault: (&str, &str)) -> String {
    let mut command = toy.command(name, overrides);
    command.env(fault.0, fault.1);
    let (status, printed) = toy.start_of(command).finish();
    assert!(status.success(), "{status}\n{printed}");
    printed
}

/// A bit flips in the weights of rank 1; what is learned is what an undisturbed run learns.
fn flipped(keys: &[&str], fault: &str) -> String {
    let toy = Toy::new(ROWS);
    let run = [&RUN[..], keys].concat();
    let (_, printed) = toy.train("undisturbed", &run);
    assert!(!printed.contains(DIFFER), "{printed}");
    let printed = with_fault(&toy, "flipped", &run, ("COX_FAULT_WEIGHTS", fault));
    assert!(toy.network("flipped") == toy.network("undisturbed"), "it learned something else\n{printed}");
    toy.assert_audited("flipped", 16);
    printed
}

#[test]
fn a_rank_with_wrong_weights_is_named_and_gets_them_from_the_others() {
    let every = "faults.verify_every=1";
    // In its own part of the weights, and in another rank's; by the majority, and with two ranks by the
    // replica. Checkpoints are of no use: there is none.
    for (world, parts) in [("--nproc-per-node=3", 0..3), ("--nproc-per-node=2", 0..2)] {
        for part in parts {
            let printed = flipped(&[every, world], &format!("rank=1 step=5 part={part}"));
            let told = "rank 1: step 5: this rank's weights differ from those of the other ranks";
            assert!(printed.contains(told), "{world}, part {part}: {printed}");
            assert!(!printed.contains("rolled back"), "{printed}");
            assert!(printed.contains("from step 5 (state: replica)"), "{printed}");
        }
    }
}

#[test]
fn ranks_that_are_well_never_differ() {
    let toy = Toy::new(ROWS);
    let settings = [
        "optimizer.reduce_dtype=bfloat16",
        "optimizer.ema_decay=0.9",
        "optimizer.loss_scale={initial: 1024, growth_interval: 3}",
        "memory.offload=optimizer",
        "faults.mirror=false",
    ];
    for (number, setting) in settings.into_iter().enumerate() {
        let keys = [
            setting,
            "faults.verify_every=1",
            "faults.replay_every=1",
            "train.checkpoint_every=3",
            "--nproc-per-node=3",
        ];
        let name = format!("run{number}");
        // A lost rank gets its part from the replica or a checkpoint, and its neighbours theirs from it.
        let held = toy.hold(1, "backward", 8);
        let mut running = toy.start(&name, &[&RUN[..], &keys].concat());
        running.wait_until_held(&held);
        signal(worker_of(running.pid(), 1).expect("it lives"), Signal::SIGKILL);
        let (status, printed) = running.finish();
        assert!(status.success(), "{setting}: {status}\n{printed}");
        assert!(!printed.contains(DIFFER) && !printed.contains(WRONG), "{setting}: {printed}");
        assert!(!printed.contains("different gradients"), "{setting}: {printed}");
        toy.assert_audited(&name, 16);
        std::fs::remove_dir_all(toy.path("hold")).expect("it is there");
    }
}

#[test]
fn weights_that_were_wrong_before_they_were_gathered_cost_the_steps_since_the_last_checkpoint() {
    // Step 4 has gathered what flipped before it; ranks compare in step 6, and before every checkpoint.
    let printed = flipped(
        &["faults.verify_every=6", "train.checkpoint_every=3", "--nproc-per-node=3"],
        "rank=1 step=4 part=0",
    );
    let told = "rank 1: step 6: this rank's optimizer shard differs from the replica on rank 2";
    assert!(printed.contains(told), "{printed}");
    assert!(
        printed.contains("rolled back from step 6 to 3"),
        "the checkpoint of step 6 is not written: {printed}"
    );
}

#[test]
fn without_a_checkpoint_the_run_begins_again() {
    let printed = flipped(&["faults.verify_every=6"], "rank=0 step=4 part=0");
    assert!(printed.contains("rolled back from step 6 to 0"), "{printed}");
}

#[test]
fn before_a_checkpoint_ranks_compare_whatever_step_it_is() {
    let keys = ["faults.verify_every=1000", "train.checkpoint_every=5", "--nproc-per-node=3"];
    let printed = flipped(&keys, "rank=2 step=7 part=0");
    assert!(printed.contains("rolled back from step 10 to 5"), "{printed}");
}

/// What a rank says whose gradients are not those that others compute.
const WRONG: &str = "this rank's gradients differ from what other ranks compute from the same samples";

/// A bit flips in what rank 1 makes of some samples in step 5, which is replayed.
fn wrong_gradients(keys: &[&str], fault: &str) -> String {
    let toy = Toy::new(ROWS);
    let run = [&RUN[..], keys, &["faults.replay_every=5"]].concat();
    let (_, printed) = toy.train("undisturbed", &run);
    assert!(!printed.contains(WRONG) && !printed.contains("different gradients"), "{printed}");
    let fault = format!("rank=1 step=5 {fault}");
    let printed = with_fault(&toy, "flipped", &run, ("COX_FAULT_GRADIENTS", &fault));
    assert!(toy.network("flipped") == toy.network("undisturbed"), "it learned something else\n{printed}");
    toy.assert_audited("flipped", 16);
    printed
}

#[test]
fn a_bit_that_flips_in_gradients_of_a_replayed_step_is_found_and_changes_nothing() {
    for world in ["--nproc-per-node=3", "--nproc-per-node=2"] {
        for slice in ["own", "another"] {
            let printed = wrong_gradients(&[world], &format!("times=1 slice={slice} life=0"));
            let told = format!("rank 1: step 5: {WRONG}; the step is repeated");
            assert_eq!(printed.matches(WRONG).count(), 1, "{world}, {slice}: {printed}");
            assert!(printed.contains(&told), "{world}, {slice}: {printed}");
            assert!(!printed.contains("generation 2"), "nobody has left: {printed}");
        }
    }
}

#[test]
fn a_rank_that_is_wrong_again_is_replaced_and_no_step_is_lost() {
    let keys = ["--nproc-per-node=3", "faults.cordon_after=0"];
    let printed = wrong_gradients(&keys, "times=2 slice=own life=0");
    assert!(printed.contains("wrong twice in a row"), "{printed}");
    assert!(printed.contains("from step 5 (state: replica)"), "{printed}");
    assert!(!printed.contains("rolled back"), "{printed}");
}

#[test]
fn without_a_replay_a_bit_that_flips_in_gradients_is_learned() {
    let toy = Toy::new(ROWS);
    let run = [&RUN[..], &["faults.verify_every=1", "--nproc-per-node=2"]].concat();
    toy.train("undisturbed", &run);
    let fault = ("COX_FAULT_GRADIENTS", "rank=1 step=5 times=1 slice=own life=0");
    let printed = with_fault(&toy, "flipped", &run, fault);
    assert!(toy.network("flipped") != toy.network("undisturbed"), "the fault is none\n{printed}");
}

#[test]
fn a_fixed_world_ends_with_a_machine_that_computes_wrong_results_and_keeps_what_was_learned() {
    let toy = Toy::new(ROWS);
    let run = [&RUN[..], &["--nproc-per-node=3", "faults.replay_every=5"]].concat();
    let mut command = toy.command("run", &run);
    command.env("COX_FAULT_GRADIENTS", "rank=1 step=5 times=2 slice=own life=0");
    let (status, printed) = toy.start_of(command).finish();
    assert_eq!(status.code(), Some(4), "{printed}");
    assert!(printed.contains("rank 1 is cordoned after 2 hardware faults"), "{printed}");
    assert!(printed.contains("is cordoned after 2 hardware faults"), "{printed}");
    assert!(printed.contains("start again to resume from checkpoints/step-00000005"), "{printed}");
    // Launched again, the machine may have been mended.
    let (_, printed) = toy.train("run", &run);
    assert!(!printed.contains("cordoned"), "{printed}");
    toy.assert_audited("run", 16);
    toy.train("undisturbed", &run);
    assert!(toy.network("run") == toy.network("undisturbed"), "it learned something else");
}

#[test]
fn a_process_that_does_not_pass_its_check_does_not_register_and_its_successor_may() {
    let toy = Toy::new(ROWS);
    let run = [&RUN[..], &["--nproc-per-node=2"]].concat();
    toy.train("undisturbed", &run);
    for check in ["known", "disk", "device"] {
        let fault = format!("slot=1 check={check} times=1");
        let printed = with_fault(&toy, check, &run, ("COX_FAULT_HEALTH", &fault));
        assert!(printed.contains(&format!("makes this health check fail: {check}")), "{printed}");
        assert!(!printed.contains("cordoned"), "{printed}");
        assert!(toy.network(check) == toy.network("undisturbed"), "{check}: it learned something else");
    }
}

#[test]
fn a_slot_whose_processes_fail_their_check_twice_is_cordoned() {
    let toy = Toy::new(ROWS);
    let run = [&RUN[..], &["--nproc-per-node=2"]].concat();
    let mut command = toy.command("run", &run);
    command.env("COX_FAULT_HEALTH", "slot=1 check=known times=9");
    let (status, printed) = toy.start_of(command).finish();
    assert_eq!(status.code(), Some(4), "{printed}");
    assert!(printed.contains("rank 1 is cordoned after 2 hardware faults"), "{printed}");
    assert!(printed.contains("launch again without that machine or device"), "{printed}");
}

#[test]
fn an_elastic_world_trains_on_without_a_machine_that_computes_wrong_results() {
    let (toy, endpoint) = (Toy::new(ROWS), free_endpoint());
    let node = ["--nnodes=1:2", "--nproc-per-node=2", "--rdzv-endpoint", &endpoint, "faults.replay_every=5"];
    let run = [&RUN[..], &node].concat();
    let start = || {
        let mut command = toy.command("run", &run);
        command.env("COX_FAULT_GRADIENTS", "rank=1 step=5 times=2 slice=own life=0");
        toy.start_of(command)
    };
    // The last call waits for both.
    let (first, second) = (start(), start());
    let (status, printed) = first.finish();
    let (_, of_second) = second.finish();
    assert!(status.success(), "{status}\n{printed}\n{of_second}");
    // The coordinator is with the one of them that came first.
    let told = printed + &of_second;
    assert!(told.contains("is cordoned after 2 hardware faults"), "{told}");
    assert!(told.contains("3 of 4 workers, from step 5"), "{told}");
    toy.assert_audited("run", 16);
}

/// A row that ends the process which reads it is left out of both epochs; every other sample counts once.
fn left_out(world: &str, how: &str) -> (Value, String) {
    let toy = Toy::new(ROWS);
    let run = [&RUN[..], &[world, "--max-restarts=0"]].concat();
    let printed = with_fault(&toy, "run", &run, ("COX_FAULT_SAMPLE", &format!("index=123 how={how}")));
    let told: Vec<_> = printed.lines().filter(|line| line.contains("(row 123 of the data set)")).collect();
    let with = |text: &str| told.iter().filter(|line| line.contains(text)).count();
    assert_eq!(with("another worker tries it"), 1, "{printed}");
    assert_eq!(with("left out from now on (quarantined)"), 1, "{printed}");
    let audit = toy.assert_audited("run", 16);
    for epoch in 0..2 {
        let quarantined = audit["epochs"][epoch]["quarantined"].as_array().map(Vec::len);
        assert_eq!(quarantined, Some(1), "{audit:#}\n{printed}");
    }
    (audit, printed)
}

#[test]
fn a_sample_that_exhausts_the_stack_is_tried_elsewhere_and_then_left_out() {
    let (audit, printed) = left_out("--nproc-per-node=2", "stack");
    assert_eq!(audit["missing"], json!(0), "{audit:#}");
    assert!(printed.contains("while it read this sample"), "{printed}");
}

#[test]
fn a_sample_that_aborts_is_tried_again_by_a_worker_that_is_alone_and_then_left_out() {
    left_out("--nproc-per-node=1", "abort");
}

/// What a spare says that takes part.
const STANDS_IN: &str = "a spare, takes part from now on";

#[test]
fn a_spare_takes_the_place_of_a_rank_that_does_not_come_back_and_no_step_is_lost() {
    let toy = Toy::new(ROWS);
    let (_, printed) = toy.train("undisturbed", &[&RUN[..], &["--nproc-per-node=2"]].concat());
    assert!(!printed.contains(STANDS_IN), "{printed}");
    // No restart is left: the spare is all there is.
    let run = [&RUN[..], &["--nproc-per-node=3", "--spares=1", "--max-restarts=0"]].concat();
    let held = toy.hold(1, "backward", 8);
    let mut running = toy.start("run", &run);
    running.wait_until_held(&held);
    signal(worker_of(running.pid(), 1).expect("it lives"), Signal::SIGKILL);
    let (status, printed) = running.finish();
    assert!(status.success(), "{status}\n{printed}");
    assert!(printed.contains(&format!("rank 2, {STANDS_IN}")), "{printed}");
    assert!(printed.contains("2 of 2 workers, from step 8 (state: replica)"), "{printed}");
    assert_eq!(printed.matches("joined from").count(), 4, "a node and three workers: {printed}");
    assert!(toy.network("run") == toy.network("undisturbed"), "it learned something else");
    toy.assert_audited("run", 16);
}

#[test]
fn a_spare_trains_before_the_successor_of_a_lost_rank_is_there() {
    let toy = Toy::new(ROWS);
    toy.train("undisturbed", &[&RUN[..], &["--nproc-per-node=2"]].concat());
    let run = [&RUN[..], &["--nproc-per-node=3", "--spares=1"]].concat();
    let held = toy.hold(0, "backward", 8);
    let mut running = toy.start("run", &run);
    running.wait_until_held(&held);
    // The next process of the slot stands still before it has made itself known, until the run is over.
    let never = toy.hold(0, "joining", 0);
    let first = worker_of(running.pid(), 0).expect("it lives");
    signal(first, Signal::SIGKILL);
    let (status, printed) = running.finish();
    assert!(status.success(), "{status}\n{printed}");
    assert!(never.exists(), "it was started: {printed}");
    assert!(printed.contains(&format!("rank 2, {STANDS_IN}")), "{printed}");
    assert!(toy.network("run") == toy.network("undisturbed"), "it learned something else");
    toy.assert_audited("run", 16);
}

#[test]
fn a_fixed_world_with_a_spare_trains_on_without_a_machine_that_computes_wrong_results() {
    let toy = Toy::new(ROWS);
    toy.train("undisturbed", &[&RUN[..], &["--nproc-per-node=3"]].concat());
    let run = [&RUN[..], &["--nproc-per-node=4", "--spares=1", "faults.replay_every=5"]].concat();
    let fault = ("COX_FAULT_GRADIENTS", "rank=1 step=5 times=2 slice=own life=0");
    let printed = with_fault(&toy, "run", &run, fault);
    assert!(printed.contains("rank 1 is cordoned after 2 hardware faults"), "{printed}");
    assert!(printed.contains(&format!("rank 3, {STANDS_IN}")), "{printed}");
    assert!(toy.network("run") == toy.network("undisturbed"), "it learned something else");
    toy.assert_audited("run", 16);
}

#[test]
fn a_launcher_of_spares_has_the_place_of_one_that_is_killed() {
    let (toy, endpoint) = (Toy::new(ROWS), free_endpoint());
    toy.train("undisturbed", &[&RUN[..], &["--nproc-per-node=2"]].concat());
    let node = ["--nnodes=3", "--nproc-per-node=1", "--spares=1", "--rdzv-endpoint", &endpoint];
    let run = |rank: &str| {
        let rank = format!("--node-rank={rank}");
        [&RUN[..], &node, &[&rank]].concat().into_iter().map(str::to_owned).collect::<Vec<_>>()
    };
    let held = toy.hold(1, "backward", 8);
    let start = |rank| {
        let run = run(rank);
        toy.start("run", &run.iter().map(String::as_str).collect::<Vec<_>>())
    };
    let (mut first, second, third) = (start("0"), start("1"), start("2"));
    first.wait_until_held(&held);
    // Its worker goes with it, as when a machine is gone.
    signal(i32::try_from(second.pid()).expect("a process id"), Signal::SIGKILL);
    let (status, printed) = first.finish();
    let (of_third, told) = third.finish();
    assert!(status.success() && of_third.success(), "{status} {of_third}\n{printed}\n{told}");
    assert!(printed.contains(&format!("rank 2, {STANDS_IN}")), "{printed}");
    assert!(!printed.contains("rolled back"), "{printed}");
    assert!(toy.network("run") == toy.network("undisturbed"), "it learned something else");
    toy.assert_audited("run", 16);
}
