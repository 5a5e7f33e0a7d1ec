//! Stage one, stage two: a run that starts from another one's weights.

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
    sync::OnceLock,
};

use serde_json::Value;

use crate::support::{CoxProcess, cox, losses, read_json, root};

/// Every file below a directory, with its bytes.
fn contents(dir: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    let mut found = BTreeMap::new();
    for path in fs::read_dir(dir).expect("a directory").map(|entry| entry.expect("an entry").path()) {
        match path.is_dir() {
            true => found.extend(contents(&path)),
            false => drop(found.insert(path.clone(), fs::read(&path).expect("a file"))),
        }
    }
    found
}

const SHORT: [&str; 3] = ["eval.samples=4", "optimizer.warmup_steps=2", "train.checkpoint_every=0"];

/// `cox run` of a stage in a directory of its own; everything it printed.
fn stage(config: &str, output: &Path, overrides: &[&str]) -> (bool, String) {
    let output_dir = format!("run.output_dir={}", output.display());
    let arguments = [&["run", config, &output_dir][..], &SHORT, overrides].concat();
    let (status, printed) = CoxProcess::start(&arguments).finish();
    (status.success(), printed)
}

fn trained(config: &str, output: &Path, overrides: &[&str]) -> (Value, String) {
    let (well, printed) = stage(config, output, overrides);
    assert!(well, "{printed}");
    (read_json(&output.join("summary.json")), printed)
}

/// The output directory of a first stage, trained once for all tests here.
fn first_stage() -> &'static Path {
    static TRAINED: OnceLock<PathBuf> = OnceLock::new();
    TRAINED.get_or_init(|| {
        let output = Path::new(env!("CARGO_TARGET_TMPDIR")).join("stage-one");
        if output.exists() {
            std::fs::remove_dir_all(&output).expect("what an earlier test left");
        }
        let (summary, _) = trained("configs/vla-stage1.yaml", &output, &["train.steps=25"]);
        let number = |pointer: &str| summary.pointer(pointer).and_then(Value::as_f64).expect(pointer);
        assert!(number("/loss_last") < 0.8 * number("/loss_first"), "{summary:#}");
        assert!(!output.join("adapter").exists(), "nothing of the model trains in the first stage");
        output
    })
}

/// The override that starts from a place.
fn from(place: &Path) -> String {
    format!("train.init_from={}", place.display())
}

#[test]
fn stage_two_goes_on_from_the_weights_of_stage_one_with_an_optimizer_of_its_own() {
    let dir = tempfile::tempdir().unwrap();
    let one = first_stage();
    let from = from(one);
    let two = |name: &str, overrides: &[&str]| {
        let overrides = [&["train.steps=6"][..], overrides].concat();
        trained("configs/vla-stage2.yaml", &dir.path().join(name), &overrides)
    };
    let (started, printed) = two("two", &[&from]);
    for line in ["expert: all", "sensor: all", "lora: all 84 tensors start from their initial values"] {
        assert!(printed.contains(line), "no {line:?}:\n{printed}");
    }
    let (fresh, _) = two("fresh", &["train.init_from="]);
    let first = |summary: &Value| f64::from_bits(losses(summary)[0]);
    assert!(first(&started) < 0.8 * first(&fresh), "{} and {}", first(&started), first(&fresh));
    assert_eq!(started["first_step"].as_u64(), Some(0));
    let spec = read_json(&dir.path().join("two/run_spec.json"));
    assert_eq!(spec["train"]["init_digest"].as_str().map(str::len), Some(64), "{spec:#}");
    let config = read_json(&dir.path().join("two/adapter/adapter_config.json"));
    assert_eq!(config["lora_dropout"], 0.05);

    // The group's own files say the same as the checkpoint.
    let files = format!(
        "train.init_from={{expert: {}, sensor: {}}}",
        one.join("expert.safetensors").display(),
        one.display()
    );
    let (by_group, _) = two("by-group", &[&files]);
    assert_eq!(losses(&by_group), losses(&started));

    // What is dropped does not depend on how a step is cut.
    let (cut, _) = two("cut", &[&from, "--nproc-per-node=1", "train.micro_batch=4", "train.recompute=none"]);
    for (a, b) in losses(&started).into_iter().zip(losses(&cut)) {
        let (a, b) = (f64::from_bits(a), f64::from_bits(b));
        assert!((a - b).abs() <= 1e-5 * a.abs(), "{a} and {b}");
    }
}

