//! Families of models that no crate of the repository knows have all that the tasks and the engine give.

use std::{
    collections::BTreeSet,
    path::{Path, PathBuf},
    process::Command,
    sync::OnceLock,
};

use nix::sys::signal::Signal;
use serde_json::Value;

use crate::{
    processes::{signal, worker_of},
    support::{Toy, losses, read_json, refused},
};

/// What a run leaves that training decides.
const RESULTS: [&str; 3] = ["adapter/adapter_model.safetensors", "expert.safetensors", "sensor.safetensors"];
const SHORT: [&str; 4] =
    ["train.steps=6", "train.checkpoint_every=2", "eval.samples=2", "optimizer.warmup_steps=2"];

/// A family of the program, and a directory for runs on a model of it.
struct Family {
    name: &'static str,
    toy: Toy,
}

impl Family {
    fn new(name: &'static str) -> Self {
        Self { name, toy: Toy::new(1) }
    }

    /// The directory of a small model with random weights, made once for all tests here.
    fn model(&self) -> &'static Path {
        static MADE: [OnceLock<PathBuf>; 2] = [const { OnceLock::new() }; 2];
        MADE[usize::from(self.name == "quilt")].get_or_init(|| {
            let out = Path::new(env!("CARGO_TARGET_TMPDIR")).join(self.name);
            if out.exists() {
                std::fs::remove_dir_all(&out).expect("what an earlier test left");
            }
            let like = format!("integration-tests/toy/src/families/{}/tiny", self.name);
            let tokenizer = ["--tokenizer", "configs/assets/tiny-vla", "--dtype", "f32"];
            let mut command = self.toy.cox(&["data", "make-checkpoint", "--like", &like]);
            let made = command.args(tokenizer).arg("--out").arg(&out).output().expect("cox-toy was built");
            assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
            out
        })
    }

    /// `cox-toy` with a run file, on this model, leaving what it leaves in the directory `name`.
    fn with(&self, command: &str, file: &str, name: &str, overrides: &[&str]) -> Command {
        let mut command = self.toy.cox(&[command, file]);
        command.arg(format!("model.path={}", self.model().display()));
        command.arg(format!("run.output_dir={}", self.toy.path(name).display())).args(overrides);
        command.env("COX_TEST_HOLD", self.toy.path("hold"));
        command
    }

    /// A run of the family's own file, [`SHORT`].
    fn run(&self, name: &str, overrides: &[&str]) -> Command {
        let file = format!("integration-tests/toy/{}.yaml", self.name);
        self.with("run", &file, name, &[&SHORT, overrides].concat())
    }

    /// Trains the family's own file to its end; returns `summary.json`.
    fn train(&self, name: &str, overrides: &[&str]) -> Value {
        self.finish(name, self.run(name, overrides))
    }

    fn finish(&self, name: &str, command: Command) -> Value {
        let (status, printed) = self.toy.start_of(command).finish();
        assert!(status.success(), "{name}: {status}\n{printed}");
        read_json(&self.toy.path(name).join("summary.json"))
    }

    /// What a run has learned.
    fn results(&self, name: &str) -> Vec<Vec<u8>> {
        let run = self.toy.path(name);
        RESULTS.iter().map(|file| std::fs::read(run.join(file)).expect("the run has left it")).collect()
    }
}

/// Steps of a run in which something is learned; ten of them are shown as one.
const LONG: &str = "train.steps=40";

/// The loss has come down to this share of what it began with.
fn assert_learned(summary: &Value, share: f64) {
    let number = |field: &str| summary[field].as_f64().expect("a number");
    assert!(number("loss_last") < share * number("loss_first"), "{summary:#}");
}

#[test]
fn workers_killed_wherever_they_are_change_no_bit() {
    let quilt = Family::new("quilt");
    quilt.train("whole", &[]);
    let stands = [(1, "forward", 1), (0, "backward", 3), (1, "optimizer", 4)];
    let held = stands.map(|(rank, phase, step)| (rank, quilt.toy.hold(rank, phase, step)));
    let mut running = quilt.toy.start_of(quilt.run("killed", &[]));
    for (rank, held) in held {
        running.wait_until_held(&held);
        signal(worker_of(running.pid(), rank).expect("it lives"), Signal::SIGKILL);
        // Its replacement finds nothing left of it.
        std::fs::remove_file(held).expect("it was held");
    }
    let (status, printed) = running.finish();
    assert!(status.success(), "{status}\n{printed}");
    assert!(quilt.results("killed") == quilt.results("whole"), "something else was learned\n{printed}");
    let audit = quilt.toy.assert_audited("killed", 6);
    assert_eq!(audit["faults"].as_array().map(Vec::len), Some(3), "{audit:#}");
}

