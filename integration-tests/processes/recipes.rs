//! Recipes beyond the first run file, with real processes: the past, several features as one, a window of a
//! column, no state, texts that are cut. Killed, audited, served.

use std::path::{Path, PathBuf};

use nix::sys::signal::Signal;

use crate::{
    serve::{python, serve},
    support::{
        CoxProcess, cox,
        processes::{signal, worker_of},
        tiny::{HoldFile, audit},
    },
};

const STEPS: u64 = 8;

/// Three frames, state and sensor as one, differences: `configs/history.yaml` as it is.
const HISTORY: [&str; 0] = [];
/// The opposite of each: images and the windows of a column alone, and two features as one action.
const STATELESS: [&str; 6] = [
    "observation.history=[]",
    "observation.max_text_tokens=2",
    "data.state=none",
    "data.sensor={key: observation.state, window: 8}",
    "data.action=[action, observation.state]",
    "data.delta_actions=[]",
];

/// A head that reads every layer and is told the state in the prompt.
const LAYERWISE: [&str; 4] = [
    "expert={preset: qwen_pi, width: 32, heads: 2, ends_width: 16}",
    "observation.history=[]",
    "observation.max_text_tokens=null",
    "data.state=observation.state",
];

/// A short run of `configs/history.yaml` in `dir`, with one worker killed in the backward pass of step 4 if
/// `killed`.
fn trained(dir: &Path, recipe: &[&str], killed: bool) -> PathBuf {
    let output = dir.join("run");
    let (output_dir, steps) =
        (format!("run.output_dir={}", output.display()), format!("train.steps={STEPS}"));
    let mut arguments = vec!["run", "configs/history.yaml", &output_dir, &steps];
    arguments.extend(["train.checkpoint_every=3", "eval.samples=4", "optimizer.warmup_steps=2"]);
    arguments.extend(recipe);
    let mut command = cox(&arguments);
    command.env("COX_TEST_HOLD", dir.join("hold"));
    let held = killed.then(|| HoldFile::order(&dir.join("hold"), 1, "backward", 4));
    let mut running = CoxProcess::of(command);
    if let Some(held) = held {
        held.wait(&mut running);
        signal(worker_of(running.pid(), 1).expect("it lives"), Signal::SIGKILL);
    }
    let (status, printed) = running.finish();
    assert!(status.success(), "{recipe:?}: {printed}");
    output
}

fn learned(run: &Path) -> [Vec<u8>; 2] {
    ["adapter/adapter_model.safetensors", "expert.safetensors"]
        .map(|name| std::fs::read(run.join(name)).unwrap_or_else(|error| panic!("{name}: {error}")))
}

/// Through a kill the same bits and no sample lost or trained on twice; then a policy that openpi's client
/// gets on with.
fn assert_trains_and_serves(recipe: &[&str]) {
    let [calm, stormy] = [(); 2].map(|()| tempfile::tempdir().expect("a directory"));
    let undisturbed = trained(calm.path(), recipe, false);
    let run = trained(stormy.path(), recipe, true);
    assert!(learned(&undisturbed) == learned(&run), "{recipe:?}: a kill has changed what was learned");
    let audit = audit(&run);
    assert_eq!((&audit["missing"], &audit["duplicate"]), (&0.into(), &0.into()), "{audit:#}");
    assert_eq!(audit["committed_steps"], STEPS, "{audit:#}");
    assert!(audit["faults"].as_array().is_some_and(|faults| !faults.is_empty()), "{audit:#}");
    let (_running, address) = serve(&run);
    python("openpi_client, numpy", "serve_client.py", &[&address]);
}

#[test]
fn a_policy_that_sees_the_past_survives_a_kill_bit_for_bit_and_serves() {
    assert_trains_and_serves(&HISTORY);
}

#[test]
fn a_policy_without_state_with_a_columns_window_and_joined_actions_does_too() {
    assert_trains_and_serves(&STATELESS);
}

#[test]
fn a_head_that_reads_every_layer_does_too() {
    assert_trains_and_serves(&LAYERWISE);
}

#[test]
fn recipes_that_contradict_themselves_or_the_data_are_refused_by_key() {
    let (usage, data) = (Some(2), Some(3));
    for (change, code, parts) in [
        ("data.state=none", usage, ["data.delta_actions", "name a state"]),
        ("data.state=[observation.state, observation.nothing]", data, ["data.state", "observation.sensor"]),
        ("observation.history=[-1, -2]", usage, ["observation.history", "oldest first"]),
        ("observation.history=[-2, 0]", usage, ["observation.history", "past frames"]),
        ("observation.max_text_tokens=0", usage, ["observation.max_text_tokens", "at least 1"]),
        ("data.sensor={key: observation.sensor}", usage, ["data.sensor.window", "missing"]),
        ("data.sensor={key: observation.sensor, window: 8}", data, ["observation.sensor", "window"]),
        ("data.sensor={key: observation.images.corner2, window: 8}", data, ["data.sensor", "image"]),
        ("observation.history=[-5000]", data, ["observation.history", "episode"]),
    ] {
        let output = cox(&["check", "configs/history.yaml", change]).output().expect("cox was built");
        let message = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), code, "{change}: {message}");
        assert!(parts.iter().all(|part| message.contains(part)), "{change}: {message}");
    }
}