#[test]
fn an_expert_that_does_not_train_comes_out_as_it_was_brought_and_has_no_optimizer_state() {
    let dir = tempfile::tempdir().unwrap();
    let (one, two) = (first_stage(), dir.path().join("two"));
    let from = from(one);
    let overrides = [&from, "expert.train=false", "train.steps=4", "train.checkpoint_every=2"];
    let (_, printed) = trained("configs/vla-stage2.yaml", &two, &overrides);
    assert!(printed.contains("frozen weights come from"), "{printed}");
    let tensors = |path: &Path| {
        let bytes = std::fs::read(path).expect("it was written");
        let file = safetensors::SafeTensors::deserialize(&bytes).expect("whole");
        let mut all: Vec<_> =
            file.tensors().into_iter().map(|(name, view)| (name, view.data().to_vec())).collect();
        all.sort();
        all
    };
    assert_eq!(tensors(&two.join("expert.safetensors")), tensors(&one.join("expert.safetensors")));
    let file = |name: &str| two.join("checkpoints/step-00000004").join(name);
    let values = |name: &str| tensors(&file(name)).into_iter().map(|(_, bytes)| bytes.len()).sum::<usize>();
    let expert: usize =
        tensors(&one.join("expert.safetensors")).into_iter().map(|(_, bytes)| bytes.len()).sum();
    let moments: usize =
        (0..2).map(|rank| values(&format!("optimizer-rank{rank:04}-of-0002.safetensors"))).sum();
    let learned = values("trainables.safetensors") - expert;
    assert!((2 * learned..2 * learned + 1024).contains(&moments), "{moments} for {learned}");

    // The expert is read again from where it was brought from.
    let more = [&from, "expert.train=false", "train.steps=6"];
    let (went_on, _) = trained("configs/vla-stage2.yaml", &two, &more);
    assert_eq!(went_on["first_step"].as_u64(), Some(4));
    let evaluated = cox(&["eval", &two.display().to_string()]).output().expect("cox was built");
    assert!(evaluated.status.success(), "{}", String::from_utf8_lossy(&evaluated.stderr));
}

#[test]
fn adapters_in_an_expert_that_is_brought_train_and_come_out_merged() {
    let dir = tempfile::tempdir().unwrap();
    let (one, two) = (first_stage(), dir.path().join("two"));
    let (from, targets) = (from(one), "lora.targets=[q_proj, v_proj, attn.q, attn.v, final.out]");
    let of_run = [&from, "expert.train=false", targets, "train.steps=4"];
    let (summary, printed) = trained("configs/vla-stage2.yaml", &two, &of_run);
    assert!(printed.contains("expert: all 18 tensors start from their initial values"), "{printed}");
    let (begun, ended) = (losses(&summary)[0], losses(&summary)[3]);
    assert!(f64::from_bits(begun).is_finite() && begun != ended);
    let names_and_values = |path: &Path| {
        let bytes = std::fs::read(path.join("expert.safetensors")).expect("it was written");
        let file = safetensors::SafeTensors::deserialize(&bytes).expect("whole");
        let mut all: Vec<_> =
            file.tensors().into_iter().map(|(name, view)| (name, view.data().to_vec())).collect();
        all.sort();
        all.into_iter().unzip::<_, _, Vec<_>, Vec<_>>()
    };
    let ((brought, before), (left, after)) = (names_and_values(one), names_and_values(&two));
    assert_eq!(left, brought);
    let moved: Vec<_> = left.iter().zip(before.iter().zip(&after)).filter(|(_, (a, b))| a != b).collect();
    let moved: Vec<_> = moved.into_iter().map(|(name, _)| name.as_str()).collect();
    let adapted = |name: &&str| {
        ["attn.q.weight", "attn.v.weight", "final.out.weight"].iter().any(|end| name.ends_with(end))
    };
    assert!(moved.len() == 9 && moved.iter().all(adapted), "{moved:?}");
    // Merged it is an expert like any other, for a run that trains it in full.
    let expert = two.join("expert.safetensors").display().to_string();
    trained(
        "configs/vla-stage2.yaml",
        &dir.path().join("three"),
        &[&format!("train.init_from={{expert: {expert}}}"), "train.steps=2"],
    );
}

