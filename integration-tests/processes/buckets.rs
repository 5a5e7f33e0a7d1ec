//! Training on a data set, and with a model, in an S3 bucket: `moto`'s server on loopback, with a proxy
//! before it that is late, cuts answers off and refuses them.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};

use nix::sys::signal::Signal;

use crate::support::{
    CoxProcess, cox, losses,
    moto::Moto,
    processes::{signal, worker_of},
    read_json, root,
    server::{Answers, Fault, Server},
    tiny::HoldFile,
    train,
};

const MINI: &str = "configs/assets/metaworld-mini";
const MODEL: &str = "configs/assets/tiny-vla";
/// A directory's files below `to`.
fn upload(server: &Moto, dir: &Path, to: &str) {
    for entry in fs::read_dir(dir).expect("the data set is there").flatten() {
        let (path, to) = (entry.path(), format!("{to}/{}", entry.file_name().to_string_lossy()));
        match path.is_dir() {
            true => upload(server, &path, &to),
            false => server.put(&to, &fs::read(&path).expect("a file")),
        }
    }
}

/// The data set in the bucket `sets`, and a proxy before the server.
struct Bucket {
    moto: Moto,
    proxy: Server,
    cache: tempfile::TempDir,
}

impl Bucket {
    /// `None` where there is no such server.
    fn with_mini(latency: Duration) -> Option<Self> {
        let moto = Moto::start()?;
        moto.put("sets", b"");
        upload(&moto, &root().join(MINI), "sets/mini");
        let proxy = Server::start(Answers::Of(moto.address), latency);
        Some(Self { moto, proxy, cache: tempfile::tempdir().expect("a directory") })
    }

    /// What a user has in the environment.
    fn reached<'c>(&self, command: &'c mut Command) -> &'c mut Command {
        command.envs([("AWS_ACCESS_KEY_ID", "test"), ("AWS_SECRET_ACCESS_KEY", "test")]);
        command.envs([("AWS_REGION", "us-east-1"), ("AWS_ALLOW_HTTP", "true")]);
        command.env("AWS_ENDPOINT_URL", self.proxy.url()).env("XDG_CACHE_HOME", self.cache.path())
    }

    fn says(&self, arguments: &[&str]) -> (bool, String) {
        let output = self.reached(&mut cox(arguments)).output().expect("cox was built");
        let message = [output.stdout, output.stderr].concat();
        (output.status.success(), String::from_utf8_lossy(&message).into_owned())
    }

    /// A file of the only folder that has been brought.
    fn file(&self, name: &str) -> PathBuf {
        let folders =
            fs::read_dir(self.cache.path().join("coxswain/buckets/folders")).expect("one was brought");
        let folders: Vec<_> = folders.flatten().map(|folder| folder.path()).collect();
        assert_eq!(folders.len(), 1, "{folders:?}");
        folders[0].join(name)
    }

    fn start(&self, output: &Path, more: &[&str]) -> CoxProcess {
        self.start_with(output, more, |_| {})
    }

    fn start_with(&self, output: &Path, more: &[&str], change: impl FnOnce(&mut Command)) -> CoxProcess {
        let output_dir = format!("run.output_dir={}", output.display());
        let mut arguments = vec!["run", "configs/quickstart.yaml", &output_dir, "data.path=s3://sets/mini"];
        arguments.extend(SHORT);
        arguments.extend(more);
        let mut command = cox(&arguments);
        change(self.reached(&mut command));
        CoxProcess::of(command)
    }
}

const SHORT: [&str; 4] =
    ["train.steps=12", "eval.samples=4", "optimizer.warmup_steps=2", "train.checkpoint_every=0"];

#[test]
fn a_run_on_a_bucket_learns_what_a_run_on_the_disk_learns_through_faults() {
    let Some(bucket) = Bucket::with_mini(Duration::from_millis(20)) else { return };
    let dir = tempfile::tempdir().unwrap();
    let on_disk = train(&dir.path().join("disk"), &SHORT);
    bucket.proxy.fail(&[Fault::Unavailable, Fault::Halting, Fault::Cut, Fault::Unavailable]);
    let (status, printed) = bucket.start(&dir.path().join("bucket"), &[]).finish();
    assert!(status.success(), "{printed}");
    let in_bucket = read_json(&dir.path().join("bucket/summary.json"));
    assert_eq!(losses(&on_disk), losses(&in_bucket), "the same samples in the same order");
    // The next run finds everything on the disk: it asks what there is, and for no content.
    let asked = bucket.proxy.requests();
    let (status, printed) = bucket.start(&dir.path().join("again"), &[]).finish();
    assert!(status.success(), "{printed}");
    let again = read_json(&dir.path().join("again/summary.json"));
    assert_eq!(losses(&on_disk), losses(&again));
    let asked = bucket.proxy.requests() - asked;
    assert!(asked <= 4, "{asked} requests of a launcher and two workers");
}

