//! Keys of a run file over their whole type, and beyond it: whatever is asked of `cox plan` and `cox check`,
//! they answer, or refuse it in a located line, within a bound on time and memory.
//!
//! A process of its own, so that time and memory of its children are those of these commands. Draws follow
//! from a seed; `COX_BOUNDS_SEED` takes another one, `COX_BOUNDS_DRAWS` more of them for each key, and
//! `COX_BOUNDS_SECONDS` another bound on time.

use std::{
    fs,
    path::Path,
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use coxswain_proto::{
    config::bounds,
    rng::{Key, Purpose},
};
use nix::sys::{
    resource::{UsageWho, getrusage},
    time::TimeValLike,
};
use serde_json::Value;

/// The most that a command may take, in seconds of the processor's time, as what else the machine does is no
/// fault of it. These crates take several times that of a release where they are hardly optimized.
const SECONDS: u64 = if cfg!(debug_assertions) { 10 } else { 2 };
/// After which a command that waits is given up.
const PATIENCE: Duration = Duration::from_secs(60);
/// The most memory that a command may take, in KiB.
const MEMORY: i64 = 256 << 10;
/// The most text that a command may write: nobody reads more.
const TEXT: usize = 64 << 10;
/// Characters of a long word, and items of a long list.
const MANY: usize = 4096;

/// Run files of the tasks, small enough to be looked at in a fraction of a second.
const FILES: [(&str, &str); 5] = [
    ("vla_flow", "configs/quickstart.yaml"),
    ("sft", "configs/sft.yaml"),
    ("seq2seq", "configs/seq2seq.yaml"),
    ("trajectory", "configs/trajectory.yaml"),
    ("separation", "configs/separation.yaml"),
];

/// One key, and what is asked of it.
struct Draw {
    file: &'static str,
    change: String,
}

fn variable(name: &str, otherwise: u64) -> u64 {
    std::env::var(name).ok().and_then(|text| text.parse().ok()).unwrap_or(otherwise)
}

/// A number between the bounds, at one of them, beyond them, or no number of that kind at all.
fn value(least: f64, most: f64, bits: u64) -> String {
    let part = (bits >> 8) as f64 / (1u64 << 56) as f64;
    let most = most.min(u64::MAX as f64);
    match bits % 8 {
        0 | 1 => format!("{}", most as u64),
        2 => format!("{}", (least.max(1e-3) * (most / least.max(1e-3)).powf(part)) as u64),
        3 => format!("{:e}", least.max(1e-9) * (most / least.max(1e-9)).powf(part)),
        4 => format!("{}", bits >> (bits % 61)),
        5 => format!("{}", u64::MAX - (bits >> 60)),
        6 => ["-1", "0", ".nan", ".inf", "1e308", "-9223372036854775808", "1e400", "0x7fffffff"]
            [(bits >> 8) as usize % 8]
            .to_owned(),
        _ => format!("{}", least as u64),
    }
}

/// A value that is of no use to a key that takes words, lists or mappings.
fn no_word(bits: u64) -> String {
    match bits % 7 {
        0 => "\"\"".to_owned(),
        1 => "[]".to_owned(),
        2 => "{}".to_owned(),
        3 => "x".repeat(MANY),
        4 => format!("[{}]", vec!["x"; MANY].join(",")),
        5 => "true".to_owned(),
        _ => "1e308".to_owned(),
    }
}

/// The keys of the schema that take no number, all tasks' together.
fn keys_without_numbers(of: &Value, path: &str, found: &mut Vec<String>) {
    for (name, key) in of["properties"].as_object().into_iter().flatten() {
        let path = if path.is_empty() { name.clone() } else { format!("{path}.{name}") };
        let types = key["type"].to_string();
        match key["properties"].is_object() {
            true => keys_without_numbers(key, &path, found),
            false if types.contains("integer") || types.contains("number") => {}
            false => found.push(path),
        }
    }
}

/// A value for every key of every task, the engine's in the file of a task that is drawn, too.
fn draws(seed: u64, round: u64) -> Vec<Draw> {
    let mut words = Key { seed, purpose: Purpose::Order, step: 0, sample: round, repeat: 0 }.draws();
    let tasks = coxswain::standard();
    let mut drawn = Vec::new();
    for (key, least, most) in bounds::ENGINE {
        let (_, file) = FILES[(words.word() % FILES.len() as u64) as usize];
        drawn.push(Draw { file, change: change(key, &value(*least, *most, words.word())) });
    }
    for (task, file) in FILES {
        let schema = tasks.cpu.iter().map(|of| of.schema()).find(|schema| schema.name == task);
        for (key, least, most) in schema.expect("each file names a task that there is").bounds {
            drawn.push(Draw { file, change: change(key, &value(*least, *most, words.word())) });
        }
    }
    let schema = fs::read(root().join("docs/reference/run-file.schema.json")).expect("it is written");
    let mut keys = Vec::new();
    keys_without_numbers(&serde_json::from_slice(&schema).expect("a schema"), "", &mut keys);
    assert!(keys.len() > 60, "{keys:?}");
    for key in keys {
        // A key of another task is refused as such.
        let (_, file) = FILES[(words.word() % FILES.len() as u64) as usize];
        drawn.push(Draw { file, change: format!("{key}={}", no_word(words.word())) });
    }
    drawn
}

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("a workspace")
}

