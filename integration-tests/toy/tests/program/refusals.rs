//! What bad input gets: one clear line, and nothing half-written.

use std::{
    collections::BTreeMap,
    fs,
    net::TcpListener,
    path::{Path, PathBuf},
    process::Command,
};

use nix::sys::signal::Signal;

use crate::{
    processes::signal,
    support::{Toy, read_json, refused},
};

#[test]
fn an_unknown_task_is_told_with_those_that_there_are() {
    let toy = Toy::new(20);
    let (code, printed) = refused(toy.command("run", &["task.type=regresion"]));
    assert_eq!(code, Some(2), "{printed}");
    assert!(printed.contains("`regresion` is not one of `vla_flow`, "), "{printed}");
    assert!(printed.contains("did you mean `regression`?"), "{printed}");
    assert!(!toy.path("run").exists());
}

#[test]
fn a_key_of_another_task_is_told_with_its_task() {
    let toy = Toy::new(20);
    let (code, printed) = refused(toy.command("run", &["lora.rank=8"]));
    assert_eq!(code, Some(2), "{printed}");
    let message = "is a key of the task `vla_flow`, but the task of this file is `regression`";
    assert!(printed.contains("lora") && printed.contains(message), "{printed}");
    assert!(!toy.path("run").exists());
}

#[test]
fn the_tasks_own_rules_are_located_and_have_a_remedy() {
    let toy = Toy::new(20);
    let (code, printed) =
        refused(toy.command("run", &["network.width=0", "cache.mode=exact", "data.target=b"]));
    assert_eq!(code, Some(2), "{printed}");
    for message in ["network.width", "cache.mode", "data.target", "predict another column"] {
        assert!(printed.contains(message), "{message}: {printed}");
    }
}

#[test]
fn a_column_that_is_not_there_is_told_with_those_that_are() {
    let toy = Toy::new(20);
    let (code, printed) = refused(toy.command("run", &["data.target=z"]));
    assert_eq!(code, Some(3), "{printed}");
    assert!(printed.contains("no such column; name one of a, b, c, y"), "{printed}");
}

#[test]
fn a_run_directory_of_another_task_is_refused_and_left_as_it_is() {
    let toy = Toy::new(60);
    toy.train("run", &["train.steps=2", "train.global_batch=8", "train.micro_batch=4"]);
    let manifest = std::fs::read(toy.path("run/manifest.json")).expect("it has run");
    let mut other = toy.cox(&["run", "configs/quickstart.yaml", "train.steps=4"]);
    other.arg(format!("run.output_dir={}", toy.path("run").display()));
    let (code, printed) = refused(other);
    assert!(code.is_some_and(|code| code != 0), "{printed}");
    assert!(printed.contains("task.type (\"regression\" there, \"vla_flow\" here)"), "{printed}");
    assert_eq!(std::fs::read(toy.path("run/manifest.json")).ok(), Some(manifest));
}

/// Every file below a directory, with its bytes; directories have none.
fn contents(dir: &Path) -> BTreeMap<PathBuf, Option<Vec<u8>>> {
    let mut found = BTreeMap::new();
    let mut open = vec![dir.to_owned()];
    while let Some(dir) = open.pop() {
        for entry in fs::read_dir(&dir).expect("a directory") {
            let path = entry.expect("an entry").path();
            let bytes = path.is_file().then(|| fs::read(&path).expect("a file"));
            if path.is_dir() {
                open.push(path.clone());
            }
            found.insert(path, bytes);
        }
    }
    found
}

/// Two directories have the same files, with the same bytes.
fn assert_same(
    after: &BTreeMap<PathBuf, Option<Vec<u8>>>,
    before: &BTreeMap<PathBuf, Option<Vec<u8>>>,
    what: &str,
) {
    assert_eq!(after.keys().collect::<Vec<_>>(), before.keys().collect::<Vec<_>>(), "{what}");
    let changed: Vec<_> = after.iter().filter(|(path, bytes)| before[*path] != **bytes).collect();
    assert!(changed.is_empty(), "{what}: {:?}", changed.iter().map(|(path, _)| path).collect::<Vec<_>>());
}

/// What a command printed that is to end with this code, and to say this.
fn refused_with(command: Command, code: i32, expected: &str, what: &str) -> String {
    let (found, printed) = refused(command);
    assert_eq!(found, Some(code), "{what}: {printed}");
    assert!(printed.contains(expected), "{what}: {printed}");
    printed
}

/// The last line with `text` in it.
fn line_with<'a>(text: &str, printed: &'a str) -> Option<&'a str> {
    printed.lines().rfind(|line| line.contains(text))
}

