//! Numbers of a run file over their whole type: whatever is asked of `cox plan` and `cox check`, they answer,
//! or refuse it in a located line, within a bound on time and memory.
//!
//! A process of its own, so that the memory of its children is that of these commands. Draws follow from a
//! seed;
//! `COX_BOUNDS_SEED` takes another one, `COX_BOUNDS_DRAWS` more draws.

use std::{
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use coxswain_proto::{
    config::bounds,
    rng::{Key, Purpose},
};
use nix::sys::resource::{UsageWho, getrusage};

/// Of a command in a build without optimization, on a machine that does something else as well; a release
/// takes a tenth of it.
const TIME: Duration = Duration::from_secs(20);
/// Of a command, in KiB.
const MEMORY: i64 = 256 << 10;
/// Draws in a test run.
const DRAWS: u64 = 48;

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

fn draw(seed: u64, number: u64) -> Draw {
    let mut draws = Key { seed, purpose: Purpose::Order, step: 0, sample: number, repeat: 0 }.draws();
    let (task, file) = FILES[(draws.word() % FILES.len() as u64) as usize];
    let tasks = coxswain::standard();
    let schema = tasks.cpu.iter().map(|of| of.schema()).find(|schema| schema.name == task);
    let own = schema.expect("each file names a task that there is").bounds;
    let keys: Vec<_> = bounds::ENGINE.iter().chain(own).collect();
    let (key, least, most) = keys[(draws.word() % keys.len() as u64) as usize];
    let value = value(*least, *most, draws.word());
    let change = match *key {
        "optimizer.betas" => format!("{key}=[{value}, {value}]"),
        "data.holdout_episodes"
        | "train.skip_steps"
        | "data.episodes"
        | "extractor.layers"
        | "lora.layers_to_transform" => format!("{key}=[{value}]"),
        "lora.rank_pattern" | "lora.alpha_pattern" => format!("{key}={{q_proj: {value}}}"),
        _ => format!("{key}={value}"),
    };
    Draw { file, change }
}

/// What is wrong with how it ended, if something is.
fn trouble(command: &str, Draw { file, change }: &Draw, dir: &std::path::Path) -> Option<String> {
    let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("a workspace");
    let output = format!("run.output_dir={}", dir.join("run").display());
    let begin = Instant::now();
    let answer = Command::new("timeout")
        .arg(format!("{}", TIME.as_secs()))
        .arg(env!("CARGO_BIN_EXE_cox"))
        .args([command, file, change, &output])
        .env("XDG_CACHE_HOME", dir)
        .current_dir(root)
        .stdin(Stdio::null())
        .output()
        .expect("cox was built");
    let told = String::from_utf8_lossy(&answer.stderr).into_owned();
    let key = change.split('=').next().unwrap_or_default();
    let section = key.split('.').next().unwrap_or_default();
    let how = match answer.status.code() {
        Some(0) => None,
        Some(2 | 3 | 5) if told.contains("error: ") && told.contains(section) => None,
        Some(5) if told.contains("does not fit") => None,
        how => Some(format!("ended with {how:?} after {:.1} s: {told}", begin.elapsed().as_secs_f64())),
    };
    let largest = getrusage(UsageWho::RUSAGE_CHILDREN).expect("Linux").max_rss();
    how.or_else(|| (largest > MEMORY).then(|| format!("{} MiB", largest >> 10)))
}

#[test]
fn every_number_over_its_whole_type_is_taken_or_refused_at_its_place() {
    let seed = variable("COX_BOUNDS_SEED", 35);
    println!("seed {seed}");
    let dir = tempfile::tempdir().expect("a directory");
    for number in 0..variable("COX_BOUNDS_DRAWS", DRAWS) {
        let drawn = draw(seed, number);
        for command in ["plan", "check"] {
            let trouble = trouble(command, &drawn, dir.path());
            assert!(trouble.is_none(), "cox {command} {} {}: {trouble:?}", drawn.file, drawn.change);
        }
    }
}
