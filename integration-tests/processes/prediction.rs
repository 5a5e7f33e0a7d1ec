//! How far predicted memory is from what training takes: real runs, measured by the counting allocator of
//! real workers.
//!
//! Twenty-five configurations of two models: micro-batch, recompute, types of frozen weights and of
//! activations, where weights are, adapters, world, image size. The analytic prediction must come within 10 %
//! of each peak. Calibrated by two runs of a model, those of its other runs must come within 5 %. What
//! calibrates is the median of [`REPEATS`] runs. With `--nocapture` the table is printed
//! (`integration-tests/bench/MEMORY.md`).

use std::path::{Path, PathBuf};

use coxswain_models::families::shelf;
use coxswain_nn::{
    kernels::sizes::Sizes,
    lora::{Module, ModuleKind},
};
use coxswain_proto::{memory::relative, run_spec::RunSpec};
use coxswain_tasks::vla_flow::memory::Subject;
use coxswain_worker::memory::prediction::{
    Ask, Place,
    recorded::{Calibration, Record},
};

use crate::support::{cox, root, train};

const ANALYTIC: f64 = 0.10;
const CALIBRATED: f64 = 0.05;
/// Runs of a case that calibrates. In one of five a peak meets data threads that decode the same rows of the
/// data set side by side, and is up to 1 MiB higher: 3 % of the smallest model, nothing of a published one.
/// Records of a machine are many, and one that differs hardly counts; here there are two.
const REPEATS: usize = 3;

/// One run: which model, in which world, what is changed, and whether its model is calibrated by it.
struct Case {
    model: &'static str,
    world: u64,
    changes: &'static [&'static str],
    calibrates: bool,
}