#[test]
fn what_is_wrong_with_an_address_is_reported_before_training() {
    let Some(bucket) = Bucket::with_mini(Duration::ZERO) else { return };
    let check = |path: &str| {
        let (succeeds, message) =
            bucket.says(&["check", "configs/quickstart.yaml", &format!("data.path={path}")]);
        assert!(!succeeds || path == "s3://sets/mini", "{path}: {message}");
        message
    };
    check("s3://sets/mini");
    for (path, parts) in [
        ("s3://nowhere/mini", ["s3://nowhere", "no bucket `s3://nowhere`"]),
        ("s3://sets/other", ["s3://sets/other/meta/info.json", "missing"]),
        ("ftp://sets/mini", ["ftp://sets/mini", "ftp:// addresses are not supported"]),
    ] {
        let message = check(path);
        assert!(parts.iter().all(|part| message.contains(part)), "{path}: {message}");
    }
    bucket.proxy.fail(&[Fault::Forbidden]);
    let (_, message) = bucket.says(&["check", "configs/quickstart.yaml", "data.path=s3://sets/mini"]);
    let parts = ["access is refused", "SignatureDoesNotMatch", "AWS_SECRET_ACCESS_KEY"];
    assert!(parts.iter().all(|part| message.contains(part)), "{message}");
    let (_, message) = bucket.says(&["data", "check", "s3://sets/mini"]);
    let (_, on_disk) = bucket.says(&["data", "check", MINI]);
    assert_eq!(message.replace("s3://sets/mini", MINI), on_disk);
}

#[test]
fn a_worker_that_finds_another_object_than_the_run_began_with_names_it() {
    let Some(bucket) = Bucket::with_mini(Duration::ZERO) else { return };
    let dir = tempfile::tempdir().unwrap();
    let held = HoldFile::order(&dir.path().join("hold"), 1, "backward", 3);
    let output = dir.path().join("run");
    let mut running = bucket.start_with(&output, &[], |command| {
        command.env("COX_TEST_HOLD", dir.path().join("hold"));
    });
    held.wait(&mut running);
    let data = "data/chunk-000/file-000.parquet";
    let mut bytes = fs::read(root().join(MINI).join(data)).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    bucket.moto.put(&format!("sets/mini/{data}"), &bytes);
    signal(worker_of(running.pid(), 1).expect("it lives"), Signal::SIGKILL);
    let line = running.wait_for("is no longer the same object");
    assert!(line.contains(&format!("s3://sets/mini/{data}: is no longer the same object")), "{line}");
}

#[test]
fn a_model_in_a_bucket_is_brought_once_and_teaches_what_it_does_on_the_disk() {
    let Some(bucket) = Bucket::with_mini(Duration::ZERO) else { return };
    upload(&bucket.moto, &root().join(MODEL), "sets/models/tiny-vla");
    let dir = tempfile::tempdir().unwrap();
    let on_disk = train(&dir.path().join("disk"), &SHORT);
    let model = "model.path=s3://sets/models/tiny-vla";

    // Sizes need no weights.
    let (planned, message) = bucket.says(&["plan", "configs/quickstart.yaml", model]);
    assert!(planned, "{message}");
    let of_sizes = bucket.file("model.safetensors");
    let (file, ours) = (fs::read(&of_sizes).unwrap(), fs::read(root().join(MODEL).join("model.safetensors")));
    assert!(file.len() == ours.unwrap().len() && file[file.len() / 2..].iter().all(|byte| *byte == 0));
    fs::remove_dir_all(of_sizes.parent().unwrap()).unwrap();

    bucket.proxy.fail(&[Fault::Unavailable, Fault::Cut, Fault::Halting]);
    let (status, printed) = bucket.start(&dir.path().join("bucket"), &[model]).finish();
    assert!(status.success(), "{printed}");
    let in_bucket = read_json(&dir.path().join("bucket/summary.json"));
    assert_eq!(losses(&on_disk), losses(&in_bucket));
    let adapter = read_json(&dir.path().join("bucket/adapter/adapter_config.json"));
    assert_eq!(adapter["base_model_name_or_path"], "s3://sets/models/tiny-vla");

    // Another run asks what there is, and for none of it.
    let asked = bucket.proxy.requests();
    let (status, printed) = bucket.start(&dir.path().join("again"), &[model]).finish();
    assert!(status.success(), "{printed}");
    assert_eq!(losses(&on_disk), losses(&read_json(&dir.path().join("again/summary.json"))));
    let asked = bucket.proxy.requests() - asked;
    assert!(asked <= 8, "{asked} requests of a launcher and two workers, for data and model");
}