/// The override that gives a key the value, in the shape that the key has.
fn change(key: &str, value: &str) -> String {
    match key {
        "optimizer.betas" => format!("{key}=[{value}, {value}]"),
        "data.holdout_episodes"
        | "train.skip_steps"
        | "data.episodes"
        | "extractor.layers"
        | "lora.layers_to_transform" => format!("{key}=[{value}]"),
        "lora.rank_pattern" | "lora.alpha_pattern" => format!("{key}={{q_proj: {value}}}"),
        _ => format!("{key}={value}"),
    }
}

/// What children have taken of the processor so far.
fn processor_time() -> Duration {
    let usage = getrusage(UsageWho::RUSAGE_CHILDREN).expect("Linux");
    let micros = usage.user_time().num_microseconds() + usage.system_time().num_microseconds();
    Duration::from_micros(micros.unsigned_abs())
}

/// The largest that commands have taken so far.
struct Worst {
    time: (Duration, String),
    /// In KiB.
    memory: (i64, String),
}

/// What is wrong with how it ended, if something is.
fn trouble(command: &str, Draw { file, change }: &Draw, dir: &Path, worst: &mut Worst) -> Option<String> {
    let output = format!("run.output_dir={}", dir.join("run").display());
    let (begin, before) = (Instant::now(), processor_time());
    let answer = Command::new("timeout")
        .arg(format!("{}", PATIENCE.as_secs()))
        .arg(env!("CARGO_BIN_EXE_cox"))
        .args([command, file, change, &output])
        .env("XDG_CACHE_HOME", dir)
        .current_dir(root())
        .stdin(Stdio::null())
        .output()
        .expect("cox was built");
    let told = String::from_utf8_lossy(&answer.stderr).into_owned();
    let (key, value) = change.split_once('=').unwrap_or_default();
    let taken = processor_time().saturating_sub(before);
    let how = match answer.status.code() {
        _ if told.len() > TEXT => Some(format!("said {} bytes", told.len())),
        Some(0) => None,
        // At the key, at the line that contradicts it, or at the place that it names.
        Some(2 | 3 | 5)
            if told.contains("error: ")
                && [key, *file, value].into_iter().any(|part| told.contains(part)) =>
        {
            None
        }
        Some(5) if told.contains("does not fit") => None,
        // As many workers as are asked for are counted against the samples of a step.
        Some(2) if told.contains("train.global_batch: ") && told.contains("cannot be shared by") => None,
        how => {
            let told: String = told.chars().take(400).collect();
            Some(format!("ended with {how:?} after {:.1} s: {told}", begin.elapsed().as_secs_f64()))
        }
    };
    let shown = || format!("cox {command} {file} {}", shortened(change));
    if taken > worst.time.0 {
        worst.time = (taken, shown());
    }
    // The system knows the largest of all children: who has raised it took that much.
    let largest = getrusage(UsageWho::RUSAGE_CHILDREN).expect("Linux").max_rss();
    let is_larger = largest > worst.memory.0;
    if is_larger {
        worst.memory = (largest, shown());
    }
    let most = Duration::from_secs(variable("COX_BOUNDS_SECONDS", SECONDS));
    how.or_else(|| (is_larger && largest > MEMORY).then(|| format!("{} MiB", largest >> 10)))
        .or_else(|| (taken > most).then(|| format!("{:.1} s of the processor's time", taken.as_secs_f64())))
}

/// As much of an override as tells which it is.
fn shortened(change: &str) -> String {
    change.chars().take(60).collect()
}

#[test]
fn every_key_over_its_whole_type_is_taken_or_refused_at_its_place() {
    let seed = variable("COX_BOUNDS_SEED", 35);
    println!("seed {seed}");
    let dir = tempfile::tempdir().expect("a directory");
    let mut troubles = Vec::new();
    let mut worst = Worst { time: (Duration::ZERO, String::new()), memory: (0, String::new()) };
    for round in 0..variable("COX_BOUNDS_DRAWS", 1) {
        for drawn in draws(seed, round) {
            for command in ["plan", "check"] {
                if let Some(trouble) = trouble(command, &drawn, dir.path(), &mut worst) {
                    let change = shortened(&drawn.change);
                    troubles.push(format!("cox {command} {} {change}: {trouble}", drawn.file));
                }
            }
        }
    }
    let Worst { time: (time, slowest), memory: (memory, largest) } = worst;
    println!("at most {:.2} s of the processor's time ({slowest})", time.as_secs_f64());
    println!("at most {} MiB ({largest})", memory >> 10);
    assert!(troubles.is_empty(), "{} troubles:\n{}", troubles.len(), troubles.join("\n"));
}
