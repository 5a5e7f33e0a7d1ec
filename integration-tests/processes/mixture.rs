//! Two data sets in one run, with real processes: killed and resumed, another world, audited, served.

use std::path::Path;

use nix::sys::signal::Signal;
use serde_json::Value;

use crate::support::{
    CoxProcess, cox,
    processes::{coordinator_of, signal, worker_of},
    read_json,
    tiny::{HoldFile, audit},
};

const STEPS: u64 = 20;

/// `configs/mixture.yaml`, short, in this directory.
fn start(dir: &Path, more: &[&str]) -> CoxProcess {
    let output = format!("run.output_dir={}", dir.join("run").display());
    let steps = format!("train.steps={STEPS}");
    let mut arguments = vec!["run", "configs/mixture.yaml", &output, &steps];
    arguments.extend(["train.checkpoint_every=6", "eval.samples=4", "optimizer.warmup_steps=2"]);
    let mut command = cox(&[&arguments, more].concat());
    command.env("COX_TEST_HOLD", dir.join("hold"));
    CoxProcess::of(command)
}

fn finish(running: CoxProcess) -> String {
    let (status, printed) = running.finish();
    assert!(status.success(), "{printed}");
    printed
}

fn learned(dir: &Path) -> [Vec<u8>; 2] {
    ["adapter/adapter_model.safetensors", "expert.safetensors"].map(|name| {
        std::fs::read(dir.join("run").join(name)).unwrap_or_else(|error| panic!("{name}: {error}"))
    })
}

/// Which of each set was consumed, as the audit says.
fn consumed(audit: &Value) -> Vec<(String, u64)> {
    let sets = audit["sets"].as_array().unwrap_or_else(|| panic!("{audit:#}"));
    let of = |set: &Value| Some((set["name"].as_str()?.to_owned(), set["consumed"].as_u64()?));
    sets.iter().map(|set| of(set).unwrap_or_else(|| panic!("{audit:#}"))).collect()
}

#[test]
fn a_mixture_survives_kills_bit_for_bit_and_the_audit_speaks_of_each_set() {
    let [calm, stormy, alone] = [(); 3].map(|()| tempfile::tempdir().unwrap());
    finish(start(calm.path(), &[]));

    let held = HoldFile::order(&stormy.path().join("hold"), 1, "backward", 8);
    let mut running = start(stormy.path(), &[]);
    held.wait(&mut running);
    signal(coordinator_of(running.pid()).expect("it lives"), Signal::SIGKILL);
    signal(worker_of(running.pid(), 1).expect("it lives"), Signal::SIGKILL);
    finish(running);
    assert!(learned(calm.path()) == learned(stormy.path()), "kills have changed what was learned");

    // Another world: the same samples in the same steps.
    finish(start(alone.path(), &["launch.nproc_per_node=1"]));
    let audits = [&calm, &stormy, &alone].map(|dir| audit(&dir.path().join("run")));
    for audit in &audits {
        assert_eq!((&audit["missing"], &audit["duplicate"]), (&0.into(), &0.into()), "{audit:#}");
        let of_each = consumed(audit);
        assert_eq!(of_each, consumed(&audits[0]));
        // Epochs of 96 + 32: three samples of the larger weight for one of the other.
        assert_eq!(of_each.iter().map(|(_, samples)| samples).sum::<u64>(), 8 * STEPS);
        assert_eq!(audit["sets"][0]["an_epoch"], 96, "{audit:#}");
        assert_eq!(audit["sets"][1]["an_epoch"], 32, "{audit:#}");
    }
    assert!(audits[1]["faults"].as_array().is_some_and(|faults| !faults.is_empty()), "{:#}", audits[1]);
}

#[test]
fn a_policy_of_several_data_sets_is_served_for_the_robot_of_one() {
    let dir = tempfile::tempdir().unwrap();
    finish(start(dir.path(), &["train.steps=2", "launch.nproc_per_node=1"]));
    let run = dir.path().join("run");
    let manifest = read_json(&run.join("manifest.json")).to_string();
    for set in ["metaworld-mini", "arm-mini"] {
        assert!(manifest.contains(&format!("sets/{set}/policy.json")), "{manifest}");
    }
    let serve = |flags: &[&str]| {
        let at = run.display().to_string();
        CoxProcess::start(&[&["serve", &at, "--listen=127.0.0.1:0", "--device=cpu"], flags].concat())
    };
    let (status, printed) = serve(&[]).finish();
    assert!(!status.success() && printed.contains("NAME is one of metaworld-mini, arm-mini"), "{printed}");
    let (status, printed) = serve(&["--set=attic"]).finish();
    assert!(!status.success() && printed.contains("serve.set"), "{printed}");
    let mut running = serve(&["--set=arm-mini"]);
    running.wait_for("serving at ws");
    signal(running.pid() as i32, Signal::SIGTERM);
    finish(running);
}
