"""What the benchmarks beside PyTorch share: a `cox run` and a PyTorch process in turns, their step times and their memory.

Step times are medians after the first two. Memory is the peak resident set of a process less what it held before its first batch:
imports, runtime and weights are on neither side.
"""
import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time


def cox_run(a, folder, config, task):
    """A run file: this task's sections, and what all runs have."""
    path = folder / "run.yaml"
    path.write_text(json.dumps({
        "run": {"name": "bench", "output_dir": str(folder / "run")}, "task": {"type": task}, **config,
        "train": {"steps": a.warmup + a.steps, "global_batch": a.batch, "micro_batch": a.batch, "recompute": a.recompute},
        "optimizer": {"lr": {"lora": 1e-4}}, "launch": {"nproc_per_node": 1, "threads_per_worker": a.threads, "device": "cpu"},
    }))
    return path


def ours(a, folder, run_file):
    """A whole `cox run` with one worker."""
    subprocess.run(["rm", "-rf", str(folder / "run")], check=True)
    command = [a.cox, "run", str(run_file), "--log-format", "json"]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        sys.exit(done.stdout)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    steps = [line for line in lines if "total_ms" in line][a.warmup:]
    summary = json.loads((folder / "run/summary.json").read_text())
    phases = summary["peak_memory"][0]["phases"]
    peak = max(phases[phase]["driver"] for phase in ("forward", "backward", "optimizer"))
    parts = {part: statistics.median(line[part] for line in steps) for part in steps[0] if part.endswith("_ms")}
    mib = (peak - phases["connecting"]["driver"]) / 2**20
    return dict(step_ms=[line["total_ms"] for line in steps], mib=mib, process_mib=peak / 2**20, loss=summary["losses"][0],
                parts=parts)


def theirs(a, folder, run_file, options):
    """This script again, as a process of its own, on the samples that `cox data sample` writes: both see the same ids and labels."""
    samples = folder / "samples"
    samples.mkdir(exist_ok=True)
    for number in range(a.batch):
        out = str(samples / f"{number}.safetensors")
        command = [a.cox, "data", "sample", str(run_file), "--index", str(number), "--out", out]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    command = [sys.executable, os.path.abspath(sys.argv[0]), *sys.argv[1:], *options, "--samples", str(samples)]
    out = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    return json.loads([line for line in out.splitlines() if line.startswith("{")][-1])


def status_mib(field):
    with open("/proc/self/status") as f:
        return next(int(line.split()[1]) for line in f if line.startswith(field)) / 1024


def adapted(a, model, **lora):
    """The model with PEFT's LoRA, as it trains."""
    from peft import LoraConfig, get_peft_model
    model.requires_grad_(False)
    model = get_peft_model(model, LoraConfig(r=a.rank, lora_alpha=a.rank, **lora))
    model.train()
    if a.recompute == "full":
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=dict(use_reentrant=False))
        model.enable_input_require_grads()
    return model


def batch_of(a):
    """The samples side by side."""
    import torch
    from safetensors.torch import load_file
    samples = [load_file(path) for path in sorted(pathlib.Path(a.samples).glob("*.safetensors"))]
    return {name: torch.cat([sample[name] for sample in samples]) for name in samples[0]}


def train(a, model, loss_of):
    """Steps of clipping to norm 1 and fused AdamW; prints what `ours` returns."""
    import torch
    params = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(params, lr=1e-4, fused=True)
    before = status_mib("VmRSS")
    pathlib.Path("/proc/self/clear_refs").write_text("5")
    times, first = [], None
    for _ in range(a.warmup + a.steps):
        begin = time.perf_counter()
        loss = loss_of()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(params, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        first = loss.item() if first is None else first
        times.append((time.perf_counter() - begin) * 1e3)
    peak = status_mib("VmHWM")
    print(json.dumps(dict(step_ms=times[a.warmup:], mib=peak - before, process_mib=peak, loss=first)))


def torch_threads(a):
    os.environ.update(HF_HUB_OFFLINE="1", OMP_NUM_THREADS=str(a.threads))
    import torch
    torch.set_num_threads(a.threads)
    torch.manual_seed(0)


def arguments(options, *positional):
    parser = argparse.ArgumentParser()
    for name in ("cox", *positional):
        parser.add_argument(name)
    for name, value in options.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--recompute", default="none", choices=["none", "full"])
    for name in ("samples", "made"):
        parser.add_argument(f"--{name}", help=argparse.SUPPRESS)
    return parser.parse_args()


def compare(a, prepare):
    """Both sides in turns: `prepare` makes what they need in a folder, and returns our run file and options of the other side."""
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        run_file, options = prepare(a, folder)
        pairs = []
        for number in range(a.rounds):
            pairs.append([ours(a, folder, run_file), theirs(a, folder, run_file, options)])
            for name, side in zip(("ours", "PyTorch"), pairs[-1]):
                print(f"round {number}, {name:7s}: step {statistics.median(side['step_ms']):8.1f} ms, least {min(side['step_ms']):8.1f}, "
                      f"{side['mib']:8.1f} MiB of {side['process_mib']:.0f}, first loss {side['loss']:.5f}", flush=True)
        print("ours by phase:", ", ".join(f"{part} {ms:.1f}" for part, ms in pairs[-1][0]["parts"].items()))
        ratio = lambda of: statistics.median(of(ours) / of(theirs) for ours, theirs in pairs)
        print(f"ours / PyTorch: time {ratio(lambda side: statistics.median(side['step_ms'])):.2f} "
              f"(fastest steps {ratio(lambda side: min(side['step_ms'])):.2f}), memory {ratio(lambda side: side['mib']):.2f}, "
              f"of the process {ratio(lambda side: side['process_mib']):.2f}")