#[test]
fn kept_features_recompute_and_fetched_blocks_change_no_bit() {
    let quilt = Family::new("quilt");
    quilt.train("live", &[]);
    let same = |name: &str, overrides: &[&str]| {
        let summary = quilt.train(name, overrides);
        assert!(quilt.results(name) == quilt.results("live"), "{name}: something else was learned");
        summary
    };
    // Adapters everywhere: what patches become is kept. The second run finds all of it.
    let store = format!("cache.dir={}", quilt.toy.path("store").display());
    for (name, used) in [("patches-kept", [0, 48]), ("patches-found", [48, 0])] {
        let cache = same(name, &["cache.mode=exact", &store])["cache"].clone();
        assert_eq!(["hits", "misses"].map(|field| cache[field].as_u64()), used.map(Some), "{cache:#}");
    }
    same("nothing-again", &["train.recompute=none"]);
    same("much-again", &["train.recompute=selective"]);
    same("streamed", &["memory.offload=layers"]);
    same("shared-out", &["memory.shard=frozen"]);

    // Adapters in the last two blocks: their input is kept; and nowhere: the hidden states.
    for (name, adapted, tap) in [
        ("half", r"lora.targets=.*layers\.[23]\..*(query|value)", "the input of decoder layer 2"),
        ("none", "lora=", "the final hidden states"),
    ] {
        let (live, kept) = (format!("{name}-live"), format!("{name}-kept"));
        let before = quilt.train(&live, &[adapted]);
        let (status, printed) = quilt.toy.start_of(quilt.run(&kept, &[adapted, "cache.mode=exact"])).finish();
        assert!(status.success() && printed.contains(tap), "{tap}: {status}\n{printed}");
        let after = read_json(&quilt.toy.path(&kept).join("summary.json"));
        assert_eq!(losses(&before), losses(&after), "{name}");
    }
}

#[test]
fn an_adapter_has_the_familys_own_names() {
    let quilt = Family::new("quilt");
    quilt.train("run", &["lora.targets=[query, down]", "train.steps=2"]);
    let adapter = quilt.toy.path("run/adapter");
    let bytes = std::fs::read(adapter.join("adapter_model.safetensors")).expect("it is left");
    let tensors = safetensors::SafeTensors::deserialize(&bytes).expect("safetensors");
    let names: BTreeSet<_> = tensors.names().into_iter().map(ToOwned::to_owned).collect();
    let adapted = |layer| ["mix.query", "mlp.down"].map(|linear| format!("model.layers.{layer}.{linear}"));
    let matrices = |module| ["A", "B"].map(|of| format!("base_model.model.{module}.lora_{of}.weight"));
    let expected: BTreeSet<_> = (0..4).flat_map(adapted).flat_map(matrices).collect();
    assert_eq!(names, expected);
    let shape = |name: &str| tensors.tensor(name).expect("it is there").shape().to_vec();
    assert_eq!(shape("base_model.model.model.layers.0.mlp.down.lora_A.weight"), [8, 256]);
    let config = read_json(&adapter.join("adapter_config.json"));
    assert_eq!((&config["r"], &config["lora_alpha"]), (&8.into(), &16.into()), "{config:#}");
    let readme = std::fs::read_to_string(adapter.join("README.md")).expect("it is left");
    assert!(readme.contains("QuiltForConditionalGeneration"), "{readme}");
}

/// The most that a run's peak may differ from the predicted one, relative to what it then takes.
const PLANNED: f64 = 0.03;
/// As [`PLANNED`], where features are computed to be kept: whether the next batch lies ready meanwhile is the
/// data threads' doing, and is planned for. With it the plan was 2.4 % above, without it 3.9 %.
const PLANNED_WITH_FEATURES: f64 = 0.05;

