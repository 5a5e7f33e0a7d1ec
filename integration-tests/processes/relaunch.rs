//! Runs that are launched again under other circumstances: on another machine, by another job, beside another
//! file.

use std::path::PathBuf;

use nix::sys::signal::Signal;

use crate::support::{
    CoxProcess, cox,
    processes::{children, coordinator_of, signal, wait_for_coordinator, wait_until_gone},
    read_json,
    tiny::Tiny,
};

#[test]
fn a_killed_launcher_may_be_launched_again_on_another_machine() {
    let tiny = Tiny::new(6, 2);
    let on = |host: &str| {
        let mut command = tiny.command(&["--max-restarts=0"]);
        command.env("COX_HOST", host);
        CoxProcess::of(command)
    };
    let held = tiny.hold(1, "backward", 3);
    let mut running = on("here");
    held.wait(&mut running);
    let processes = children(running.pid());
    signal(running.pid() as i32, Signal::SIGKILL);
    running.finish();
    wait_until_gone(&processes);
    drop(held);
    std::fs::remove_dir_all(tiny.hold_dir()).expect("nobody is held any more");
    tiny.assert_undisturbed(on("elsewhere"), "a launch on another machine");
}

#[test]
fn the_next_slurm_job_goes_on_where_the_last_one_came_to() {
    let tiny = Tiny::new(6, 2);
    let job = |id: &str, flags: &[&str]| {
        let mut command = tiny.command(flags);
        command.env("SLURM_JOB_ID", id);
        CoxProcess::of(command)
    };
    let held = tiny.hold(1, "backward", 3);
    let mut running = job("4711", &[]);
    held.wait(&mut running);
    // The time limit.
    let processes = children(running.pid());
    signal(running.pid() as i32, Signal::SIGKILL);
    running.finish();
    wait_until_gone(&processes);
    std::fs::remove_dir_all(tiny.hold_dir()).expect("nobody is held any more");
    tiny.assert_undisturbed(job("4712", &[]), "another job");
    assert_eq!(read_json(&tiny.output().join("run.json"))["run_id"], "4712");
    assert_eq!(read_json(&tiny.output().join("summary.json"))["first_step"], 2);
}

#[test]
fn a_file_that_is_edited_meanwhile_is_not_read_when_the_coordinator_dies() {
    let tiny = Tiny::new(6, 2);
    let config = tiny.output().with_file_name("my.yaml");
    let text =
        std::fs::read_to_string(crate::support::root().join("configs/quickstart.yaml")).expect("a file");
    std::fs::write(&config, text).expect("a file");
    let held = tiny.hold(1, "backward", 3);
    let mut running = CoxProcess::of(tiny.command_of(&config.display().to_string(), &[]));
    held.wait(&mut running);
    std::fs::write(&config, "the next experiment, half written").expect("a file");
    let coordinator = coordinator_of(running.pid()).expect("it lives");
    signal(coordinator, Signal::SIGKILL);
    wait_for_coordinator(running.pid(), coordinator);
    held.release();
    tiny.assert_undisturbed(running, "a coordinator killed beside an edited file");
}

/// A run of which the launcher was killed in step 5: there are checkpoints of steps 2 and 4.
fn killed_in_step_5() -> Tiny {
    let tiny = Tiny::new(6, 2);
    let held = tiny.hold(1, "backward", 5);
    let mut running = tiny.start(&[]);
    held.wait(&mut running);
    let processes = children(running.pid());
    signal(running.pid() as i32, Signal::SIGKILL);
    running.finish();
    wait_until_gone(&processes);
    drop(held);
    std::fs::remove_dir_all(tiny.hold_dir()).expect("nobody is held any more");
    tiny
}

/// A file of the checkpoint of `step` that only rank 1 reads, and what it holds.
fn shard(tiny: &Tiny, step: u64) -> (PathBuf, Vec<u8>) {
    let checkpoint = tiny.output().join(format!("checkpoints/step-{step:08}"));
    let shard = checkpoint.join("optimizer-rank0001-of-0002.safetensors");
    let bytes = std::fs::read(&shard).expect("a shard");
    (shard, bytes)
}

