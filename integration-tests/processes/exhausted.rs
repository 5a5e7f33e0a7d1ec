//! Machines that run out of something: memory of a control group, room on a disk, threads.

use std::{
    fs,
    path::PathBuf,
    process::{Command, Stdio},
    time::Instant,
};

use nix::sys::signal::Signal;

use crate::support::{
    CoxProcess,
    cgroups::Group,
    processes::{children, coordinator_of, signal, worker_of},
    tiny::{Tiny, audit},
};

/// Bytes by which the neighbour in the group is beyond what is left: more than mapped files that can be read
/// again, and less than a worker holds.
const OVER: u64 = 64 << 20;

#[test]
fn a_worker_that_the_kernel_kills_for_memory_has_all_ranks_take_half() {
    let Some(group) = Group::of("memory") else { return };
    let tiny = Tiny::new(6, 2);
    let held = tiny.hold(1, "forward", 4);
    let mut running = CoxProcess::of(group.holds(&tiny.command(&["train.micro_batch=2"])));
    held.wait(&mut running);
    // A neighbour in the group takes what is left, and the kernel looks for who holds most.
    group.bound_memory(Some(group.memory() + (8 << 20)));
    let neighbour = format!("head -c {} /dev/zero | tail", OVER + (8 << 20));
    let mut shell = Command::new("sh");
    let mut neighbour =
        group.holds(shell.args(["-c", &neighbour])).stdout(Stdio::null()).spawn().expect("a shell");
    let since = Instant::now();
    running.wait_for("was killed by the kernel because its cgroup or");
    println!("killed for memory: found after {:?}", since.elapsed());
    group.bound_memory(None);
    held.release();
    running.wait_for("all ranks go from a micro-batch of 2 to 1");
    println!("killed for memory: trained again after {:?}", since.elapsed());
    let (status, printed) = running.finish();
    let _ = neighbour.wait();
    assert!(status.success(), "{printed}");
    let audit = audit(&tiny.output());
    assert_eq!((&audit["missing"], &audit["duplicate"]), (&0.into(), &0.into()), "{audit:#}\n{printed}");
    assert!(
        audit["faults"].as_array().is_some_and(|faults| faults.iter().all(|f| f["kind"] == "out_of_memory")),
        "{audit:#}"
    );
    assert_eq!(audit["committed_steps"], 6, "{audit:#}");
}

/// A disk of its own at a path, which is gone with this value.
struct Disk(PathBuf);

impl Disk {
    /// A disk of so many MiB; none, and a line that says so, where it cannot be had.
    fn at(place: PathBuf, mebibytes: u32) -> Option<Self> {
        fs::create_dir_all(&place).expect("a directory");
        let mut mount = Command::new("mount");
        mount.args(["-t", "tmpfs", "-o", &format!("size={mebibytes}M"), "none"]).arg(&place);
        if mount.stderr(Stdio::null()).status().is_ok_and(|status| status.success()) {
            return Some(Self(place));
        }
        println!("skipped: nothing can be mounted here (that takes root)");
        None
    }

    /// Leaves no byte.
    fn fill(&self) {
        let mut file = fs::File::create(self.0.join("filler")).expect("a file");
        let mut size = 1 << 20;
        while size > 0 {
            match std::io::Write::write_all(&mut file, &vec![1; size]) {
                Ok(()) => {}
                Err(_) => size /= 2,
            }
        }
    }

    fn free(&self) {
        fs::remove_file(self.0.join("filler")).expect("it is there");
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        // Where something still has a file of it open, it goes when that ends.
        let _ = Command::new("umount").arg("--lazy").arg(&self.0).status();
    }
}

#[test]
fn a_journal_whose_disk_is_full_waits_for_room_and_nothing_is_lost() {
    // Long enough that the journal needs room before the end.
    let tiny = Tiny::new(100, 0);
    let held = tiny.hold(1, "backward", 3);
    let Some(disk) = Disk::at(tiny.output().join("coordinator"), 8) else { return };
    let mut running = tiny.start(&[]);
    held.wait(&mut running);
    disk.fill();
    let (since, processes) = (Instant::now(), children(running.pid()));
    held.release();
    running.wait_for("the disk of the journal");
    println!("disk full under the journal: found after {:?}", since.elapsed());
    assert_eq!(children(running.pid()), processes, "no process has ended over it");
    disk.free();
    let freed = Instant::now();
    running.wait_for("the journal can be written again");
    println!("disk full under the journal: goes on {:?} after there is room", freed.elapsed());
    let audit = tiny.assert_undisturbed(running, "a full disk under the journal");
    assert_eq!(audit["faults"].as_array().map(Vec::len), Some(0), "{audit:#}");
}

