//! One run and dozens of kills: workers, both workers, the coordinator, at moments nobody chose.

use std::path::Path;

use nix::sys::signal::Signal;

use crate::support::{
    CoxProcess,
    processes::{coordinator_of, signal, worker_of},
    tiny::Tiny,
};

const STEPS: u64 = 120;
const KILLS: u32 = 36;
/// The launcher gives a coordinator up that dies more often than this within a minute.
const COORDINATOR_KILLS: u32 = 4;

/// Knuth's linear congruential generator: the same kills every time.
struct Dice(u64);

impl Dice {
    fn below(&mut self, sides: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % sides
    }
}

#[test]
fn dozens_of_kills_lose_no_sample_and_change_no_bit() {
    let tiny = Tiny::new(STEPS, 10);
    let mut running = tiny.start(&["--max-restarts=1000"]);
    let (mut dice, mut coordinator_kills) = (Dice(20_261_120), 0);
    for _ in 0..KILLS {
        // One to three committed steps between two kills; which part of a step is hit is up to the machine.
        for _ in 0..=dice.below(3) {
            running.wait_for(&format!("/{STEPS} "));
        }
        match dice.below(10) {
            0 if coordinator_kills < COORDINATOR_KILLS => {
                coordinator_kills += 1;
                kill(coordinator_of(running.pid()));
            }
            1 => [0, 1].into_iter().for_each(|rank| kill(worker(&running, rank))),
            other => kill(worker(&running, other as u32 % 2)),
        }
    }
    let audit = tiny.assert_undisturbed(running, "dozens of kills");
    let faults = audit["faults"].as_array().map_or(0, Vec::len);
    assert!(faults as u32 >= KILLS / 2, "{faults} faults are booked: {audit:#}");
}

fn worker(running: &CoxProcess, rank: u32) -> Option<i32> {
    worker_of(running.pid(), rank)
}

/// Kills a process, unless it is just being replaced.
fn kill(pid: Option<i32>) {
    if let Some(pid) = pid {
        signal(pid, Signal::SIGKILL);
    }
}

#[test]
fn a_checkpoint_that_the_coordinator_has_not_heard_of_is_resumed_from() {
    let [donor, tiny] = [(), ()].map(|()| Tiny::new(6, 2));
    donor.assert_undisturbed(donor.start(&[]), "nothing happens");
    let held = tiny.hold(1, "backward", 3);
    let mut running = tiny.start(&["--max-restarts=10"]);
    held.wait(&mut running);
    // As if both had been killed after publishing it and pruning what was before, and before telling.
    let [known, unheard] = [2, 4].map(|step| format!("checkpoints/step-{step:08}"));
    for folder in [unheard.as_str(), "witness"] {
        copy(&donor.output().join(folder), &tiny.output().join(folder));
    }
    std::fs::remove_dir_all(tiny.output().join(&known)).expect("it is complete");
    [0, 1].into_iter().for_each(|rank| kill(worker(&running, rank)));
    held.release();
    let audit = tiny.assert_undisturbed(running, "a checkpoint nobody was told of");
    let generations = audit["generations"].as_array().expect("a list");
    let starts: Vec<_> = generations.iter().filter_map(|of| of["first_step"].as_u64()).collect();
    assert_eq!(starts, [0, 4], "{audit:#}");
}

fn copy(from: &Path, to: &Path) {
    std::fs::create_dir_all(to).expect("the run's directory");
    for file in std::fs::read_dir(from).expect("it is complete") {
        let file = file.expect("it is complete");
        std::fs::copy(file.path(), to.join(file.file_name())).expect("there is room");
    }
}
