//! Runs that are kept in an S3 bucket, and go on from there on a machine with an empty disk: `moto`'s server
//! on loopback, with a proxy before it that refuses writes and falls silent.

use std::{fs, process::Command, time::Duration};

use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use serde_json::Value;

use crate::support::{
    CoxProcess, cox,
    moto::Moto,
    processes::{children, signal, wait_for, wait_until_gone},
    read_json,
    server::{Answers, Fault, Server},
    tiny::Tiny,
};

const KEPT: &str = "run.bucket=s3://runs/tiny";

/// An S3 server with the bucket `runs`, and a proxy before it.
struct Bucket {
    moto: Moto,
    proxy: Server,
}

impl Bucket {
    /// `None` where there is no such server.
    fn start() -> Option<Self> {
        let moto = Moto::start()?;
        let proxy = Server::start(Answers::Of(moto.address), Duration::ZERO);
        let bucket = Self { moto, proxy };
        bucket.moto.put("runs", b"");
        Some(bucket)
    }

    fn index(&self) -> Value {
        serde_json::from_slice(&self.moto.get("runs/tiny/index.json")).expect("an index")
    }

    /// Steps of the sets that are there.
    fn steps(&self) -> Vec<u64> {
        let index = self.index();
        let sets = index["sets"].as_array().expect("an array");
        sets.iter().map(|set| set["step"].as_u64().expect("a number")).collect()
    }

    /// What a user has in the environment.
    fn reached<'c>(&self, command: &'c mut Command) -> &'c mut Command {
        command.envs([("AWS_ACCESS_KEY_ID", "test"), ("AWS_SECRET_ACCESS_KEY", "test")]);
        command.envs([("AWS_REGION", "us-east-1"), ("AWS_ALLOW_HTTP", "true")]);
        command.env("AWS_ENDPOINT_URL", self.proxy.url())
    }

    fn launch(&self, tiny: &Tiny, more: &[&str]) -> CoxProcess {
        let mut command = tiny.command(&[&[KEPT], more].concat());
        // What ranks wrote on the disk of a machine is gone with it.
        self.reached(&mut command).env_remove("COX_WITNESS");
        CoxProcess::of(command)
    }

    /// A launch that is refused, and what it says.
    fn refused(&self, tiny: &Tiny, more: &[&str]) -> String {
        let (status, printed) = self.launch(tiny, more).finish();
        assert!(!status.success(), "{more:?}: {printed}");
        printed
    }
}

/// The machine is gone: every process at once, and its disk.
fn lose(tiny: &Tiny, running: CoxProcess) {
    let processes = children(running.pid());
    signal(running.pid() as i32, Signal::SIGKILL);
    for child in &processes {
        // It may have followed its launcher by now.
        let _ = kill(Pid::from_raw(*child), Signal::SIGKILL);
    }
    running.finish();
    wait_until_gone(&processes);
    fs::remove_dir_all(tiny.hold_dir()).expect("nobody is held any more");
    fs::remove_dir_all(tiny.output()).expect("a disk");
}

#[test]
fn a_run_whose_machine_is_gone_with_its_disk_goes_on_from_its_bucket() {
    let Some(bucket) = Bucket::start() else { return };
    let tiny = Tiny::new(6, 2);
    let held = tiny.hold(1, "backward", 5);
    let mut running = bucket.launch(&tiny, &[]);
    running.wait_for("checkpoint of step 4 is in s3://runs/tiny");
    held.wait(&mut running);
    let status = cox(&["status", "--run"]).arg(tiny.output()).output().expect("cox was built");
    let status = String::from_utf8_lossy(&status.stdout).into_owned();
    assert!(status.contains("in its bucket: checkpoint 4 · "), "{status}");
    lose(&tiny, running);

    let mut running = bucket.launch(&tiny, &[]);
    running.wait_for("downloaded the run from its bucket, as it was after step 4");
    tiny.assert_undisturbed(running, "a machine that is gone");
    assert_eq!(read_json(&tiny.output().join("summary.json"))["first_step"], 4);

    // What it has left is there, too, under the names that it has on the disk.
    for name in ["adapter/adapter_model.safetensors", "summary.json", "report.html"] {
        let there = bucket.moto.get(&format!("runs/tiny/{name}"));
        assert!(there == fs::read(tiny.output().join(name)).expect(name), "{name}");
    }
    assert_eq!(bucket.steps().last(), Some(&6));
}