const SHORT: [&str; 4] =
    ["train.steps=6", "train.checkpoint_every=2", "optimizer.warmup_steps=2", "eval.samples=4"];

/// What a launch of a finished run is refused for: the change, the exit code, and a part of the message.
const REFUSALS: [(&[&str], i32, &str); 22] = [
    (&["train.steps=5"], 2, "train.steps is 5, but"),
    (&["train.steps=", "train.epochs=0"], 2, "train.epochs"),
    (&["train.steps=1e3"], 2, "train.steps"),
    (&["train.steps=2000000000000"], 2, "must be at most 1000000000000"),
    (&["run.seed=4"], 2, "run.seed (3 there, 4 here)"),
    (&["network.width=16"], 2, "network.width (32 there, 16 here)"),
    (&["network.width=18446744073709551615"], 2, "must be at most 65536"),
    (&["data.inputs=[a, b]"], 2, "data.inputs"),
    (&["data.target=z"], 2, "data.target"),
    (&["train.global_batch=32"], 2, "train.global_batch (64 there, 32 here)"),
    (&["optimizer.betas=[0.9, 0.99]"], 2, "optimizer.betas"),
    (&["data.path=/nowhere.parquet"], 3, "/nowhere.parquet"),
    (&["task.type=sft"], 2, "model"),
    (&["train.resume=false", "run.seed=4"], 2, "run.seed (3 there, 4 here)"),
    (&["launch.device=cuda"], 2, "cuda"),
    (&["launch.listen=somewhere"], 2, "launch.listen"),
    (&["cache.mode=exact"], 2, "cache.mode"),
    (&["train.mico_batch=3"], 2, "train.micro_batch"),
    (&["memory.capacity=1000"], 5, "does not fit"),
    (&["--nnodes=2"], 2, "--rdzv-endpoint"),
    (&["--spares=2"], 2, "--spares"),
    (&["--nproc-per-node=65"], 2, "train.global_batch"),
];

#[test]
fn a_launch_that_is_refused_changes_no_byte_of_the_run() {
    let toy = Toy::new(500);
    toy.train("run", &SHORT);
    let before = contents(&toy.path("run"));
    let left_as_it_is = |command: Command, code: i32, expected: &str, what: &str| {
        let printed = refused_with(command, code, expected, what);
        assert_same(&contents(&toy.path("run")), &before, what);
        printed
    };
    for (change, code, expected) in REFUSALS {
        let overrides = [&SHORT[..], change].concat();
        let told = left_as_it_is(toy.command("run", &overrides), code, expected, &format!("{change:?}"));
        // What a flag of the launch asks for is not the run file's to check.
        if change.iter().any(|given| given.starts_with("--")) {
            continue;
        }
        let checked =
            left_as_it_is(toy.check("run", &overrides), code, expected, &format!("check {change:?}"));
        assert_eq!(line_with(expected, &checked), line_with(expected, &told), "{change:?}");
    }
    let overrides = [&SHORT[..], &["--new-journal"]].concat();
    left_as_it_is(
        toy.command("run", &overrides),
        2,
        "is intact: start again without --new-journal",
        "journal",
    );
    for mut command in [toy.command("run", &SHORT), toy.check("run", &SHORT)] {
        command.env("COX_DATA_PORT", "99999");
        left_as_it_is(command, 2, "COX_DATA_PORT 99999: ", "a port that there is not");
    }

    // Another data set of the same shape.
    fs::copy(Toy::new(400).path("table.parquet"), toy.path("other.parquet")).expect("a file");
    let other = format!("data.path={}", toy.path("other.parquet").display());
    let overrides = [&SHORT[..], &[&other]].concat();
    let expected = "not the data set that this run has trained on";
    left_as_it_is(toy.command("run", &overrides), 3, expected, "other data");
    left_as_it_is(toy.check("run", &overrides), 3, expected, "check other data");

    // A port that another program has.
    let taken = TcpListener::bind("127.0.0.1:0").expect("a port");
    let listen = format!("launch.listen={}", taken.local_addr().expect("an address"));
    let overrides = [&SHORT[..], &[&listen]].concat();
    let expected = "the port is in use; choose another with launch.listen or --rdzv-endpoint";
    let told = left_as_it_is(toy.command("run", &overrides), 6, expected, "port");
    let checked = left_as_it_is(toy.check("run", &overrides), 6, expected, "check port");
    assert_eq!(line_with(expected, &checked), line_with(expected, &told));

    let mut strangers = toy.command("run", &[&SHORT[..], &["--rdzv-endpoint=0.0.0.0:0"]].concat());
    strangers.env_remove("COX_TOKEN").env_remove("COX_TOKEN_FILE");
    left_as_it_is(strangers, 2, "COX_TOKEN", "without a token");
    let mut short = toy.command("run", &SHORT);
    short.env("COX_TOKEN", "short");
    left_as_it_is(short, 2, "COX_TOKEN", "a short token");
}

