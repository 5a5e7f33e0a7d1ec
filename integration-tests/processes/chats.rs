//! Supervised fine-tuning as a user runs it: `configs/sft.yaml`, undisturbed and with workers killed.

use std::{
    path::{Path, PathBuf},
    process::Command,
};

use crate::support::{CoxProcess, cox, killed, read_json, root};

const ADAPTER: &str = "adapter/adapter_model.safetensors";

fn command(output: &Path, overrides: &[&str]) -> Command {
    let output_dir = format!("run.output_dir={}", output.display());
    let mut arguments = vec!["run", "configs/sft.yaml", &output_dir];
    arguments.extend(overrides);
    cox(&arguments)
}

#[test]
fn chats_are_learned_and_the_measures_of_held_out_ones_fall() {
    let dir = tempfile::tempdir().expect("a directory");
    let output = dir.path().join("run");
    let overrides = ["train.steps=60", "train.checkpoint_every=0"];
    let (status, printed) = CoxProcess::of(command(&output, &overrides)).finish();
    assert!(status.success(), "{printed}");
    let summary = read_json(&output.join("summary.json"));
    let number = |pointer: &str| summary.pointer(pointer).and_then(|v| v.as_f64()).expect(pointer);
    assert!(number("/loss_last") < 0.1 * number("/loss_first"), "{summary:#}");
    let [before, after] = ["before", "after"].map(|when| number(&format!("/error_{when}/loss")));
    assert!(after < 0.1 * before, "held-out loss {before} -> {after}");
    assert!((number("/error_after/perplexity") / after.exp() - 1.0).abs() < 1e-9, "{summary:#}");
    assert!(number("/error_after/token_accuracy") > 0.6, "{summary:#}");
    assert!(printed.contains("held-out perplexity"), "{printed}");
    let manifest = read_json(&output.join("manifest.json"));
    let files = manifest["files"].as_array().expect("an array");
    assert!(files.iter().any(|file| file["path"] == ADAPTER), "{manifest:#}");
    writes_what_it_has_learned(&output);
}

/// `cox generate` of a run directory; of what it was trained from, and of a task that cannot.
fn writes_what_it_has_learned(output: &Path) {
    let image = "configs/assets/shapes/images/yellow-square-2.png";
    let generate = |run: &str, more: &[&str]| {
        let about = ["--prompt", "Which colour is it?", "--image", image, "--max-new-tokens", "12"];
        let mut command = cox(&[&["generate", run][..], &about, more].concat());
        let output = command.output().expect("it starts");
        let [printed, logged] =
            [output.stdout, output.stderr].map(|text| String::from_utf8(text).expect("UTF-8"));
        (output.status.code(), printed, logged)
    };
    let (code, printed, logged) = generate(&output.display().to_string(), &[]);
    assert_eq!((code, printed.as_str()), (Some(0), "It is yellow.\n"), "{logged}");
    let (code, printed, logged) = generate("configs/sft.yaml", &["--json", "--temperature", "0.5"]);
    let answer: serde_json::Value = serde_json::from_str(&printed).expect("one object");
    assert_eq!((code, &answer["ended"]), (Some(0), &false.into()), "{printed}{logged}");
    let (code, _, logged) = generate("configs/quickstart.yaml", &[]);
    assert!(code == Some(2) && logged.contains("task vla_flow: its models do not generate text"), "{logged}");
    let (code, _, logged) = generate("configs/sft.yaml", &["--image", "nowhere.png"]);
    assert!(code == Some(3) && logged.contains("prompt 1: nowhere.png: cannot be read"), "{logged}");
}

#[test]
fn workers_killed_three_times_leave_the_undisturbed_adapter() {
    killed::three_times(command, ADAPTER);
}

#[test]
fn predicted_memory_of_chats_is_what_is_measured() {
    let dir = tempfile::tempdir().expect("a directory");
    let variants: [&[&str]; 5] = [
        &["train.recompute=full"],
        &["train.recompute=none", "train.micro_batch=4"],
        &["train.recompute=selective", "train.micro_batch=2", "model.weights_dtype=bfloat16"],
        &["lora.targets=[q_proj, v_proj]", "train.micro_batch=8", "train.recompute=none"],
        &["train.recompute={every: 2}", "model.train=['.*layers\\.1\\..*mlp.*']", "lora.targets=[q_proj]"],
    ];
    for (number, variant) in variants.into_iter().enumerate() {
        let output = dir.path().join(number.to_string());
        let common =
            ["train.steps=4", "train.checkpoint_every=0", "eval.samples=0", "optimizer.warmup_steps=1"];
        let (status, printed) = CoxProcess::of(command(&output, &[&common[..], variant].concat())).finish();
        assert!(status.success(), "{printed}");
        let memory = &read_json(&output.join("summary.json"))["memory"];
        let [predicted, measured] =
            ["predicted", "measured"].map(|which| memory[which].as_f64().expect("a world of two has both"));
        println!("{variant:?}: {predicted} predicted, {measured} measured");
        let off = (predicted - measured).abs();
        assert!(off <= (0.03 * measured).max(8.0 * 1024.0 * 1024.0), "{variant:?}\n{memory:#}");
    }
}

