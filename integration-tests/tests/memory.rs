//! A worker's memory over a whole run, from its own timeline: it does not grow, and a micro-batch found by
//! trial keeps within bounds.
//!
//! The counting allocator counts for the whole process, so these tests take turns.

use std::{
    alloc::System,
    path::Path,
    sync::{Mutex, MutexGuard, PoisonError},
};

use burn_flex::Flex;
use coxswain_integration_tests::{at_rest, solo};
use coxswain_proto::run_spec::RunSpec;
use coxswain_tasks::vla_flow::{VlaFlow, memory::Subject};
use coxswain_worker::{
    memory::{
        Category, CountingAllocator,
        prediction::{Ask, Place, outcome::Outcome},
    },
    train::{Summary, TaskTrainer, TrainerOptions},
};
use serde_json::Value;

#[global_allocator]
static ALLOCATOR: CountingAllocator<System> = CountingAllocator(System);

static EXCLUSIVE: Mutex<()> = Mutex::new(());

#[expect(clippy::disallowed_methods, reason = "no video is decoded here")]
fn exclusive() -> MutexGuard<'static, ()> {
    // The symbol tables of a failed test's backtrace would stay in memory and count in the tests after it.
    std::panic::set_hook(Box::new(|failure| eprintln!("{failure}")));
    EXCLUSIVE.lock().unwrap_or_else(PoisonError::into_inner)
}

fn spec(output: &Path, overrides: &[String]) -> RunSpec {
    let overrides: Vec<&str> =
        ["eval.samples=0"].into_iter().chain(overrides.iter().map(String::as_str)).collect();
    solo::quickstart(output, &overrides)
}

/// Trains a world of one; returns its summary and the lines of its timeline.
fn train(spec: &RunSpec, first_step: u64) -> (Summary, Vec<Value>) {
    let options = TrainerOptions { device: Default::default(), listener: None };
    let summary = at_rest::train(
        &mut TaskTrainer::<Flex>::new(coxswain_tasks::leaked(VlaFlow::<Flex>::default()), options),
        spec,
        first_step,
    );
    let lines = std::fs::read_to_string(Path::new(&spec.run.output_dir).join("memory/rank-0000.jsonl"));
    let lines = lines.expect("written");
    let lines = lines.lines().map(|line| serde_json::from_str(line).expect("one JSON object a line"));
    (summary, lines.collect())
}

/// Largest bytes in use in a step.
fn peak(line: &Value) -> u64 {
    let phases = line["phases"].as_object().expect("phases by name");
    phases.values().filter_map(|phase| phase["in_use"].as_u64()).max().expect("a step has phases")
}

fn strings(overrides: &[&str]) -> Vec<String> {
    overrides.iter().map(ToString::to_string).collect()
}

#[test]
fn memory_does_not_grow_with_the_number_of_batches() {
    let _exclusive = exclusive();
    let dir = tempfile::tempdir().unwrap();
    let steps = [
        "train.steps=2000",
        "train.global_batch=1",
        "train.micro_batch=1",
        "train.checkpoint_every=0",
        "data.threads=1",
        "data.prefetch=1",
    ];
    let small = ["expert.width=32", "expert.layers=2", "expert.repeated_noise=1"];
    let (_, lines) = train(&spec(&dir.path().join("run"), &strings(&[&steps[..], &small].concat())), 0);
    assert_eq!(lines.len(), 2000);
    // What grows lifts every later step. A sample that is decoded at the moment of a peak lifts that one
    // step, and a maximum would tell of nothing else.
    let median = |lines: &[Value], of: fn(&Value) -> u64| {
        let mut bytes: Vec<u64> = lines.iter().map(of).collect();
        bytes.sort_unstable();
        bytes[bytes.len() / 2] as f64
    };
    let at_rest = |line: &Value| line["in_use"].as_u64().expect("bytes");
    for (what, of) in [("peak", peak as fn(&Value) -> u64), ("memory between steps", at_rest)] {
        let (early, late) = (median(&lines[50..1025], of), median(&lines[1025..], of));
        assert!(late <= 1.001 * early, "the {what} grew from {early} to {late} bytes");
    }
}