#[test]
fn a_run_whose_records_are_damaged_or_anothers_is_left_as_it_is() {
    let toy = Toy::new(500);
    toy.train("run", &SHORT);
    let journal = toy.path("run/coordinator/journal.redb");
    let sound = fs::read(&journal).expect("a journal");
    fs::write(&journal, &sound[..sound.len() / 2]).expect("a file");
    let before = contents(&toy.path("run"));
    let (code, printed) = refused(toy.command("run", &SHORT));
    assert_eq!(code, Some(2), "{printed}");
    assert!(printed.contains("the journal in"), "{printed}");
    assert!(contents(&toy.path("run")) == before, "{printed}");
    fs::remove_file(&journal).expect("a file");
    // Checkpoints of a run with another seed.
    let before = contents(&toy.path("run"));
    let (code, printed) = refused(toy.command("run", &[&SHORT[..], &["run.seed=4"]].concat()));
    assert_eq!(code, Some(2), "{printed}");
    assert!(printed.contains("was written by a run with another specification"), "{printed}");
    assert!(contents(&toy.path("run")) == before, "{printed}");
}

#[test]
fn checkpoints_of_a_format_that_is_not_known_are_refused_and_left_as_they_are() {
    let toy = Toy::new(500);
    toy.train("run", &SHORT);
    let manifest = toy.path("run/checkpoints/step-00000006/manifest.json");
    let mut facts = read_json(&manifest);
    facts["format"] = 99.into();
    fs::write(&manifest, facts.to_string()).expect("a file");
    let before = contents(&toy.path("run"));
    for command in [toy.command("run", &SHORT), toy.check("run", &SHORT)] {
        refused_with(command, 2, "format 99 is unknown to this version", "format");
        assert_same(&contents(&toy.path("run")), &before, "format");
    }
}

#[test]
fn a_second_launcher_beside_a_living_run_changes_nothing_of_it() {
    let toy = Toy::new(500);
    toy.train("undisturbed", &SHORT);
    let held = toy.hold(0, "forward", 3);
    let mut running = toy.start("run", &SHORT);
    running.wait_until_held(&held);
    // What the living run writes meanwhile is its own.
    let of_launches = || {
        let mut found = contents(&toy.path("run"));
        let is_growing = |path: &PathBuf| {
            let own = ["coordinator", "tensorboard", "checkpoints"].map(|name| toy.path("run").join(name));
            own.iter().any(|dir| path.starts_with(dir)) || path.extension().is_some_and(|end| end == "log")
        };
        found.retain(|path, _| !is_growing(path));
        found
    };
    let before = of_launches();
    for command in [toy.command("run", &SHORT), toy.check("run", &SHORT)] {
        let (code, printed) = refused(command);
        assert!(code.is_some_and(|code| code != 0), "{printed}");
        assert_same(&of_launches(), &before, &printed);
    }
    fs::remove_file(held).expect("it is held");
    let (status, printed) = running.finish();
    assert!(status.success(), "{printed}");
    assert!(toy.network("run") == toy.network("undisturbed"), "{printed}");
}

#[test]
fn a_run_that_has_lost_its_checkpoints_is_told_so_by_check_and_by_run() {
    let toy = Toy::new(500);
    toy.train("run", &SHORT);
    fs::remove_dir_all(toy.path("run/checkpoints")).expect("it has left some");
    let expected =
        "recorded steps: 6, but there is no checkpoint, so the run starts over; restore checkpoints/";
    let (code, printed) = refused(toy.check("run", &[&SHORT[..], &["train.resume=false"]].concat()));
    assert_eq!(code, Some(0), "{printed}");
    assert!(!printed.contains("recorded steps"), "it is meant so: {printed}");
    for command in [toy.check("run", &SHORT), toy.command("run", &SHORT)] {
        refused_with(command, 0, expected, "without checkpoints");
    }
    // They are there again.
    let (code, printed) = refused(toy.check("run", &SHORT));
    assert!(code == Some(0) && !printed.contains("recorded steps"), "{printed}");
}

