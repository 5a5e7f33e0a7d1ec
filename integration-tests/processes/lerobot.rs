//! A run from a policy directory of LeRobot's to another one: disturbed, gone on with, served here, and
//! loaded by LeRobot's own classes.

use std::{path::Path, process::Command};

use nix::sys::signal::Signal;

use super::{
    serve::{python, serve},
    support::{
        CoxProcess, cox, killed, losses,
        processes::{children, signal, wait_until_gone},
        read_json, root,
        tiny::{HoldFile, audit},
    },
};

/// Runs of tiny policies, of which LeRobot has made the directories.
const SMOLVLA: &str = "configs/smolvla.yaml";
const GR00T: &str = "configs/gr00t.yaml";
/// What a run has trained, in the policy that it leaves.
const WEIGHTS: &str = "policy/model.safetensors";
/// Adapters in both streams, above features of the tower that are kept and of which a second epoch reads.
const ADAPTERS: [&str; 6] = [
    "lora={rank: 2, alpha: 4}",
    r"lora.targets=.*(text_model|lm_expert)\..*_proj",
    "optimizer.lr.lora=2e-3",
    "cache.mode=exact",
    "data.episodes=[0, 3]",
    "train.global_batch=24",
];

/// Hidden states of whole prompts, kept and read by a second epoch.
const CACHED: [&str; 3] = ["cache.mode=exact", "data.episodes=[0, 3]", "train.global_batch=24"];

/// `cox run` of a policy.
fn command(config: &str, output: &Path, overrides: &[&str]) -> Command {
    let output_dir = format!("run.output_dir={}", output.display());
    cox(&[&["run", config, &output_dir], overrides].concat())
}

/// A few steps of a policy.
fn trained(config: &str, run: &Path) {
    let short = ["launch.nproc_per_node=1", "train.steps=4", "eval.samples=0"];
    let (status, printed) = CoxProcess::of(command(config, run, &short)).finish();
    assert!(status.success(), "{printed}");
}

/// A policy that is trained, served, and answers openpi's client.
fn answered(config: &str, run: &Path) -> (CoxProcess, String) {
    trained(config, run);
    let (running, address) = serve(run);
    python("openpi_client, numpy", "serve_client.py", &[&address]);
    (running, address)
}

#[test]
fn a_policy_of_gr00t_speaks_openpis_protocol() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    answered(GR00T, &dir.path().join("run"));
}

#[test]
fn a_policy_acts_here_as_in_lerobot_and_speaks_openpis_protocol() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let run = dir.path().join("run");
    let (_running, address) = answered(SMOLVLA, &run);
    let policy = run.join("policy").display().to_string();
    let backbone = root().join("integration-tests/fixtures/golden/smolvla/vlm").display().to_string();
    let modules = "lerobot.policies, openpi_client, num2words";
    python(modules, "check_smolvla.py", &[&policy, &backbone, &address]);
}

#[test]
fn a_checkpoint_goes_out_as_the_result_of_its_run_does() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let (run, out) = (dir.path().join("run"), dir.path().join("out"));
    trained(SMOLVLA, &run);
    let [run_dir, out_dir] = [&run, &out].map(|path| path.to_str().expect("a readable path"));
    let export = |arguments: &[&str]| CoxProcess::start(&[&["export", run_dir], arguments].concat()).finish();
    let (status, printed) = export(&["--lerobot", out_dir]);
    assert!(status.success(), "{printed}");
    assert!(printed.contains("6,384 trained values, off by 0."), "{printed}");
    for file in std::fs::read_dir(run.join("policy")).expect("the run has left it") {
        let file = file.expect("listed").path();
        let other = out.join(file.file_name().expect("a file"));
        assert!(std::fs::read(&file).expect("read") == std::fs::read(&other).expect("read"), "{file:?}");
    }
    let (status, printed) = export(&["--lerobot", out_dir]);
    assert!(!status.success() && printed.contains("already exists"), "{printed}");
    let (status, printed) = export(&["--step=0"]);
    assert!(status.success() && run.join("export/step-00000000/policy/config.json").is_file(), "{printed}");
    let (_running, _) = serve(&run.join("export/step-00000000"));
}

#[test]
fn killed_workers_change_no_bit_of_a_policy_or_of_its_adapters() {
    for (config, more) in [(SMOLVLA, &[][..]), (SMOLVLA, &ADAPTERS[..]), (GR00T, &CACHED[..])] {
        let command = |output: &Path, short: &[&str]| command(config, output, &[more, short].concat());
        killed::three_times(command, WEIGHTS);
    }
}

