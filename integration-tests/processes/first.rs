//! `cox` as the first process of a container: nobody above it waits for orphans, and the kernel delivers it
//! no signal that it has no handler for.

use std::process::Command;

use nix::sys::signal::Signal;

use crate::support::{
    CoxProcess,
    processes::{children, name, signal, wait_for},
    read_json, root,
    tiny::Tiny,
};

#[test]
fn the_first_process_of_a_container_waits_for_orphans_and_obeys_signals() {
    let tiny = Tiny::new(100_000, 0);
    let (command, mut inside) = (tiny.command(&[]), Command::new("unshare"));
    inside.args(["--pid", "--fork", "--kill-child", "--mount-proc"]);
    if Command::new("unshare")
        .args(["--pid", "--fork", "true"])
        .status()
        .map_or(true, |status| !status.success())
    {
        return println!("skipped: no PID namespaces here");
    }
    inside.arg(command.get_program()).args(command.get_args());
    inside.envs(command.get_envs().filter_map(|(name, value)| Some((name, value?)))).current_dir(root());
    let mut running = CoxProcess::of(inside);
    running.wait_for("2/100000");
    let first = children(running.pid())[0];
    let mut enter = Command::new("nsenter");
    enter.args(["--pid", "--target", &first.to_string(), "sh", "-c", "sleep 3 &"]);
    assert!(enter.status().expect("nsenter is there with unshare").success());
    let orphan =
        wait_for("an orphan", || children(first as u32).into_iter().find(|pid| name(*pid) == "sleep"));
    wait_for("the orphan's end", || (!children(first as u32).contains(&orphan)).then_some(()));
    signal(first, Signal::SIGTERM);
    let (status, printed) = running.finish();
    assert_eq!(status.code(), Some(143), "{printed}");
    let steps = read_json(&tiny.output().join("summary.json"))["steps"].as_u64().expect("a number");
    assert!(tiny.output().join(format!("checkpoints/step-{steps:08}/manifest.json")).exists(), "{printed}");
}