#[test]
fn a_plan_says_what_a_run_on_the_family_then_takes() {
    let few = ["train.steps=4", "train.checkpoint_every=0", "train.global_batch=16", "eval.samples=0"];
    let few = [&few[..], &["data.min_pixels=50176"]].concat();
    let mut table = String::new();
    let mut is_planned = true;
    for (at, (overrides, most)) in [
        (&["train.micro_batch=8", "train.recompute=none"][..], PLANNED),
        (&["train.micro_batch=8", "train.recompute=full"], PLANNED),
        (&["train.micro_batch=4", "train.recompute=selective", "--nproc-per-node=1"], PLANNED),
        (&["train.micro_batch=4", "train.recompute=full", "cache.mode=exact"], PLANNED_WITH_FEATURES),
    ]
    .into_iter()
    .enumerate()
    {
        // Another one has learned nothing from this one.
        let quilt = Family::new("quilt");
        let summary = quilt.train(&format!("run-{at}"), &[&few[..], overrides].concat());
        let number = |field: &str| summary["memory"][field].as_f64().expect(field);
        let (predicted, measured) = (number("predicted"), number("measured"));
        let error = predicted / measured - 1.0;
        is_planned &= error.abs() <= most;
        table += &format!("{overrides:?}: {predicted} for {measured}, {:+.1} %\n", 100.0 * error);
    }
    println!("{table}");
    assert!(is_planned, "\n{table}");
}

#[test]
fn chats_train_on_the_family_and_are_answered() {
    let quilt = Family::new("quilt");
    let chats = [&SHORT[..], &["lora.targets=all-linear", LONG]].concat();
    // Adapters above frozen weights that are random learn how often tokens come, and little more.
    assert_learned(&quilt.finish("chats", quilt.with("run", "configs/sft.yaml", "chats", &chats)), 0.9);
    quilt.toy.assert_audited("chats", 40);
    let mut command = quilt.toy.cox(&["generate", "--prompt", "what is this?", "--max-new-tokens", "4"]);
    let answered = command.arg(quilt.toy.path("chats")).output().expect("cox-toy was built");
    assert!(answered.status.success(), "{}", String::from_utf8_lossy(&answered.stderr));
}

#[test]
fn what_a_family_has_not_is_refused_where_it_is_asked_for() {
    let quilt = Family::new("quilt");
    let mut trajectory = quilt.toy.cox(&["check", "configs/trajectory.yaml"]);
    trajectory.arg(format!("extractor.path={}", quilt.model().display()));
    trajectory.arg("data.image_size=224");
    let asks = [
        (trajectory, "extractor.path: the vision tower of"),
        (quilt.run("never", &["memory.offload=embedding"]), "is looked up on the device in this family"),
    ];
    for (command, why) in asks {
        let (code, printed) = refused(command);
        assert!(code != Some(0) && printed.contains(why), "{why}: {code:?}\n{printed}");
    }
    let model = quilt.toy.path("other");
    std::fs::create_dir(&model).expect("a directory");
    std::fs::write(model.join("config.json"), r#"{"model_type": "felt"}"#).expect("a file");
    let (code, printed) = refused(quilt.run("never", &[&format!("model.path={}", model.display())]));
    let known = "\"felt\"; supported are qwen2_5_vl";
    assert!(code != Some(0) && printed.contains(known) && printed.contains("quilt, mosaic"), "{printed}");
    assert!(!quilt.toy.path("never").exists());
}

#[test]
fn the_variant_trains_as_the_first_does() {
    let mosaic = Family::new("mosaic");
    assert_learned(&mosaic.train("live", &["lora.targets=[seek, up]", LONG]), 0.8);
    mosaic.train("kept", &["lora.targets=[seek, up]", LONG, "cache.mode=exact"]);
    assert!(mosaic.results("live") == mosaic.results("kept"), "something else was learned");
    let bytes = std::fs::read(mosaic.toy.path("live").join(RESULTS[0])).expect("it is left");
    let tensors = safetensors::SafeTensors::deserialize(&bytes).expect("safetensors");
    tensors.tensor("base_model.model.model.courses.3.mix.seek.lora_B.weight").expect("by its own names");
    // Files leave out how most names begin.
    let bytes = std::fs::read(mosaic.model().join("model.safetensors")).expect("it was made");
    let tensors = safetensors::SafeTensors::deserialize(&bytes).expect("safetensors");
    tensors.tensor("courses.3.mix.seek.weight").expect("as files have it");
}
