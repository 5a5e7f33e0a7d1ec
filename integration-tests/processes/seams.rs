//! Machines whose wall clock jumps, and servers of files that forget what was open: between `cox` and its C
//! library (`support/shim.c`).

use std::time::Instant;

use crate::support::{
    Running,
    processes::coordinator_of,
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
        let mut running = Running::of(command);
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
    let mut running = Running::of(command);
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
fn data_whose_handles_go_stale_is_read_again_and_no_sample_is_left_out() {
    let tiny = Tiny::new(6, 2);
    std::fs::create_dir_all(tiny.hold_dir()).expect("a directory");
    let Some(shim) = Shim::new(&tiny.hold_dir()) else { return };
    let held = tiny.hold(1, "backward", 1);
    let mut command = tiny.command(&["data.prefetch=1"]);
    shim.before(&mut command, "metaworld-mini/");
    let mut running = Running::of(command);
    held.wait(&mut running);
    shim.handles_go_stale(1);
    held.release();
    let audit = tiny.assert_undisturbed(running, "stale handles of the data");
    assert_eq!(audit["epochs"][0]["quarantined"].as_array().map(Vec::len), Some(0), "{audit:#}");
}