#[test]
fn a_damaged_checkpoint_is_told_by_check_and_by_run_and_no_run_starts_where_all_are() {
    let toy = Toy::new(500);
    toy.train("run", &SHORT);
    let all = fs::read_dir(toy.path("run/checkpoints")).expect("it has left some");
    let files = all.map(|entry| entry.expect("an entry").path().join("trainables.safetensors"));
    for file in files.filter(|file| file.exists()).collect::<Vec<_>>() {
        let sound = fs::read(&file).expect("a checkpoint");
        fs::write(&file, &sound[..sound.len() - 1]).expect("a file");
        fs::write(file.with_extension("whole"), sound).expect("a file");
    }
    let before = contents(&toy.path("run"));
    for command in [toy.check("run", &SHORT), toy.command("run", &SHORT)] {
        let told = refused_with(command, 3, "every checkpoint is damaged", "all are damaged");
        let line = line_with("every checkpoint is damaged", &told).unwrap_or_default();
        for part in ["step-00000006 (trainables", "step-00000004 (trainables", "train.resume=false"] {
            assert!(line.contains(part), "{part}: {told}");
        }
        assert_same(&contents(&toy.path("run")), &before, "all are damaged");
    }
    let run = toy.path("run").display().to_string();
    refused_with(toy.cox(&["export", &run]), 3, "is damaged: ", "an export");
    let older = toy.path("run/checkpoints/step-00000004/trainables.safetensors");
    fs::rename(older.with_extension("whole"), older).expect("a file");
    let longer = [&SHORT[..], &["train.steps=8"]].concat();
    for command in [toy.check("run", &longer), toy.command("run", &longer)] {
        let told = refused_with(
            command,
            0,
            "damaged checkpoints: checkpoints/step-00000006 (trainables",
            "one is damaged",
        );
        assert!(told.contains("the run continues from step 4"), "{told}");
    }
}

#[test]
fn a_directory_in_which_nothing_has_begun_is_not_made_by_a_refusal() {
    let toy = Toy::new(60);
    for (change, code) in [
        (&["data.path=/nowhere.parquet"][..], 3),
        (&["data.target=z"], 3),
        (&["launch.device=cuda"], 2),
        (&["memory.capacity=1000"], 5),
    ] {
        let (found, printed) = refused(toy.command("new", change));
        assert_eq!(found, Some(code), "{change:?}: {printed}");
        assert!(!toy.path("new").exists(), "{change:?}: {printed}");
    }
}

#[test]
fn the_status_of_a_run_that_is_over_is_told_from_its_directory() {
    let toy = Toy::new(500);
    toy.train("run", &SHORT);
    let output = toy.path("run").display().to_string();
    let (code, told) = refused(toy.cox(&["status", "--run", &output]));
    assert_eq!(code, Some(0), "{told}");
    assert!(told.contains("finished") && told.contains("6 of 6"), "{told}");
    let (code, told) = refused(toy.cox(&["status", "--json", "--run", &output]));
    assert_eq!(code, Some(0), "{told}");
    let facts: serde_json::Value = serde_json::from_str(&told).expect("one JSON object");
    assert_eq!((&facts["state"], &facts["steps"]), (&"finished".into(), &6.into()), "{facts:#}");
    let (code, told) = refused(toy.cox(&["status", "--run", &toy.path("none").display().to_string()]));
    assert_eq!(code, Some(8), "{told}");
    // A directory is enough.
    for command in [["status", output.as_str()], ["runs", output.as_str()]] {
        let told = refused_with(toy.cox(&command), 0, "6 of 6", command[0]);
        assert!(told.contains("finished"), "{command:?}: {told}");
    }
    fs::write(toy.path("run/run.json"), "").expect("a file");
    refused_with(
        toy.cox(&["diff", &output, &output]),
        3,
        "run.json: not valid JSON; it may be truncated",
        "an empty file",
    );
}

#[test]
fn a_signal_to_a_run_that_is_well_leaves_no_failure() {
    let toy = Toy::new(500);
    let held = toy.hold(0, "forward", 3);
    // Longer than the signal takes.
    let mut running =
        toy.start("run", &[&SHORT[..], &["train.steps=10000000", "train.checkpoint_every=0"]].concat());
    running.wait_until_held(&held);
    signal(running.pid() as i32, Signal::SIGINT);
    fs::remove_file(held).expect("it is held");
    let (status, printed) = running.finish();
    assert_eq!(status.code(), Some(130), "{printed}");
    assert!(!toy.path("run/failure.json").exists(), "{printed}");
}

