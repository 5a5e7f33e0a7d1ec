//! Runs that are launched again under other circumstances: on another machine, by another job, beside another
//! file.

use nix::sys::signal::Signal;

use crate::support::{
    Running,
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
        Running::of(command)
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
        Running::of(command)
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
    let mut running = Running::of(tiny.command_of(&config.display().to_string(), &[]));
    held.wait(&mut running);
    std::fs::write(&config, "the next experiment, half written").expect("a file");
    let coordinator = coordinator_of(running.pid()).expect("it lives");
    signal(coordinator, Signal::SIGKILL);
    wait_for_coordinator(running.pid(), coordinator);
    held.release();
    tiny.assert_undisturbed(running, "a coordinator killed beside an edited file");
}

#[test]
fn a_damaged_newest_checkpoint_is_set_aside_and_the_one_before_it_is_gone_on_from() {
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
    // Only rank 1 reads it.
    let newest = tiny.output().join("checkpoints/step-00000004");
    let shard = newest.join("optimizer-rank0001-of-0002.safetensors");
    let mut bytes = std::fs::read(&shard).expect("a shard");
    let last = bytes.len() - 1;
    bytes[last] ^= 1;
    std::fs::write(&shard, bytes).expect("a disk");
    tiny.assert_undisturbed(tiny.start(&["faults.mirror=false"]), "a damaged checkpoint");
    assert!(newest.with_extension("damaged-1").join("manifest.json").exists(), "kept for people");
    assert!(newest.join("manifest.json").exists(), "written again");
    let log = std::fs::read_to_string(tiny.output().join("logs/coordinator.log")).expect("a log");
    assert!(log.contains("checkpoint of step 4 is damaged, and all go back to step 2"), "{log}");
    assert_eq!(read_json(&tiny.output().join("summary.json"))["first_step"], 2);
}
