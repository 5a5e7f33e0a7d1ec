//! The fault matrix: every fault in every phase of training, with real processes. Whatever happens, the run
//! ends by itself (or when it is launched again, if the launcher itself was killed), its results are bitwise
//! those of an undisturbed run, and the ledger adds up.
//!
//! A phase of so small a model is too short to hit, so a worker is told to stand still in it
//! (`COX_TEST_HOLD`, see `worker/src/session/hold.rs`), and the fault is injected when it does.

use nix::sys::signal::Signal;

use crate::support::{
    CoxProcess,
    processes::{
        children, coordinator_of, signal, wait_for, wait_for_coordinator, wait_until_gone, worker_of,
    },
    read_json,
    tiny::{HoldFile, Tiny, audit},
};

const STEPS: u64 = 6;
const CHECKPOINT_EVERY: u64 = 2;

/// A phase, and the step in which rank 1 is to stand in it.
const PHASES: [(&str, u64); 8] = [
    ("loading", 0),
    ("forward", 0),
    ("backward", 3),
    ("communication", 3),
    ("optimizer", 3),
    ("checkpoint", CHECKPOINT_EVERY),
    ("checkpoint", STEPS),
    ("evaluation", STEPS),
];

/// Runs a fault through all phases. `inject` is given the run with rank 1 standing in the phase, and returns
/// the launch that ends.
fn matrix(fault: &str, faults_booked: u64, inject: impl Fn(&Tiny, CoxProcess, HoldFile) -> CoxProcess) {
    for (phase, step) in PHASES {
        let what = format!("{fault} in {phase} of step {step}");
        let tiny = Tiny::new(STEPS, CHECKPOINT_EVERY);
        let held = tiny.hold(1, phase, step);
        let mut running = tiny.start(&[]);
        held.wait(&mut running);
        let running = inject(&tiny, running, held);
        let audit = tiny.assert_undisturbed(running, &what);
        let booked = audit["faults"].as_array().map_or(0, Vec::len) as u64;
        assert!(booked >= faults_booked, "{what}: {audit:#}");
    }
}

fn worker(running: &CoxProcess, rank: u32) -> i32 {
    worker_of(running.pid(), rank).expect("it lives")
}

#[test]
fn a_killed_worker_costs_nothing_in_any_phase() {
    matrix("kill -9 of a worker", 1, |_, running, _| {
        signal(worker(&running, 1), Signal::SIGKILL);
        running
    });
}

#[test]
fn what_moving_state_takes_is_no_steps_memory() {
    let measured = |lost: bool| {
        let tiny = Tiny::new(STEPS, CHECKPOINT_EVERY);
        let held = tiny.hold(1, "forward", 3);
        let mut running = tiny.start(&[]);
        held.wait(&mut running);
        match lost {
            true => signal(worker(&running, 1), Signal::SIGKILL),
            false => held.release(),
        }
        let (ended, printed) = running.finish();
        assert!(ended.success(), "{printed}");
        let summary = read_json(&tiny.output().join("summary.json"));
        summary["memory"]["measured"].as_f64().expect("rank 0 counts its allocations")
    };
    let (disturbed, undisturbed) = (measured(true), measured(false));
    assert!(
        (disturbed / undisturbed - 1.0).abs() < 0.02,
        "{disturbed} bytes at the peak of a step, {undisturbed} where nobody was lost"
    );
}

#[test]
fn an_audit_says_the_same_of_a_run_that_goes_on_and_of_what_it_left_behind() {
    let tiny = Tiny::new(STEPS, CHECKPOINT_EVERY);
    let held = tiny.hold(1, "forward", 3);
    let mut running = tiny.start(&[]);
    held.wait(&mut running);
    let at_the_end = tiny.hold(1, "evaluation", STEPS);
    signal(worker(&running, 1), Signal::SIGKILL);
    at_the_end.wait(&mut running);
    let living = wait_for("the last step", || {
        Some(audit(&tiny.output())).filter(|audit| audit["committed_steps"] == STEPS)
    });
    let sources = [&living["generations"][0]["source"], &living["generations"][1]["source"]];
    assert_eq!(sources, ["fresh", "replica"], "{living:#}");
    let processes = children(running.pid());
    signal(running.pid() as i32, Signal::SIGKILL);
    running.finish();
    wait_until_gone(&processes);
    assert_eq!(audit(&tiny.output()), living);
}

#[test]
fn a_frozen_worker_costs_nothing_in_any_phase() {
    matrix("SIGSTOP of a worker", 1, |_, running, _| {
        signal(worker(&running, 1), Signal::SIGSTOP);
        running
    });
}

#[test]
fn a_killed_coordinator_costs_nothing_in_any_phase() {
    matrix("kill -9 of the coordinator", 0, |_, running, held| {
        let coordinator = coordinator_of(running.pid()).expect("it lives");
        let workers = [worker(&running, 0), worker(&running, 1)];
        signal(coordinator, Signal::SIGKILL);
        wait_for_coordinator(running.pid(), coordinator);
        held.release();
        assert_eq!(workers, [worker(&running, 0), worker(&running, 1)], "workers live on");
        running
    });
}

#[test]
fn a_killed_launcher_goes_on_where_it_was_when_it_is_launched_again() {
    matrix("kill -9 of the launcher", 0, |tiny, running, _| {
        let processes = children(running.pid());
        signal(running.pid() as i32, Signal::SIGKILL);
        running.finish();
        wait_until_gone(&processes);
        tiny.start(&[])
    });
}

#[test]
fn both_workers_killed_at_once_go_on_from_the_checkpoint() {
    matrix("kill -9 of both workers", 1, |_, running, _| {
        let workers = [worker(&running, 0), worker(&running, 1)];
        workers.into_iter().for_each(|pid| signal(pid, Signal::SIGKILL));
        running
    });
}