#[test]
fn a_coordinator_that_dies_while_its_disk_is_full_waits_for_room_to_begin() {
    let tiny = Tiny::new(6, 2);
    let held = tiny.hold(1, "backward", 3);
    let Some(disk) = Disk::at(tiny.output().join("coordinator"), 8) else { return };
    let mut running = tiny.start(&[]);
    held.wait(&mut running);
    disk.fill();
    let coordinator = coordinator_of(running.pid()).expect("it lives");
    signal(coordinator, Signal::SIGKILL);
    running.wait_for("the disk of the journal");
    disk.free();
    running.wait_for("the journal can be written again");
    held.release();
    tiny.assert_undisturbed(running, "a coordinator that died on a full disk");
}

#[test]
fn a_checkpoint_that_finds_no_room_is_given_up_and_the_next_one_is_written() {
    let tiny = Tiny::new(6, 2);
    let held = tiny.hold(1, "forward", 3);
    let Some(disk) = Disk::at(tiny.output().join("checkpoints"), 64) else { return };
    let second = tiny.hold(1, "backward", 1);
    let mut running = tiny.start(&[]);
    second.wait(&mut running);
    disk.fill();
    let since = Instant::now();
    second.release();
    let line = running.wait_for("checkpoint at step 2 was not written");
    println!("disk full under checkpoints: found after {:?}: {line}", since.elapsed());
    held.wait(&mut running);
    disk.free();
    held.release();
    running.wait_for("checkpoint at step 4: ");
    tiny.assert_undisturbed(running, "a full disk under the checkpoints");
}

#[test]
fn an_export_that_finds_no_room_ends_with_a_checkpoint_that_the_next_launch_exports() {
    let tiny = Tiny::new(6, 2);
    let held = tiny.hold(1, "evaluation", 6);
    let Some(disk) = Disk::at(tiny.output().join("adapter"), 1) else { return };
    let mut running = tiny.start(&["--max-restarts=0"]);
    held.wait(&mut running);
    disk.fill();
    held.release();
    let since = Instant::now();
    let (status, printed) = running.finish();
    println!("disk full under the export: ended after {:?}", since.elapsed());
    assert_eq!(status.code(), Some(4), "{printed}");
    assert!(printed.contains("adapter_model.safetensors: No space left on device"), "{printed}");
    drop(disk);
    tiny.assert_undisturbed(tiny.start(&[]), "an export on a full disk");
}

#[test]
fn logs_and_timelines_that_find_no_room_stop_nothing() {
    for below in ["logs", "memory"] {
        let tiny = Tiny::new(6, 2);
        let held = tiny.hold(1, "backward", 3);
        let Some(disk) = Disk::at(tiny.output().join(below), 2) else { return };
        let mut running = tiny.start(&[]);
        held.wait(&mut running);
        disk.fill();
        held.release();
        let audit = tiny.assert_undisturbed(running, below);
        assert_eq!(audit["faults"].as_array().map(Vec::len), Some(0), "{below}: {audit:#}");
    }
}

#[test]
fn threads_that_cannot_be_started_are_named_with_the_limit() {
    let Some(group) = Group::of("pids") else { return };
    let tiny = Tiny::new(6, 2);
    let held = tiny.hold(1, "forward", 4);
    let mut running = CoxProcess::of(group.holds(&tiny.command(&["--max-restarts=1"])));
    held.wait(&mut running);
    // Room for the process itself and not for all of its threads.
    let worker = worker_of(running.pid(), 1).expect("it lives");
    let threads = fs::read_dir(format!("/proc/{worker}/task")).map_or(0, Iterator::count) as u64;
    let before = group.threads();
    group.bound_threads(before - threads + 2);
    signal(worker, Signal::SIGKILL);
    let since = Instant::now();
    let (status, printed) = running.finish();
    println!("threads used up: ended after {:?}", since.elapsed());
    assert!(!status.success() && printed.contains("no more threads can be started here"), "{printed}");
    assert!(printed.contains("pids.max") && printed.contains("start again to resume"), "{printed}");
}

#[test]
fn a_limit_on_the_size_of_files_ends_no_process_and_is_the_cause_that_is_told() {
    let tiny = Tiny::new(6, 2);
    let launch = tiny.command(&["--max-restarts=0"]);
    // Less than the files of a checkpoint have, and more than all others.
    let mut limited = Command::new("bash");
    limited.args(["-c", "ulimit -f 3000; exec \"$0\" \"$@\""]).arg(launch.get_program());
    limited.args(launch.get_args()).current_dir(launch.get_current_dir().expect("the root"));
    limited.envs(launch.get_envs().filter_map(|(name, value)| Some((name, value?))));
    let (status, told) = CoxProcess::of(limited).finish();
    assert_eq!(status.code(), Some(4), "{told}");
    for part in ["File too large", "`ulimit -f unlimited`"] {
        assert!(told.contains(part), "{told}");
    }
    assert!(!told.contains("SIGXFSZ"), "{told}");
    tiny.assert_undisturbed(tiny.start(&[]), "without the limit");
}