#[test]
fn a_chat_that_cannot_be_used_is_refused_before_the_first_step_or_left_out() {
    let dir = tempfile::tempdir().expect("a directory");
    let assets = root().join("configs/assets/shapes");
    let text = std::fs::read_to_string(assets.join("chats.jsonl")).expect("it ships");
    let write = |name: &str, text: &str| -> PathBuf {
        let path = dir.path().join(name);
        std::fs::write(&path, text).expect("a file");
        path
    };
    let images = format!("data.images={}", assets.display());
    let silent = write(
        "silent.jsonl",
        &(text.clone() + "{\"messages\": [{\"role\": \"user\", \"content\": \"x\"}]}\n"),
    );
    let output = dir.path().join("silent");
    let data = format!("data.path={}", silent.display());
    let (status, printed) = CoxProcess::of(command(&output, &[&data, &images])).finish();
    assert_eq!(status.code(), Some(3), "{printed}");
    assert!(printed.contains("silent.jsonl:241: has no assistant turn"), "{printed}");
    assert!(!printed.contains("step      1/"), "{printed}");

    // An image that does not decode shows when its chat is read: that of the first one at the launch.
    write("bad.png", "\u{89}PNG");
    let bad = dir.path().join("bad.png").display().to_string();
    let run_with_bad_image_in = |line: usize| {
        let mut lines: Vec<String> = text.lines().map(str::to_owned).collect();
        let chat = &mut lines[line - 1];
        let start = chat.find("images/").expect("it has a picture");
        let end = start + chat[start..].find(".png").expect("it has a picture") + 4;
        chat.replace_range(start..end, &bad);
        let broken = write("broken.jsonl", &(lines.join("\n") + "\n"));
        let output = dir.path().join(format!("broken-{line}"));
        let data = format!("data.path={}", broken.display());
        let short = [
            "train.epochs=1",
            "train.steps=",
            "eval.samples=0",
            "train.checkpoint_every=0",
            "train.recompute=none",
        ];
        CoxProcess::of(command(&output, &[&[data.as_str(), &images], &short[..]].concat())).finish()
    };
    let (status, printed) = run_with_bad_image_in(1);
    assert_eq!(status.code(), Some(3), "{printed}");
    assert!(printed.contains("broken.jsonl:1: ") && printed.contains("neither PNG nor JPEG"), "{printed}");
    let (status, printed) = run_with_bad_image_in(2);
    assert!(status.success(), "{printed}");
    assert!(printed.contains("broken.jsonl:2: "), "{printed}");
}

#[test]
fn chats_that_are_cut_train_and_a_set_of_pictures_that_no_reader_has_is_refused_before_anything_starts() {
    let dir = tempfile::tempdir().expect("a directory");
    let short = ["train.steps=2", "eval.samples=0", "train.checkpoint_every=0", "optimizer.warmup_steps=1"];
    let output = dir.path().join("cut");
    let cut = [&["data.max_tokens=32"][..], &short].concat();
    let (status, printed) = CoxProcess::of(command(&output, &cut)).finish();
    assert_eq!(status.code(), Some(0), "{printed}");
    assert!(printed.contains("2 of 2 steps"), "{printed}");

    let assets = root().join("configs/assets/shapes");
    let images = dir.path().join("images");
    std::fs::create_dir(&images).expect("a directory");
    for image in std::fs::read_dir(assets.join("images")).expect("it ships").flatten() {
        std::fs::write(images.join(image.file_name()), b"RIFF\x1a\0\0\0WEBPVP8L").expect("a file");
    }
    let data = format!("data.path={}", assets.join("chats.jsonl").display());
    let images = format!("data.images={}", dir.path().display());
    let output = dir.path().join("webp");
    let (status, printed) =
        CoxProcess::of(command(&output, &[&[data.as_str(), &images], &short[..]].concat())).finish();
    assert_eq!(status.code(), Some(3), "{printed}");
    assert!(printed.contains("the image is WebP; convert it to PNG or JPEG"), "{printed}");
    assert!(!output.exists(), "{printed}");
}
