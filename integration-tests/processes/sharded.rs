//! Frozen weights shared out over ranks (`memory.shard: frozen`), with real processes: the results are
//! bitwise those of ranks that hold everything, whatever becomes of a rank, and memory falls as planned.

use nix::sys::signal::Signal;
use serde_json::Value;

use crate::support::{
    CoxProcess, cox, free_endpoint, losses,
    processes::{signal, worker_of},
    root,
    tiny::{Tiny, audit, results},
    train,
};

const SHARD: &str = "memory.shard=frozen";
const STEPS: u64 = 6;

fn worker(running: &CoxProcess, rank: u32) -> i32 {
    worker_of(running.pid(), rank).expect("it lives")
}

/// Trains the same with and without; the losses and adapters of both, which must be the same.
fn assert_alike(overrides: &[&str]) -> [Value; 2] {
    let dir = tempfile::tempdir().expect("a directory");
    let run = |name: &str, shard: &str| {
        let output = dir.path().join(name);
        let keys = ["train.steps=6", "eval.samples=4", "optimizer.warmup_steps=2", shard];
        let summary = train(&output, &[&keys[..], overrides].concat());
        let adapter =
            std::fs::read(output.join("adapter/adapter_model.safetensors")).expect("it is exported");
        (summary, adapter)
    };
    let (held, shared) = (run("held", "memory.shard=none"), run("shared", SHARD));
    assert_eq!(losses(&held.0), losses(&shared.0), "{overrides:?}");
    assert_eq!(held.0["error_after"], shared.0["error_after"], "{overrides:?}: the held-out error");
    assert!(held.1 == shared.1, "{overrides:?}: another adapter");
    [held.0, shared.0]
}

#[test]
fn ranks_that_share_frozen_weights_out_learn_the_same_bits() {
    for overrides in [
        &["--nproc-per-node=2", "lora.targets=all-linear"][..],
        &["--nproc-per-node=4", "train.recompute=selective", "train.micro_batch=1"],
        // Ranks compute different numbers of features, and cached steps run other layers than live ones.
        &["--nproc-per-node=2", "cache.mode=periodic", "cache.interval.steps=2", "cache.live.steps=1"],
        // One rank has a sample more, and none has as many as a micro-batch.
        &["--nproc-per-node=3", "train.global_batch=7", "train.micro_batch=2"],
        &["--nproc-per-node=1"],
    ] {
        assert_alike(overrides);
    }
}

#[test]
fn a_killed_worker_costs_nothing_in_any_phase_where_weights_are_shared_out() {
    for (phase, step) in [("forward", 0), ("backward", 3), ("optimizer", 3), ("evaluation", STEPS)] {
        let what = format!("kill -9 in {phase} of step {step}");
        let tiny = Tiny::new(STEPS, 2);
        let held = tiny.hold(1, phase, step);
        let mut running = tiny.start(&[SHARD]);
        held.wait(&mut running);
        signal(worker(&running, 1), Signal::SIGKILL);
        let audit = tiny.assert_undisturbed(running, &what);
        assert!(audit["faults"].as_array().is_some_and(|faults| !faults.is_empty()), "{what}: {audit:#}");
    }
}

#[test]
fn a_worker_that_stands_still_does_not_keep_the_others_waiting_for_its_part() {
    let tiny = Tiny::new(STEPS, 2);
    let held = tiny.hold(1, "forward", 3);
    let mut running = tiny.start(&[SHARD]);
    held.wait(&mut running);
    signal(worker(&running, 1), Signal::SIGSTOP);
    tiny.assert_undisturbed(running, "SIGSTOP in forward of step 3");
}

#[test]
fn while_all_ranks_answer_nothing_is_read_from_the_files() {
    let tiny = Tiny::new(STEPS, 2);
    let model = tempfile::tempdir().expect("a directory");
    for entry in std::fs::read_dir(root().join("configs/assets/tiny-vla")).expect("part of the repository") {
        let path = entry.expect("readable").path();
        std::fs::copy(&path, model.path().join(path.file_name().expect("a file"))).expect("there is room");
    }
    let path = format!("model.path={}", model.path().display());
    let held = tiny.hold(1, "forward", 3);
    let mut running = tiny.start(&[SHARD, &path]);
    held.wait(&mut running);
    // Any rank that reads a part again now fails.
    let weights = std::fs::File::options().write(true).open(model.path().join("model.safetensors"));
    weights.and_then(|file| file.set_len(100_000)).expect("it is ours");
    held.release();
    tiny.assert_undisturbed(running, "the model's files damaged in step 3");
}