#[test]
fn an_upload_that_is_cut_in_the_middle_leaves_the_checkpoint_before_it() {
    let Some(bucket) = Bucket::start() else { return };
    let tiny = Tiny::new(6, 2);
    let (first, _last) = (tiny.hold(1, "backward", 3), tiny.hold(0, "backward", 5));
    let mut running = bucket.launch(&tiny, &[]);
    running.wait_for("checkpoint of step 2 is in");
    first.wait(&mut running);
    bucket.proxy.fail_writes(&[Fault::None, Fault::None, Fault::Silent, Fault::Silent, Fault::Silent]);
    first.release();
    wait_for("the upload's third file", || (bucket.proxy.faults_of_writes() <= 2).then_some(()));
    lose(&tiny, running);
    bucket.proxy.fail_writes(&[]);

    let mut running = bucket.launch(&tiny, &[]);
    running.wait_for("downloaded the run from its bucket, as it was after step 2");
    tiny.assert_undisturbed(running, "an upload that was cut");
    assert_eq!(bucket.steps().last(), Some(&6));
}

#[test]
fn of_two_launches_with_one_bucket_the_earlier_one_ends_and_says_why() {
    let Some(bucket) = Bucket::start() else { return };
    let (first, second) = (Tiny::new(6, 2), Tiny::new(6, 2));
    let (held, _last) = (first.hold(1, "backward", 3), first.hold(0, "backward", 5));
    let mut earlier = bucket.launch(&first, &[]);
    earlier.wait_for("checkpoint of step 2 is in");
    held.wait(&mut earlier);
    let mut later = bucket.launch(&second, &[]);
    later.wait_for("downloaded the run from its bucket, as it was after step 2");
    later.wait_for(" is in s3://runs/tiny");
    held.release();
    earlier.wait_for("another launch of this run has taken over s3://runs/tiny");
    let (status, printed) = earlier.finish();
    assert_eq!(status.code(), Some(6), "{printed}");
    second.assert_undisturbed(later, "beside an earlier launch");
    assert_eq!(bucket.steps().last(), Some(&6));
}

#[test]
fn what_is_preempted_has_its_last_checkpoint_in_the_bucket() {
    let Some(bucket) = Bucket::start() else { return };
    let tiny = Tiny::new(100_000, 0);
    // Large enough that a file goes up in parts, and comes back by ranges.
    let wide = ["expert.width=768"];
    let mut running = bucket.launch(&tiny, &wide);
    running.wait_for("2/100000");
    signal(running.pid() as i32, Signal::SIGTERM);
    let (status, printed) = running.finish();
    assert_eq!(status.code(), Some(143), "{printed}");
    let steps = read_json(&tiny.output().join("summary.json"))["steps"].as_u64().expect("a number");
    assert_eq!(bucket.steps(), [steps], "{printed}");
    let index = bucket.index();
    let files = index["sets"][0]["files"].as_array().expect("an array");
    assert!(files.iter().any(|file| file["bytes"].as_u64() > Some(9 << 20)), "{index:#}");
    let name = format!("checkpoints/step-{steps:08}/trainables.safetensors");
    let before = fs::read(tiny.output().join(&name)).expect("a checkpoint");
    fs::remove_dir_all(tiny.output()).expect("a disk");
    let mut running = bucket.launch(&tiny, &wide);
    running.wait_for(&format!("downloaded the run from its bucket, as it was after step {steps}"));
    assert!(fs::read(tiny.output().join(&name)).expect("it was brought") == before);
}