#[test]
fn the_micro_batch_found_by_trial_fits_keeps_the_global_batch_and_is_kept_by_checkpoints() {
    let _exclusive = exclusive();
    let dir = tempfile::tempdir().unwrap();
    let run = |name: &str, more: &[&str]| {
        let common = [
            "train.steps=2",
            "train.global_batch=16",
            "train.checkpoint_every=1",
            "train.keep_checkpoints=9",
        ];
        let all = [&common[..], more].concat();
        spec(&dir.path().join(name), &strings(&all))
    };
    let peak_of = |size: u64| {
        let micro_batch = format!("train.micro_batch={size}");
        let (summary, lines) = train(&run(&format!("fixed{size}"), &[&micro_batch]), 0);
        (summary, lines.iter().map(peak).max().expect("steps"))
    };
    let ((_, of_four), (_, of_sixteen)) = (peak_of(4), peak_of(16));
    assert!(
        of_sixteen > of_four + (of_four >> 3),
        "{of_four} and {of_sixteen} bytes are too close to tell apart"
    );

    let (free, lines) = train(&run("free", &["train.auto_micro_batch=true"]), 0);
    assert_eq!(lines[0]["micro_batch"], 16, "this machine has room for a tiny model");

    let capacity = of_four + (of_sixteen - of_four) / 3;
    let bound = format!("memory.capacity={capacity}");
    let bounded = run("bounded", &["train.auto_micro_batch=true", &bound]);
    let (summary, lines) = train(&bounded, 0);
    // Trials run without what is read ahead beside them, so the first step may still overrun, once, and halve
    // what was found.
    let found = lines.last().expect("lines")["micro_batch"].as_u64().expect("a number");
    assert!((4..16).contains(&found), "{found} samples at a time in {capacity} bytes");
    assert!(lines[0]["attempts"].as_u64() <= Some(2), "{}", lines[0]);
    for line in lines.iter().filter(|line| line["attempts"] != 2) {
        assert!(peak(line) <= capacity && line["attempts"] == 1, "{line}");
    }
    assert_eq!(lines.last().expect("lines")["attempts"], 1, "what was found fits from then on");
    for (a, b) in summary.losses.iter().zip(&free.losses) {
        assert!((a - b).abs() <= 1e-5 * a.abs(), "the same samples a step: {a} and {b}");
    }
    let (resumed, lines) = train(&bounded, 1);
    assert_eq!(lines.last().expect("lines")["micro_batch"], found);
    assert_eq!(resumed.losses[0].to_bits(), summary.losses[1].to_bits());
}

#[test]
fn steps_from_kept_features_take_less_by_what_they_skip_as_predicted() {
    let _exclusive = exclusive();
    let dir = tempfile::tempdir().unwrap();
    let overrides = [
        "train.epochs=null",
        "train.steps=80",
        "train.global_batch=16",
        "train.micro_batch=16",
        "train.recompute=none",
        "train.checkpoint_every=0",
        "expert.width=32",
        "expert.layers=2",
        "expert.repeated_noise=1",
        "cache.mode=periodic",
        "cache.interval={steps: 40}",
        "cache.live={steps: 4}",
        "cache.probe_samples=0",
    ];
    let spec = spec(&dir.path().join("run"), &strings(&overrides));
    let (_, lines) = train(&spec, 0);
    let largest = |lines: &[Value]| lines.iter().map(peak).max().expect("steps") as f64;
    // Live steps 40 to 43, without the first, which begins with what cached ones left; an epoch of cached
    // steps has then filled the store.
    let (live, cached) = (largest(&lines[41..44]), largest(&lines[60..80]));

    let threads = std::thread::available_parallelism().map_or(1, usize::from) as u64;
    let subject =
        Subject::from_spec(&spec, coxswain_models::families::shelf()).expect("a run that has just been done");
    let ask = Ask { micro_batch: 16, world: 1, rank: 0, place: Place::Host { threads } };
    let (predicted, outlook) = (subject.predict(ask).peak() as f64, subject.cache(ask).expect("a cache"));
    assert!((predicted / live - 1.0).abs() < 0.1, "{predicted} predicted for live steps, {live} measured");
    let skipped = outlook.live_activations.saturating_sub(outlook.cached_activations) as f64;
    assert!(skipped > 0.05 * live, "{outlook:?} of {live}");
    assert!(live - cached > 0.9 * skipped, "{live} and {cached}: {skipped} less expected, {outlook:?}");
}