#[test]
fn a_policys_run_is_launched_again_to_the_same_bits_and_goes_on_in_other_worlds() {
    hold_again(SMOLVLA);
    hold_again(GR00T);
}

/// Launched again after its launcher was lost, alone, and on other numbers of ranks.
fn hold_again(config: &str) {
    const SHORT: [&str; 4] =
        ["train.steps=6", "train.checkpoint_every=2", "eval.samples=2", "optimizer.warmup_steps=2"];
    let dir = tempfile::tempdir().expect("a temporary directory");
    let of = |name: &str| dir.path().join(name);
    let of_run = |name: &str, more: &[&str]| command(config, &of(name), &[&SHORT[..], more].concat());
    let done = |command: Command| {
        let (status, printed) = CoxProcess::of(command).finish();
        assert!(status.success(), "{printed}");
    };
    let assert_whole = |name: &str, steps: u64| {
        let found = audit(&of(name));
        assert_eq!((&found["missing"], &found["duplicate"]), (&0.into(), &0.into()), "{name}: {found:#}");
        assert_eq!(found["committed_steps"], steps, "{name}: {found:#}");
    };
    done(of_run("whole", &[]));

    // The launcher and all that it has started are lost between two checkpoints.
    let held = HoldFile::order(&of("hold"), 1, "backward", 5);
    let mut lost = of_run("again", &[]);
    lost.env("COX_TEST_HOLD", of("hold"));
    let mut lost = CoxProcess::of(lost);
    held.wait(&mut lost);
    let processes = children(lost.pid());
    signal(lost.pid() as i32, Signal::SIGKILL);
    lost.finish();
    wait_until_gone(&processes);
    done(of_run("again", &[]));
    killed::assert_same(&of("whole"), &of("again"), WEIGHTS);
    assert_whole("again", 6);

    // One rank has the losses of two; three go on from the checkpoint of two, two from that of three.
    done(of_run("alone", &["--nproc-per-node=1", "train.micro_batch=8"]));
    let of_world = |name: &str| losses(&read_json(&of(name).join("summary.json")));
    let [two, one] = ["whole", "alone"].map(of_world);
    assert_eq!((two.len(), one.len()), (6, 6));
    for (two, one) in two.into_iter().zip(one) {
        let (two, one) = (f64::from_bits(two), f64::from_bits(one));
        assert!((two - one).abs() <= 1e-5 * two.abs(), "{two} and {one}");
    }
    for (steps, ranks) in [(8, 3), (10, 2)] {
        let more = [format!("train.steps={steps}"), format!("--nproc-per-node={ranks}")];
        done(of_run("again", &more.each_ref().map(String::as_str)));
        assert_whole("again", steps);
    }
}

#[test]
fn adapters_above_layers_of_few_bits_learn_in_the_memory_that_is_predicted() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let trained = |dtype: &str| {
        let output = dir.path().join(dtype);
        let short =
            ["train.steps=4", "train.checkpoint_every=0", "eval.samples=2", "optimizer.warmup_steps=1"];
        let dtype = format!("model.weights_dtype={dtype}");
        let (status, printed) =
            CoxProcess::of(command(SMOLVLA, &output, &[&ADAPTERS[..], &short, &[&dtype]].concat())).finish();
        assert!(status.success() && output.join(WEIGHTS).is_file(), "{printed}");
        let summary = read_json(&output.join("summary.json"));
        assert!(summary["cache"]["hits"].as_u64().is_some_and(|hits| hits > 0), "{summary:#}");
        let [predicted, measured] = ["predicted", "measured"]
            .map(|which| summary["memory"][which].as_f64().expect("a world of two has both"));
        let off = (predicted - measured).abs();
        assert!(off <= (0.03 * measured).max(8.0 * 1024.0 * 1024.0), "{dtype}: {:#}", summary["memory"]);
        losses(&summary).into_iter().map(f64::from_bits).collect::<Vec<_>>()
    };
    let dense = trained("bfloat16");
    for (dtype, near) in [("int8", 0.02), ("nf4", 0.1)] {
        let losses = trained(dtype);
        println!("{dtype}: {losses:?}, {dense:?} in bfloat16");
        for (found, dense) in losses.iter().zip(&dense) {
            assert!(found != dense && (found / dense - 1.0).abs() < near, "{dtype}: {losses:?} {dense:?}");
        }
    }
}