#[test]
fn an_upload_that_is_refused_stops_nothing_and_the_next_checkpoint_is_tried() {
    let Some(bucket) = Bucket::start() else { return };
    let tiny = Tiny::new(6, 2);
    let (held, second, third) =
        (tiny.hold(1, "backward", 1), tiny.hold(0, "backward", 3), tiny.hold(1, "forward", 5));
    let mut running = bucket.launch(&tiny, &[]);
    held.wait(&mut running);
    bucket.proxy.fail_writes(&[Fault::Unavailable, Fault::Cut, Fault::Forbidden]);
    held.release();
    let line = running.wait_for("the checkpoint of step 2 could not be uploaded");
    assert!(
        line.contains("AWS_SECRET_ACCESS_KEY") && line.contains("the bucket has no checkpoint yet"),
        "{line}"
    );
    second.wait(&mut running);
    second.release();
    running.wait_for("checkpoint of step 4 is in s3://runs/tiny");
    third.wait(&mut running);
    third.release();
    tiny.assert_undisturbed(running, "an upload that was refused");
}

#[test]
fn what_is_wrong_with_a_bucket_is_reported_before_anything_starts() {
    let Some(bucket) = Bucket::start() else { return };
    let tiny = Tiny::new(2, 2);
    for (place, parts) in [
        ("run.bucket=s3://nowhere/tiny", ["run.bucket: s3://nowhere/tiny", "no bucket `s3://nowhere`"]),
        ("run.bucket=https://host/tiny", ["run.bucket", "write s3://BUCKET/PATH"]),
        ("run.bucket=s3://", ["run.bucket: s3://", "names no bucket"]),
    ] {
        let message = bucket.refused(&tiny, &[place]);
        assert!(parts.iter().all(|part| message.contains(part)), "{place}: {message}");
    }
    // It can be read, and not written.
    bucket.proxy.fail_writes(&[Fault::Forbidden]);
    let message = bucket.refused(&tiny, &[]);
    let parts = ["run.bucket: s3://runs/tiny/index.json", "access is refused", "AWS_SECRET_ACCESS_KEY"];
    assert!(parts.iter().all(|part| message.contains(part)), "{message}");
    assert!(!tiny.output().join("run.json").exists(), "nothing has begun");

    let (status, printed) = bucket.launch(&tiny, &[]).finish();
    assert!(status.success(), "{printed}");
    let other = Tiny::new(2, 2);
    let message = bucket.refused(&other, &["run.seed=8"]);
    let parts =
        ["s3://runs/tiny holds another run, quickstart, after step 2", "run.seed", "an address of its own"];
    assert!(parts.iter().all(|part| message.contains(part)), "{message}");
    let message = bucket.refused(&other, &["train.resume=false"]);
    assert!(
        message.contains("already holds this run up to step 2") && message.contains("train.resume"),
        "{message}"
    );
    assert!(!other.output().join("checkpoints").exists());

    let shorter = Tiny::new(1, 2);
    for more in [&["train.steps=1"][..], &["data.holdout_episodes=[]", "train.steps=2"]] {
        let message = bucket.refused(&shorter, more);
        let parts = ["run.bucket: s3://runs/tiny ", "holds "];
        assert!(parts.iter().all(|part| message.contains(part)), "{more:?}: {message}");
        assert!(!shorter.output().exists(), "{more:?}: something was brought");
    }

    // The only set is damaged.
    let index = bucket.index();
    let object = index["sets"][0]["files"][0]["object"].as_str().expect("a name").to_owned();
    bucket.moto.put(&format!("runs/tiny/{object}"), b"x");
    let message = bucket.refused(&other, &[]);
    assert!(message.contains(&object) && message.contains("no complete checkpoint of the run"), "{message}");
    assert!(!other.output().join("checkpoints").exists());
}