#[test]
fn what_is_held_for_kept_features_is_what_was_predicted() {
    let _exclusive = exclusive();
    let dir = tempfile::tempdir().unwrap();
    let common =
        ["data.holdout_episodes=[]", "train.steps=60", "train.global_batch=8", "train.micro_batch=4"];
    let small = ["expert.width=32", "expert.layers=2", "expert.repeated_noise=1", "train.checkpoint_every=0"];
    let periodic = ["cache.interval={steps: 59}", "cache.live={steps: 20}"];
    for mode in ["exact", "periodic"] {
        let mode_key = format!("cache.mode={mode}");
        let all = [&common[..], &small, &periodic, &[&mode_key]].concat();
        let spec = spec(&dir.path().join(mode), &strings(&all));
        let (summary, _) = train(&spec, 0);
        let outcome = summary.memory.expect("a run of its own micro-batch is compared");
        let row = outcome.categories.iter().find(|row| row.category == Category::Cache);
        let row = row.expect("every category is there");
        let counted = row.measured.expect("it can be told apart");
        // What is on its way to the store is over when the run is.
        let subject = Subject::from_spec(&spec, coxswain_models::families::shelf())
            .expect("a run that has just been done");
        let ask = Ask { micro_batch: 4, world: 1, rank: 0, place: Place::Host { threads: 1 } };
        let stored = subject.cache(ask).expect("a cache").store_bytes / subject.outline.frames;
        let on_their_way = if mode == "exact" { 3 * 4 * stored } else { 0 };
        let expected = row.predicted - on_their_way;
        let error = expected as f64 / counted as f64 - 1.0;
        assert!(counted > 0 && error.abs() <= 0.02, "{mode}: {expected} expected, {counted} counted");
    }
}

#[test]
fn features_that_do_not_fit_together_are_computed_in_smaller_batches_and_nothing_else_changes() {
    let _exclusive = exclusive();
    let dir = tempfile::tempdir().unwrap();
    let all =
        ["cache.mode=exact", "lora=null", "train.steps=3", "train.global_batch=16", "train.micro_batch=16"];
    let small = ["expert.width=32", "expert.layers=2", "expert.repeated_noise=1", "train.checkpoint_every=0"];
    let large = ["data.min_pixels=50176", "data.max_pixels=50176", "data.prefetch=1"];
    let keys = strings(&[&all[..], &small, &large].concat());
    let (free, _) = train(&spec(&dir.path().join("a"), &keys), 0);
    let phases = &free.peak_memory[0].phases;
    let filling = phases["cache build"].in_use;
    let rest = phases.iter().filter(|(name, _)| *name != "cache build").map(|(_, peak)| peak.in_use);
    let rest = rest.max().expect("there are other phases");
    assert!(filling > rest + (8 << 20), "16 samples at once take more than any step: {filling}, {rest}");
    let capacity = (filling + rest) / 2;
    let bound = [&keys[..], &[format!("memory.capacity={capacity}")]].concat();
    let (tight, lines) = train(&spec(&dir.path().join("b"), &bound), 0);
    assert!(tight.peak_memory[0].phases["cache build"].in_use > capacity, "it went over at first");
    assert_eq!(tight.losses, free.losses);
    for line in &lines {
        assert_eq!((&line["micro_batch"], &line["attempts"]), (&16.into(), &1.into()), "steps do not notice");
    }
}

#[test]
fn a_resume_of_a_model_that_trains_whole_takes_what_training_takes() {
    let _exclusive = exclusive();
    let dir = tempfile::tempdir().unwrap();
    // Four numbers a parameter, of which a checkpoint has three: read as whole files they would be there
    // twice.
    let keys = [
        "train.steps=2",
        "train.global_batch=1",
        "train.micro_batch=1",
        "train.checkpoint_every=1",
        "train.recompute=full",
        "lora=null",
        "model.train=[model]",
        "expert.repeated_noise=1",
    ];
    let spec = spec(&dir.path().join("run"), &strings(&keys));
    let (whole, _) = train(&spec, 0);
    let (resumed, _) = train(&spec, 1);
    assert_eq!(resumed.losses.last(), whole.losses.last());
    let peak = |summary: &Summary| {
        let phases = &summary.peak_memory[0].phases;
        println!("{:?}", phases.iter().map(|(name, peak)| (name, peak.in_use >> 10)).collect::<Vec<_>>());
        phases.values().map(|peak| peak.in_use).max().expect("there are phases") as f64
    };
    let (trained, resumed) = (peak(&whole), peak(&resumed));
    assert!(resumed <= 1.01 * trained, "{trained} bytes in training, {resumed} where it goes on");
}