#[test]
fn memory_falls_as_planned_when_frozen_weights_are_shared_out() {
    let overrides = ["--nproc-per-node=2", "eval.samples=0", "train.checkpoint_every=0"];
    let summaries = assert_alike(&overrides);
    let [held, shared] = summaries.each_ref().map(|summary| {
        let memory = &summary["memory"];
        let bytes = |key: &str| memory[key].as_f64().expect("rank 0 counts its allocations");
        (bytes("predicted"), bytes("measured"))
    });
    for (predicted, measured) in [held, shared] {
        let off = (predicted - measured).abs();
        assert!(
            off <= (0.03 * measured).max(f64::from(8 << 20)),
            "{predicted} predicted, {measured} measured"
        );
    }
    let (planned, fell) = (held.0 - shared.0, held.1 - shared.1);
    assert!(
        planned > f64::from(1 << 20) && (planned - fell).abs() < 0.1 * planned,
        "{planned} planned, {fell} less"
    );
}

#[test]
fn an_out_of_memory_is_tried_again_to_the_same_bits() {
    let dir = tempfile::tempdir().expect("a directory");
    let run = |name: &str, shard: &str, phase: &str| {
        let output = dir.path().join(name);
        let output_dir = format!("run.output_dir={}", output.display());
        let capacity = format!("memory.capacity={}", 600u64 << 20);
        let mut arguments = vec!["run", "configs/quickstart.yaml", &output_dir, &capacity, shard];
        arguments.extend(["train.steps=6", "train.global_batch=8", "train.micro_batch=4", "eval.samples=2"]);
        // 4 samples want 800 MiB more, 2 want 400.
        let fault = format!("rank=1 step=3 phase={phase} mib=200");
        let (status, printed) = CoxProcess::start_with(&arguments, &[("COX_FAULT_MEMORY", &fault)]).finish();
        assert!(status.success(), "{printed}");
        assert!(printed.contains("all ranks go from a micro-batch of 4 to 2"), "{printed}");
        results(&output)
    };
    for phase in ["forward", "backward"] {
        let (held, shared) =
            (run(&format!("held-{phase}"), "memory.shard=none", phase), run(phase, SHARD, phase));
        assert!(held == shared, "{phase}");
    }
}

#[test]
fn parts_are_cut_anew_when_a_world_grows_and_shrinks() {
    let tiny = Tiny::new(100_000, 0);
    let endpoint = free_endpoint();
    let node = |address: &str| {
        let conf = "--rdzv-conf=last_call_timeout=0";
        let place = ["--nnodes=1:2", "--nproc-per-node=1", "--rdzv-endpoint", &endpoint, conf];
        tiny.start(&[&place[..], &["--local-addr", address, SHARD]].concat())
    };
    let mut first = node("127.0.0.1");
    first.wait_for("2/100000");
    let second = node("127.0.0.1");
    first.wait_for("generation 2: 2 of 2 workers");
    first.wait_for("/100000");
    signal(second.pid() as i32, Signal::SIGKILL);
    second.finish();
    first.wait_for("generation 3: 1 of 2 workers");
    first.wait_for("/100000");
    signal(first.pid() as i32, Signal::SIGTERM);
    let (status, printed) = first.finish();
    assert_eq!(status.code(), Some(143), "{printed}");
    let audit = audit(&tiny.output());
    assert_eq!((&audit["missing"], &audit["duplicate"]), (&0.into(), &0.into()), "{audit:#}\n{printed}");
}

#[test]
fn what_cannot_be_shared_out_is_refused_before_anything_runs() {
    for (change, told) in [
        ("memory.offload=layers", "memory.shard"),
        ("model.weights_dtype=nf4", "memory.shard"),
        ("train.recompute=none", "train.recompute"),
        ("launch.device=cuda", "memory.shard"),
    ] {
        let out = cox(&["check", "configs/quickstart.yaml", SHARD, change]).output().expect("cox was built");
        let printed =
            [out.stdout, out.stderr].map(|text| String::from_utf8_lossy(&text).into_owned()).concat();
        assert!(!out.status.success() && printed.contains(told), "{change}: {printed}");
    }
    let plan = cox(&["plan", "configs/quickstart.yaml", SHARD, "--json"]).output().expect("cox was built");
    assert!(plan.status.success(), "{}", String::from_utf8_lossy(&plan.stderr));
}