#[test]
fn weights_that_do_not_fit_are_named_tensor_by_tensor_before_anything_runs() {
    let dir = tempfile::tempdir().unwrap();
    let from = from(first_stage());
    let check = |overrides: &[&str]| {
        let output_dir = format!("run.output_dir={}", dir.path().join("two").display());
        let arguments = [&["check", "configs/vla-stage2.yaml", &output_dir, &from][..], overrides].concat();
        let ended = cox(&arguments).output().expect("cox was built");
        let printed = [ended.stdout, ended.stderr].map(|text| String::from_utf8_lossy(&text).into_owned());
        (ended.status.code(), printed.concat())
    };
    let (code, printed) = check(&[]);
    assert_eq!(code, Some(0), "{printed}");
    assert!(printed.contains("lora: all 84 tensors start from their initial values"), "{printed}");

    let (code, printed) = check(&["expert.width=64"]);
    assert_eq!(code, Some(3), "{printed}");
    assert!(printed.contains("there, [") && printed.contains("expert."), "{printed}");
    let (code, printed) = check(&["expert.convention=noise_at_one"]);
    assert_eq!(code, Some(3), "{printed}");
    assert!(printed.contains("expert.convention"), "{printed}");
    let (code, printed) = check(&["train.init_from={head: runs}"]);
    assert_eq!(code, Some(2), "{printed}");
    assert!(printed.contains("`head`"), "{printed}");

    let output_dir = format!("run.output_dir={}", dir.path().join("two").display());
    for (change, expected) in
        [("expert.width=64", "there, ["), ("expert.convention=noise_at_one", "expert.convention")]
    {
        let arguments = ["run", "configs/vla-stage2.yaml", &output_dir, &from, change];
        let (status, printed) = CoxProcess::start(&arguments).finish();
        assert_eq!(status.code(), Some(3), "{change}: {printed}");
        assert!(printed.contains(expected), "{change}: {printed}");
        assert!(!dir.path().join("two").exists(), "{change}: something was begun");
    }
}

#[test]
fn an_expert_that_stays_as_it_is_brought_and_is_not_is_refused_at_launch() {
    let dir = tempfile::tempdir().unwrap();
    let (two, sensor) = (dir.path().join("two"), first_stage().join("sensor.safetensors"));
    for stays in ["expert.train=false", "optimizer.lr.expert=0"] {
        let (well, printed) = stage("configs/vla-stage2.yaml", &two, &[&from(&sensor), stays]);
        assert!(
            !well && printed.contains("has no values for parameters that this run does not train"),
            "{printed}"
        );
        let named = format!("expert: {} has no tensor of this group", sensor.display());
        assert!(printed.contains(&named), "{printed}");
        assert!(!two.exists(), "{stays}: something was begun");
    }
}