#[test]
fn results_that_cannot_be_written_are_the_cause_of_the_end_and_not_a_rank_that_is_gone() {
    let toy = Toy::new(500);
    // Nothing can be written over a directory that is not empty.
    fs::create_dir_all(toy.path("run/summary.json/taken")).expect("a directory");
    let flags = ["--nproc-per-node=2", "--max-restarts=0"];
    let (code, printed) = refused(toy.command("run", &[&SHORT[..], &flags].concat()));
    assert_eq!(code, Some(4), "{printed}");
    let cause = printed.lines().find(|line| line.contains("first cause")).expect("a first cause");
    assert!(cause.contains("summary.json"), "{printed}");
}

#[test]
fn an_answer_that_a_full_disk_swallows_is_no_success() {
    let toy = Toy::new(500);
    for (place, code) in [("/dev/full", Some(1)), ("/dev/null", Some(0))] {
        let mut command = toy.check("new", &[]);
        let place = fs::OpenOptions::new().write(true).open(place).expect("Linux has it");
        let ended = command.stdout(place).output().expect("cox-toy was built");
        assert_eq!(ended.status.code(), code, "{}", String::from_utf8_lossy(&ended.stderr));
    }
    toy.train("run", &SHORT);
    let full = fs::OpenOptions::new().write(true).open("/dev/full").expect("Linux has it");
    let mut audit = toy.cox(&["audit", "--json"]);
    let ended = audit.arg(toy.path("run")).stdout(full).output().expect("cox-toy was built");
    assert_eq!(ended.status.code(), Some(1), "{}", String::from_utf8_lossy(&ended.stderr));
    // A reader that has seen enough is none that failed.
    let (reader, writer) = std::io::pipe().expect("a pipe");
    drop(reader);
    let ended = toy.check("new", &[]).stdout(writer).output().expect("cox-toy was built");
    assert_eq!(ended.status.code(), Some(0), "{}", String::from_utf8_lossy(&ended.stderr));
}

#[test]
fn a_run_that_has_learned_nothing_is_no_success_and_says_why() {
    let toy = Toy::without_numbers(500);
    // Each sample that fails on a rank and on the next costs a restart, of which there is a limit.
    let few = ["train.steps=3", "train.global_batch=4", "train.micro_batch=2", "eval.samples=0"];
    let few = [&SHORT[..], &few].concat();
    let (code, printed) = refused(toy.command("run", &few));
    assert_eq!(code, Some(3), "{printed}");
    assert!(
        printed.contains("all samples of all 3 steps were left out, so nothing was learned"),
        "{printed}"
    );
    assert!(printed.contains("no finite number; correct the row"), "{printed}");
    assert!(!toy.path("run/network.safetensors").exists(), "{printed}");
}

#[test]
fn too_many_bad_rows_end_a_run_though_each_begins_a_generation() {
    let toy = Toy::with_gaps(36);
    let short = ["train.steps=9", "train.global_batch=4", "train.micro_batch=2", "eval.samples=0"];
    let whole = ["data.holdout_every=0", "optimizer.warmup_steps=2"];
    let (code, printed) = refused(toy.command("run", &[&short[..], &whole].concat()));
    assert_eq!(code, Some(3), "{printed}");
    assert!(printed.contains("of the last 36 samples, 12 were left out"), "{printed}");
    assert!(printed.contains("train.max_left_out allows 5.0 %"), "{printed}");
}

#[test]
fn the_directory_of_a_run_stands_for_what_ran_in_it() {
    let toy = Toy::new(500);
    toy.train("run", &SHORT);
    let dir = toy.path("run").display().to_string();
    let (code, printed) = refused(toy.cox(&["run", &dir, "train.steps=8"]));
    assert_eq!(code, Some(0), "{printed}");
    assert!(printed.contains("8 of 8 steps"), "{printed}");
    let (code, printed) = refused(toy.cox(&["run", "configs"]));
    assert_eq!(code, Some(2), "{printed}");
    assert!(printed.contains("configs: not the output directory of a run"), "{printed}");
    let swapped = toy.cox(&["run", "train.steps=8", "integration-tests/toy/table.yaml"]);
    refused_with(swapped, 2, "train.steps=8 is an override; give the run file before it", "another order");
    // What takes a directory alone says which is a run file's.
    let file = "integration-tests/toy/table.yaml";
    for command in [&["eval", file][..], &["export", file], &["report", file], &["diff", file, file]] {
        let (code, printed) = refused(toy.cox(command));
        assert_eq!(code, Some(2), "{printed}");
        assert!(
            printed.contains("it is a run file: name its run.output_dir, runs/"),
            "{command:?}: {printed}"
        );
    }
}
