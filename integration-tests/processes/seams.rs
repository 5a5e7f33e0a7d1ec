//! Machines whose wall clock jumps, and servers of files that forget what was open: between `cox` and its C
//! library (`support/shim.c`).

use std::time::Instant;

use nix::sys::signal::Signal;

use crate::support::{
    CoxProcess,
    processes::{coordinator_of, signal, worker_of},
    shim::Shim,
    tiny::Tiny,
};

const DAY: i64 = 24 * 60 * 60;

#[test]
fn a_wall_clock_that_jumps_by_a_day_changes_nothing() {
    for jump in [DAY, -DAY] {
        let tiny = Tiny::new(8, 2);
        std::fs::create_dir_all(tiny.hold_dir()).expect("a directory");
        let Some(shim) = Shim::new(&tiny.hold_dir()) else { return };
        let held = tiny.hold(1, "backward", 3);
        let mut command = tiny.command(&[]);
        shim.before(&mut command, "nothing");
        let mut running = CoxProcess::of(command);
        held.wait(&mut running);
        shim.wall_clock_is_wrong_by(jump);
        held.release();
        let audit = tiny.assert_undisturbed(running, &format!("a clock that jumps by {jump} s"));
        assert_eq!(audit["faults"].as_array().map(Vec::len), Some(0), "{jump}: {audit:#}");
    }
}

#[test]
fn a_journal_whose_handle_goes_stale_is_opened_again() {
    let tiny = Tiny::new(6, 2);
    std::fs::create_dir_all(tiny.hold_dir()).expect("a directory");
    let Some(shim) = Shim::new(&tiny.hold_dir()) else { return };
    let held = tiny.hold(1, "backward", 3);
    let mut command = tiny.command(&[]);
    shim.before(&mut command, "/coordinator/journal");
    let mut running = CoxProcess::of(command);
    held.wait(&mut running);
    let coordinator = coordinator_of(running.pid());
    shim.handles_go_stale(1);
    let since = Instant::now();
    held.release();
    running.wait_for("the coordinator died");
    println!("stale handle of the journal: found after {:?}", since.elapsed());
    running.wait_for("6/6");
    println!("stale handle of the journal: done after {:?}", since.elapsed());
    assert_ne!(coordinator_of(running.pid()), coordinator);
    let audit = tiny.assert_undisturbed(running, "a stale handle of the journal");
    assert_eq!(audit["faults"].as_array().map(Vec::len), Some(0), "{audit:#}");
}

#[test]
fn data_whose_server_is_away_for_a_while_is_read_later_and_no_sample_is_left_out() {
    let tiny = Tiny::new(6, 2);
    std::fs::create_dir_all(tiny.hold_dir()).expect("a directory");
    let Some(shim) = Shim::new(&tiny.hold_dir()) else { return };
    let held = tiny.hold(1, "backward", 1);
    // Little is read ahead, and nothing of it kept.
    let mut command = tiny.command(&["data.prefetch=1"]);
    shim.before(&mut command, "metaworld-mini/data/");
    let mut running = CoxProcess::of(command);
    held.wait(&mut running);
    // Workers that begin read from there, too.
    let pid = worker_of(running.pid(), 0).expect("it lives");
    shim.server_is_away();
    signal(pid, Signal::SIGKILL);
    held.release();
    let since = Instant::now();
    let line = running.wait_for("timed out");
    println!("server of the data away: found after {:?}: {line}", since.elapsed());
    shim.handles_go_stale(0);
    let audit = tiny.assert_undisturbed(running, "a server of files that was away");
    println!("server of the data away: done {:?} later", since.elapsed());
    assert_eq!(audit["epochs"][0]["quarantined"].as_array().map(Vec::len), Some(0), "{audit:#}");
}