#[test]
fn a_pretrained_model_may_be_moved_and_another_one_is_refused_with_both_names() {
    let dir = tempfile::tempdir().unwrap();
    let (one, moved, run) = (dir.path().join("one"), dir.path().join("moved"), dir.path().join("run"));
    fs::create_dir(&one).unwrap();
    let base = root().join("configs/assets/tiny-vla");
    for file in fs::read_dir(base).expect("it ships").map(|file| file.expect("readable").path()) {
        fs::copy(&file, one.join(file.file_name().expect("a file"))).unwrap();
    }
    let path = |place: &Path| format!("model.path={}", place.display());
    trained("configs/vla-stage1.yaml", &run, &[&path(&one), "train.steps=2"]);
    fs::rename(&one, &moved).unwrap();
    let (summary, printed) = trained("configs/vla-stage1.yaml", &run, &[&path(&moved), "train.steps=3"]);
    assert_eq!(summary["first_step"].as_u64(), Some(2), "{printed}");
    assert!(printed.contains("changed at step 2: model.path from "), "{printed}");
    let audit = cox(&["audit", &run.display().to_string()]).output().expect("cox was built");
    assert!(String::from_utf8_lossy(&audit.stdout).contains("model.path from "), "{audit:?}");

    // One value in the midst of one of its tensors.
    let weights = moved.join("model.safetensors");
    let mut bytes = fs::read(&weights).unwrap();
    let last = bytes.len() - 1;
    bytes[last] ^= 1;
    fs::write(&weights, bytes).unwrap();
    let before = contents(&run);
    for place in [&moved, &dir.path().join("link")] {
        if place != &moved {
            std::os::unix::fs::symlink(&moved, place).unwrap();
        }
        let (well, printed) = stage("configs/vla-stage1.yaml", &run, &[&path(place), "train.steps=4"]);
        let told = format!("model.path {}: apparently not the pretrained model", place.display());
        assert!(!well && printed.contains(&told), "{printed}");
        assert!(printed.contains(&format!("(\"{}\")", moved.display())), "{printed}");
        assert!(printed.contains("it has digest ") && printed.contains("model had digest "), "{printed}");
    }
    for command in ["eval", "export"] {
        let refused = |place: &Path, told: &str| {
            let output_dir = run.display().to_string();
            let (status, printed) = CoxProcess::start(&[command, &output_dir, &path(place)]).finish();
            assert!(status.code() == Some(3) && printed.contains(told), "{command}: {printed}");
        };
        refused(&moved, "every node must see the same");
        refused(&one, "does not exist; if it has moved, give its new path: model.path=DIR");
    }
    assert!(contents(&run) == before, "a refusal has changed the run's directory");

    // Every worker looks for itself: on another machine it may be another one.
    let launched = format!("train.base_digest={}", "0".repeat(64));
    let (well, printed) = stage("configs/vla-stage1.yaml", &dir.path().join("other"), &[&launched]);
    assert!(!well && printed.contains("every node must see the same, unchanged model"), "{printed}");
    assert!(!dir.path().join("other/checkpoints").exists());
}

#[test]
fn other_weights_at_the_same_place_are_another_run() {
    let dir = tempfile::tempdir().unwrap();
    let (expert, elsewhere) =
        (first_stage().join("expert.safetensors"), dir.path().join("moved.safetensors"));
    let two = dir.path().join("two");
    trained("configs/vla-stage2.yaml", &two, &[&from(&expert), "train.steps=2"]);
    // The same weights elsewhere are the same run, which is prolonged.
    std::fs::copy(expert, &elsewhere).unwrap();
    let (summary, _) = trained("configs/vla-stage2.yaml", &two, &[&from(&elsewhere), "train.steps=3"]);
    assert_eq!(summary["first_step"].as_u64(), Some(2));
    // Other weights are not.
    let sensor = first_stage().join("sensor.safetensors");
    let (well, printed) = stage("configs/vla-stage2.yaml", &two, &[&from(&sensor), "train.steps=4"]);
    assert!(!well && printed.contains("train.init_digest"), "{printed}");
}