#[test]
fn what_is_wrong_with_a_model_in_a_bucket_is_reported_before_anything_starts() {
    let Some(bucket) = Bucket::with_mini(Duration::ZERO) else { return };
    upload(&bucket.moto, &root().join(MODEL), "sets/models/tiny-vla");
    let index = br#"{"weight_map": {"a": "model-00001-of-00002.safetensors"}}"#;
    bucket.moto.put("sets/models/half/config.json", b"{}");
    bucket.moto.put("sets/models/half/model.safetensors.index.json", index);
    bucket.moto.put("sets/models/outside/config.json", b"{}");
    let index = br#"{"weight_map": {"a": "../../../model.safetensors"}}"#;
    bucket.moto.put("sets/models/outside/model.safetensors.index.json", index);
    let dir = tempfile::tempdir().unwrap();
    for (address, parts) in [
        ("s3://nowhere/tiny-vla", ["s3://nowhere/tiny-vla", "no bucket `s3://nowhere`"]),
        ("s3://sets/models/other", ["s3://sets/models/other/config.json", "no such object"]),
        (
            "s3://sets/models/half",
            ["s3://sets/models/half/model-00001-of-00002.safetensors", "no such object"],
        ),
        ("s3://sets/models/outside", ["s3://sets/models/outside/model.safetensors.index.json", "weight_map"]),
        ("gcs://sets/models", ["gcs://sets/models", "gcs:// addresses are not supported"]),
    ] {
        let model = format!("model.path={address}");
        for command in ["check", "run"] {
            let output = format!("run.output_dir={}", dir.path().join("run").display());
            let (succeeds, message) = bucket.says(&[command, "configs/quickstart.yaml", &model, &output]);
            assert!(!succeeds, "{address}: {message}");
            assert!(parts.iter().all(|part| message.contains(part)), "{command} {address}: {message}");
        }
    }
    assert!(!dir.path().join("run/adapter").exists());
    bucket.proxy.fail(&[Fault::Forbidden]);
    let model = "model.path=s3://sets/models/tiny-vla";
    let (_, message) = bucket.says(&["check", "configs/quickstart.yaml", model]);
    let parts = ["s3://sets/models/tiny-vla", "access is refused", "AWS_SECRET_ACCESS_KEY"];
    assert!(parts.iter().all(|part| message.contains(part)), "{message}");
}

#[test]
fn features_of_a_set_in_a_bucket_are_kept() {
    let Some(bucket) = Bucket::with_mini(Duration::ZERO) else { return };
    let dir = tempfile::tempdir().unwrap();
    let store = format!("cache.dir={}", dir.path().join("store").display());
    let exact = ["cache.mode=exact", &store];
    let on_disk = train(&dir.path().join("disk"), &SHORT);
    let counts = |run: &str| {
        let (status, printed) = bucket.start(&dir.path().join(run), &exact).finish();
        assert!(status.success(), "{printed}");
        let summary = read_json(&dir.path().join(run).join("summary.json"));
        assert_eq!(losses(&on_disk), losses(&summary), "{run}");
        let cache = &summary["cache"];
        cache["hits"].as_u64().zip(cache["misses"].as_u64()).unwrap_or_else(|| panic!("{cache:#}"))
    };
    let (hits, misses) = counts("first");
    assert!(misses > 0, "{hits} hits in a new store");
    assert_eq!(counts("second"), (hits + misses, 0), "what the first has computed is there");
}