const fn case(model: &'static str, world: u64, changes: &'static [&'static str]) -> Case {
    Case { model, world, changes, calibrates: false }
}

const fn calibrating(model: &'static str, changes: &'static [&'static str]) -> Case {
    Case { model, world: 1, changes, calibrates: true }
}

const BF16: &str = "model.weights_dtype=bfloat16";
const QV: &str = "lora.targets=[q_proj, v_proj]";

const ROUNDED: &str = "model.activations_dtype=bfloat16";

const STREAMED: &str = "memory.offload=layers";

const CASES: [Case; 25] = [
    calibrating("tiny", &["train.micro_batch=1", "train.recompute=none"]),
    calibrating("tiny", &["train.micro_batch=8", "train.recompute=none"]),
    case("tiny", 1, &["train.micro_batch=4", "train.recompute=full"]),
    case("tiny", 1, &["train.micro_batch=4", "train.recompute=selective", BF16]),
    case("tiny", 1, &["train.micro_batch=8", "train.recompute={every: 2}", QV]),
    case("tiny", 1, &["train.micro_batch=4", "train.recompute=none", "data.min_pixels=50176"]),
    case("tiny", 1, &["train.micro_batch=4", "train.recompute=none", "expert.width=256", "expert.layers=6"]),
    case("tiny", 2, &["train.micro_batch=4", "train.recompute=none"]),
    calibrating("mid", &["train.micro_batch=2", "train.recompute=none", BF16]),
    calibrating("mid", &["train.micro_batch=8", "train.recompute=full", BF16]),
    case("mid", 1, &["train.micro_batch=4", "train.recompute=none", "model.weights_dtype=float32"]),
    case("mid", 1, &["train.micro_batch=8", "train.recompute=selective", BF16]),
    case("mid", 1, &["train.micro_batch=8", "train.recompute=none", BF16, "lora.targets=all-linear"]),
    case("mid", 1, &["train.micro_batch=4", "train.recompute=none", BF16, QV, "lora.rank=64"]),
    case("mid", 2, &["train.micro_batch=4", "train.recompute=full", BF16]),
    case(
        "mid",
        2,
        &["train.micro_batch=4", "train.recompute=none", BF16, "expert.width=384", "expert.heads=6"],
    ),
    case("tiny", 1, &["train.micro_batch=2", "train.recompute=full", STREAMED]),
    case("mid", 1, &["train.micro_batch=2", "train.recompute=selective", BF16, "model.train=[embed_tokens]"]),
    case(
        "mid",
        1,
        &["train.micro_batch=4", "train.recompute=selective", "model.weights_dtype=float32", STREAMED],
    ),
    case("tiny", 1, &["train.micro_batch=2", "train.recompute=full", "model.weights_dtype=nf4"]),
    case("mid", 1, &["train.micro_batch=4", "train.recompute=selective", "model.weights_dtype=int8"]),
    case("tiny", 1, &["train.micro_batch=8", "train.recompute=selective", ROUNDED]),
    case("tiny", 1, &["train.micro_batch=4", "train.recompute=none", ROUNDED]),
    case("mid", 1, &["train.micro_batch=8", "train.recompute=full", BF16, ROUNDED]),
    case(
        "mid",
        1,
        &["train.micro_batch=8", "train.recompute=selective", BF16, ROUNDED, "lora.targets=all-linear"],
    ),
];

/// Settings of every case: enough steps that every buffer has been used, and nothing else.
const SHORT: [&str; 5] = [
    "train.steps=4",
    "train.global_batch=16",
    "train.checkpoint_every=0",
    "eval.samples=0",
    "optimizer.warmup_steps=0",
];

#[test]
fn predictions_come_within_ten_percent_and_calibrated_ones_within_five() {
    let dir = tempfile::tempdir().unwrap();
    let mid = dir.path().join("mid");
    write_checkpoint(&mid);
    let tiny = root().join("configs/assets/tiny-vla");
    let mut records = Vec::new();
    for (number, case) in CASES.iter().enumerate() {
        let model = if case.model == "mid" { &mid } else { &tiny };
        let repeats = if case.calibrates { REPEATS } else { 1 };
        let repeat = |repeat| run(case, model, &dir.path().join(format!("{number}-{repeat}")));
        let mut repeated: Vec<Record> = (0..repeats).map(repeat).collect();
        repeated.sort_by_key(|record| record.measured);
        records.push(repeated.swap_remove(repeats / 2));
    }
    let predicted = |record: &Record| record.fixed + record.varying;
    let calibration = |model: &str, fixed: u64| {
        let of_model = CASES.iter().zip(&records).filter(|(case, _)| case.model == model && case.calibrates);
        let records: Vec<Record> = of_model.map(|(_, record)| record.clone()).collect();
        Calibration::fit(&records, fixed).expect("two records")
    };
    let mut table = String::new();
    let mut worst: [f64; 2] = [0.0; 2];
    for (case, record) in CASES.iter().zip(&records) {
        let found = calibration(case.model, record.fixed);
        let corrected = (record.fixed as f64 + found.offset + found.slope * record.varying as f64) as u64;
        let errors = [predicted(record), corrected].map(|bytes| relative(bytes, record.measured));
        worst[0] = worst[0].max(errors[0].abs());
        worst[1] = worst[1].max(errors[1].abs());
        let mib = |bytes: u64| bytes as f64 / f64::from(1 << 20);
        let mark = if case.calibrates { "*" } else { "" };
        table.push_str(&format!(
            "| {}{mark} | {} | {} | {:.1} | {:.1} | {:+.1} % | {:+.1} % |\n",
            case.model,
            case.world,
            case.changes.join(" "),
            mib(predicted(record)),
            mib(record.measured),
            100.0 * errors[0],
            100.0 * errors[1]
        ));
    }
    println!(
        "| model | ranks | settings | predicted MiB | measured MiB | analytic | calibrated |\n|---|---|---|---|---|---|---|\n{table}"
    );
    assert!(worst[0] <= ANALYTIC, "analytic: {:.1} %\n{table}", 100.0 * worst[0]);
    assert!(worst[1] <= CALIBRATED, "calibrated: {:.1} %\n{table}", 100.0 * worst[1]);
}

#[test]
fn a_plan_of_the_published_model_takes_little_memory_and_says_what_it_took() {
    let out =
        cox(&["plan", "configs/qwen2.5-vl-3b.yaml", "--all-gpus", "--json"]).output().expect("cox was built");
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    let plan: serde_json::Value = serde_json::from_slice(&out.stdout).expect("JSON");
    assert_eq!(plan["parameters"]["pretrained"], 3_754_622_976u64);
    let (ms, allocated) = (plan["cost"]["cpu_ms"].as_u64(), plan["cost"]["allocated_peak"].as_u64());
    assert!(ms.is_some() && allocated.is_some_and(|bytes| bytes < 48 << 20), "{}", plan["cost"]);
    let fit = |gpu: &str| {
        let memories = plan["memories"].as_array().expect("an array").iter();
        memories.clone().find(|m| m["memory"]["name"] == gpu).map(|m| m["fit"]["maximum"].clone())
    };
    let [small, large] = ["RTX4090-24", "A100-80"].map(|gpu| fit(gpu).and_then(|fit| fit.as_u64()));
    assert!(small.is_some() && small <= large, "{small:?} {large:?}");
}

#[test]
fn a_key_varied_has_a_plan_for_each_value_in_each_memory() {
    let arguments = ["plan", "configs/qwen2.5-vl-3b.yaml", "--gpu", "A10", "--gpu", "A100-40"];
    let vary = |values: &str, also: &[&str]| {
        let all = [&arguments[..], &["--vary", values], also].concat();
        cox(&all).output().expect("cox was built")
    };
    let out = vary("lora.rank=8,64", &["--json"]);
    let told: serde_json::Value = serde_json::from_slice(&out.stdout).expect("JSON");
    let peaks =
        [0, 1].map(|of| [0, 1].map(|gpu| told["plans"][of]["memories"][gpu]["current"]["peak"].as_u64()));
    let [[small, beside], [large, _]] = peaks;
    assert!(small.is_some() && small == beside && small < large, "{peaks:?}");
    let shown = String::from_utf8(vary("lora.rank=8,64", &[]).stdout).expect("text");
    let row = |start: &str| shown.lines().any(|line| line.split_whitespace().next() == Some(start));
    assert!(shown.contains("A10-24") && row("8") && row("64"), "{shown}");
    let refused = vary("lora.rank=8,many", &[]);
    assert_eq!(refused.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&refused.stderr).contains("lora.rank"), "{refused:?}");
}

#[test]
fn what_cannot_fit_is_refused_with_rank_bytes_and_remedy() {
    let plan = |arguments: &[&str]| {
        let mut all = vec!["plan", "configs/qwen2.5-vl-3b.yaml"];
        all.extend(arguments);
        let out = cox(&all).output().expect("cox was built");
        (out.status.code(), String::from_utf8_lossy(&out.stderr).into_owned())
    };
    assert_eq!(plan(&["--gpu", "A100-80"]).0, Some(0));
    let (code, message) = plan(&["--gpu", "24GiB", "train.micro_batch=32", "train.recompute=none"]);
    assert_eq!(code, Some(2), "{message}");
    assert!(
        message.contains("short by")
            && message.contains("rank 0")
            && message.contains("the largest micro-batch that fits is"),
        "{message}"
    );
    let (code, message) = plan(&["--gpu", "4GiB"]);
    assert_eq!(code, Some(5), "{message}");
    assert!(message.contains("not even one sample fits"), "{message}");
    // The same at submission: bounded by memory.capacity, refused before a process is started.
    let out =
        cox(&["check", "configs/quickstart.yaml", "memory.capacity=3000000", "train.micro_batch=8"]).output();
    let out = out.expect("cox was built");
    assert_eq!(out.status.code(), Some(5), "{out:?}");
    assert!(String::from_utf8_lossy(&out.stderr).contains("does not fit: short by"), "{out:?}");
}

#[test]
fn an_evaluation_that_would_find_nothing_is_told_beforehand() {
    let check = |holdout: &str| {
        let out = cox(&["check", "configs/quickstart.yaml", "eval.every=10", holdout]).output();
        let out = out.expect("cox was built");
        assert!(out.status.success(), "{out:?}");
        String::from_utf8_lossy(&out.stdout).into_owned()
    };
    let without = check("data.holdout_episodes=[]");
    assert!(without.contains("0 held out: nothing will be evaluated"), "{without}");
    assert!(without.contains("warning   eval.every is 10, but no sample is held out"), "{without}");
    let with = check("data.holdout_episodes=[3]");
    assert!(!with.contains("nothing"), "{with}");
}

#[test]
fn what_is_doubtful_is_told_by_check() {
    for (change, told) in [
        ("optimizer.lr.expert=10", "optimizer.lr.expert"),
        ("optimizer.warmup_steps=1000", "optimizer.warmup_steps"),
        ("data.horizon=5000", "data.horizon"),
        ("lora.rank_pattern={nothing: 4}", "matches no module that has an adapter"),
        ("lora.alpha_pattern={nothing: 4}", "matches no module that has an adapter"),
    ] {
        let out = cox(&["check", "configs/quickstart.yaml", change]).output().expect("cox was built");
        let printed =
            [out.stdout, out.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).concat();
        let warned = printed.lines().any(|line| line.to_lowercase().contains("warn") && line.contains(told));
        assert!(out.status.success() && warned, "{change}: {printed}");
    }
}

#[test]
fn a_machine_without_a_gpu_is_described_in_words() {
    let out = cox(&["gpu"]).output().expect("cox was built");
    if !out.status.success() {
        assert_eq!(out.status.code(), Some(3));
        assert!(String::from_utf8_lossy(&out.stderr).contains("no NVIDIA"), "{out:?}");
    }
}

/// Trains, and lays the prediction beside the largest peak of any rank.
fn run(case: &Case, model: &Path, output: &Path) -> Record {
    let world = case.world.to_string();
    let path = format!("model.path={}", model.display());
    let mut overrides: Vec<&str> = vec![&path];
    overrides.extend(SHORT);
    overrides.extend(case.changes);
    let spec = RunSpec::load(
        &root().join("configs/quickstart.yaml"),
        &overrides.iter().map(ToString::to_string).chain([data()]).collect::<Vec<_>>(),
        coxswain_tasks::TASKS,
    )
    .expect("a valid run");
    let subject = Subject::from_spec(&spec, shelf()).expect("readable");
    let cores = std::thread::available_parallelism().map_or(1, usize::from) as u64;
    let ask = Ask {
        micro_batch: spec.train.micro_batch as u64,
        world: case.world,
        rank: 0,
        place: Place::Host { threads: (cores / case.world).max(1) },
    };
    let mut arguments = vec!["--nproc-per-node", &world];
    arguments.extend(&overrides);
    let summary = train(output, &arguments);
    let measured = summary["memory"]["measured"].as_u64().expect("compared at the end of the run");
    let prediction = subject.predict(ask);
    Record::new(&subject, ask, &prediction, measured, &[])
}

fn data() -> String {
    format!("data.path={}", root().join("configs/assets/metaworld-mini").display())
}

/// A checkpoint of 17 M parameters beside the small one's tokenizer: 8 decoder layers of width 384, 4 vision
/// blocks of width 192.
fn write_checkpoint(dir: &Path) {
    let tiny = root().join("configs/assets/tiny-vla");
    std::fs::create_dir_all(dir).expect("a temporary directory");
    for file in ["preprocessor_config.json", "tokenizer.json", "tokenizer_config.json"] {
        std::fs::copy(tiny.join(file), dir.join(file)).expect("part of the repository");
    }
    let mut config = crate::support::read_json(&tiny.join("config.json"));
    for (key, value) in [
        ("hidden_size", 384),
        ("intermediate_size", 1024),
        ("num_hidden_layers", 8),
        ("num_attention_heads", 12),
        ("num_key_value_heads", 4),
        ("vocab_size", 4096),
    ] {
        config[key] = value.into();
    }
    for (key, value) in
        [("hidden_size", 192), ("intermediate_size", 512), ("num_heads", 6), ("out_hidden_size", 384)]
    {
        config["vision_config"][key] = value.into();
    }
    std::fs::write(dir.join("config.json"), config.to_string()).expect("a temporary directory");
    let family = shelf::<Sizes>().vision_language.of(dir).expect("its own is read");
    let model = family.outline(dir).expect("a legal configuration");
    write_safetensors(&dir.join("model.safetensors"), &tensors(&model.modules));
}

/// Names and shapes of every tensor of a checkpoint with tied embeddings.
fn tensors(modules: &[Module]) -> Vec<(String, Vec<usize>)> {
    let mut tensors = Vec::new();
    for Module { name, kind, .. } in modules {
        let weight = |shape: &[usize]| (format!("{name}.weight"), shape.to_vec());
        match *kind {
            ModuleKind::Linear { head: true, .. } => {}
            ModuleKind::Linear { inputs, outputs, .. } => tensors.push(weight(&[outputs, inputs])),
            ModuleKind::Convolution { shape, .. } => tensors.push(weight(&shape)),
            ModuleKind::Embedding { rows, width, .. } => tensors.push(weight(&[rows, width])),
            ModuleKind::Norm { width, .. } => tensors.push(weight(&[width])),
            ModuleKind::Other => {}
        }
        tensors.extend(kind.bias().map(|len| (format!("{name}.bias"), vec![len])));
    }
    tensors
}

/// bf16 values: ones for gains, small pseudo-random ones for the rest.
fn write_safetensors(path: &PathBuf, tensors: &[(String, Vec<usize>)]) {
    let mut header = serde_json::Map::new();
    let (mut data, mut state) = (Vec::new(), 1u32);
    for (name, shape) in tensors {
        let begin = data.len();
        for _ in 0..shape.iter().product::<usize>() {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            let random = (f64::from(state) / f64::from(u32::MAX) - 0.5) as f32 * 0.08;
            let gain = shape.len() == 1 && !name.ends_with("bias");
            let bits = if gain { 1.0f32 } else { random }.to_bits();
            data.extend_from_slice(&((bits >> 16) as u16).to_le_bytes());
        }
        let entry = serde_json::json!({"dtype": "BF16", "shape": shape, "data_offsets": [begin, data.len()]});
        header.insert(name.clone(), entry);
    }
    let mut header = serde_json::Value::Object(header).to_string();
    while !header.len().is_multiple_of(8) {
        header.push(' ');
    }
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend_from_slice(header.as_bytes());
    file.extend_from_slice(&data);
    std::fs::write(path, file).expect("a temporary directory");
}