#[test]
fn streamed_blocks_take_off_the_peak_what_was_predicted() {
    let _exclusive = exclusive();
    let dir = tempfile::tempdir().unwrap();
    let common = ["train.steps=4", "train.global_batch=4", "train.micro_batch=1", "train.checkpoint_every=0"];
    let small = ["expert.width=32", "expert.layers=2", "expert.repeated_noise=1", "train.recompute=full"];
    let [held, streamed] = ["none", "layers"].map(|offload| {
        let offload = format!("memory.offload={offload}");
        let all = [&common[..], &small, &[&offload]].concat();
        let spec = spec(&dir.path().join(&offload), &strings(&all));
        let (summary, _) = train(&spec, 0);
        summary.memory.expect("a run of its own micro-batch is compared")
    });
    // From sizes alone: what earlier runs on this machine teach is not what is tested.
    let analytic = |of: &Outcome| of.categories.iter().map(|row| row.predicted).sum::<u64>() as f64;
    let (expected, peak) = (analytic(&streamed), streamed.measured as f64);
    assert!((expected / peak - 1.0).abs() <= 0.10, "{expected} for {streamed}");
    assert!(peak < 0.85 * analytic(&held), "{held}; {streamed}");
    let frozen = |of: &Outcome| {
        let found = of.categories.iter().find(|row| row.category == Category::FrozenWeights);
        let row = found.expect("every category is there");
        (row.predicted as f64, row.measured.expect("it can be told apart") as f64)
    };
    let ((_, all), (predicted, measured)) = (frozen(&held), frozen(&streamed));
    assert!((predicted / measured - 1.0).abs() <= 0.05, "{predicted} predicted, {measured} measured");
    assert!(measured < 0.6 * all, "{measured} of {all}");
}

#[test]
fn activations_in_bfloat16_take_off_the_peak_what_was_predicted() {
    let _exclusive = exclusive();
    let dir = tempfile::tempdir().unwrap();
    let common =
        ["train.steps=4", "train.global_batch=16", "train.micro_batch=16", "train.checkpoint_every=0"];
    let small = ["expert.width=32", "expert.layers=2", "expert.repeated_noise=1", "lora.targets=all-linear"];
    for recompute in ["selective", "full"] {
        let recompute_key = format!("train.recompute={recompute}");
        let [wide, narrow] = ["float32", "bfloat16"].map(|activations| {
            let key = format!("model.activations_dtype={activations}");
            let all = [&common[..], &small, &[&recompute_key, &key]].concat();
            let (summary, _) = train(&spec(&dir.path().join(recompute).join(activations), &strings(&all)), 0);
            summary.memory.expect("a run of its own micro-batch is compared")
        });
        // From sizes alone: what earlier runs on this machine teach is not what is tested.
        let analytic = |of: &Outcome| of.categories.iter().map(|row| row.predicted).sum::<u64>() as f64;
        let (expected, peak) = (analytic(&narrow), narrow.measured as f64);
        assert!((expected / peak - 1.0).abs() <= 0.05, "{expected} for {narrow}");
        let (predicted, saved) = (analytic(&wide) - expected, wide.measured as f64 - peak);
        assert!(saved > 0.05 * wide.measured as f64, "{wide}; {narrow}");
        assert!((predicted / saved - 1.0).abs() <= 0.15, "{recompute}: {predicted} predicted, {saved} saved");
    }
}

#[test]
fn what_is_recomputed_follows_the_memory_there_is_and_nothing_else_does() {
    let _exclusive = exclusive();
    let dir = tempfile::tempdir().unwrap();
    let common =
        ["train.steps=4", "train.global_batch=16", "train.micro_batch=16", "train.checkpoint_every=0"];
    let small = ["expert.width=32", "expert.layers=2", "expert.repeated_noise=1", "lora.targets=all-linear"];
    let run = |name: &str, keys: &[&str]| {
        let all = [&common[..], &small, keys].concat();
        let spec = spec(&dir.path().join(name), &strings(&all));
        let (summary, lines) = train(&spec, 0);
        assert!(lines.iter().all(|line| line["micro_batch"] == 16), "{name}: the micro-batch stays");
        let written = std::fs::read_to_string(dir.path().join(name).join("run_spec.json")).expect("written");
        assert!(
            !name.starts_with("auto") || written.contains("\"auto\""),
            "{name}: left to the next machine"
        );
        let memory = summary.memory.expect("a run of its own micro-batch is compared");
        let of = |wanted| memory.categories.iter().find(|row| row.category == wanted).expect("all are there");
        (summary.losses, of(Category::Activations).predicted, memory.measured)
    };
    let none = run("none", &["train.recompute=none"]);
    let full = run("full", &["train.recompute=full"]);
    let bound = format!("memory.capacity={}", u64::midpoint(none.2, full.2));
    let free = run("auto-free", &["train.recompute=auto"]);
    let tight = run("auto-tight", &["train.recompute=auto", &bound]);
    assert_eq!((&free.0, free.1), (&full.0, none.1));
    assert_eq!(tight.0, full.0);
    assert!(tight.1 < none.1, "{} of activations predicted, {} without recompute", tight.1, none.1);
}