#[test]
fn a_damaged_newest_checkpoint_is_set_aside_and_the_one_before_it_is_gone_on_from() {
    let tiny = killed_in_step_5();
    let (shard, mut bytes) = shard(&tiny, 4);
    let newest = shard.parent().expect("a directory").to_owned();
    let last = bytes.len() - 1;
    // What is cut short is known by its length: nothing goes on from it, and that is said beforehand.
    std::fs::write(&shard, &bytes[..last]).expect("a disk");
    let checked = tiny.check().output().expect("cox was built");
    let [report, warned] = [&checked.stdout, &checked.stderr].map(|text| String::from_utf8_lossy(text));
    assert!(report.contains("resumes   at step 2"), "{report}");
    let told = "damaged checkpoints: checkpoints/step-00000004 (optimizer-rank0001-of-0002.safetensors has ";
    assert!(warned.contains(told), "{warned}");
    bytes[last] ^= 1;
    std::fs::write(&shard, bytes).expect("a disk");
    tiny.assert_undisturbed(tiny.start(&["faults.mirror=false"]), "a damaged checkpoint");
    assert!(newest.with_extension("damaged-1").join("manifest.json").exists(), "kept for people");
    assert!(newest.join("manifest.json").exists(), "written again");
    let log = std::fs::read_to_string(tiny.output().join("logs/coordinator.log")).expect("a log");
    assert!(log.contains("checkpoint of step 4 is damaged, so all ranks go back to step 2"), "{log}");
    assert_eq!(read_json(&tiny.output().join("summary.json"))["first_step"], 2);
}

#[test]
fn if_all_checkpoints_are_damaged_the_first_cause_is_a_damaged_file() {
    let tiny = killed_in_step_5();
    for step in [2, 4] {
        let (shard, mut bytes) = shard(&tiny, step);
        *bytes.last_mut().expect("it is not empty") ^= 1;
        std::fs::write(&shard, bytes).expect("a disk");
    }
    for _ in 0..2 {
        let (status, printed) = tiny.start(&["faults.mirror=false", "--max-restarts=1"]).finish();
        assert!(!status.success(), "{printed}");
        let failure = read_json(&tiny.output().join("failure.json")).to_string();
        let file = "step-00000002/optimizer-rank0001-of-0002.safetensors is damaged";
        assert!(failure.contains(file), "{failure}\n{printed}");
        let all = format!("{failure}{printed}");
        assert!(!all.contains("there is no manifest"), "{all}");
        assert!(tiny.output().join("checkpoints/step-00000004/manifest.json").exists(), "as it was");
    }
}

#[test]
fn a_journal_that_is_gone_beside_checkpoints_is_told_at_launch_and_by_the_audit() {
    let tiny = killed_in_step_5();
    std::fs::remove_file(tiny.output().join("coordinator/journal.redb")).expect("a journal");
    let (status, printed) = tiny.start(&[]).finish();
    assert!(status.success(), "{printed}");
    let told = "the journal is missing: the run continues from checkpoints/step-00000004 with a new one";
    let log = std::fs::read_to_string(tiny.output().join("logs/coordinator.log")).expect("a log");
    assert!(log.contains(told), "{log}");
    assert_audit_misses_the_first_steps(&tiny);
}

#[test]
fn a_damaged_journal_is_replaced_when_that_is_asked_for_and_the_audit_says_what_is_missing() {
    let tiny = killed_in_step_5();
    let journal = tiny.output().join("coordinator/journal.redb");
    let length = std::fs::metadata(&journal).expect("a journal").len();
    std::fs::OpenOptions::new()
        .write(true)
        .open(&journal)
        .expect("a journal")
        .set_len(length / 3)
        .expect("a disk");
    let (status, printed) = tiny.start(&[]).finish();
    assert!(!status.success() && printed.contains("--new-journal"), "{printed}");
    assert!(printed.contains("checkpoints/step-00000004"), "{printed}");
    let (status, printed) = tiny.start(&["--new-journal"]).finish();
    assert!(status.success(), "{printed}");
    assert!(journal.with_extension("redb.damaged-1").exists(), "kept for people");
    assert_audit_misses_the_first_steps(&tiny);
    let (status, printed) = tiny.start(&["--new-journal"]).finish();
    assert!(!status.success() && printed.contains("without --new-journal"), "{printed}");
}

/// `cox audit` says which steps it has no record of, and counts their samples.
fn assert_audit_misses_the_first_steps(tiny: &Tiny) {
    let output = tiny.output();
    let audit = cox(&["audit"]).arg(&output).output().expect("cox was built");
    let told = String::from_utf8_lossy(&audit.stdout).into_owned();
    assert_eq!(audit.status.code(), Some(9), "{told}");
    assert!(told.contains("without a record of earlier steps"), "{told}");
}
