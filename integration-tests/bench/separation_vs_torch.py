#!/usr/bin/env python3
"""Training a separator next to PyTorch, in turns: the same network, sizes and loss, on random weights and signals.

    python separation_vs_torch.py COX [--hidden 64] [--layers 2] [--bands 24] [--seconds 2] [--batch 2] [--threads 2]
        [--rounds 2] [--warmup 2] [--steps 6] [--recompute none] [--compile]

Both sides: spectrum, network, inverse transform, both losses, backward pass, clipping to norm 1, AdamW (PyTorch's fused), float32 on
the CPU. Ours is a whole `cox run` with one worker on the tracks of configs/separation.yaml; PyTorch is the
module of fixtures/make_separation_fixtures.py, eager (--compile: torch.compile), scaled_dot_product_attention, its segments there
already. With --recompute full each block goes through torch.utils.checkpoint. Step times are medians after --warmup. Memory
is the peak resident set of the process less what it held before its first batch. Needs torch and safetensors.
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

ROOT = pathlib.Path(__file__).resolve().parents[2]
OPTIONS = dict(hidden=64, layers=2, bands=24, seconds=2, batch=2, threads=2, rounds=2, warmup=2, steps=6)
N_FFT, HOP, RATE, HEADS = 512, 128, 4000, 4


def overrides(a, folder):
    return [
        f"run.output_dir={folder}/run", f"data.path={ROOT}/configs/assets/plucks", "data.hop_seconds=0.1", "data.holdout_every=0",
        f"data.segment_seconds={a.seconds}", f"network={{n_fft: {N_FFT}, hop: {HOP}, bands: {a.bands}, hidden_dim: {a.hidden}, "
        f"layers: {a.layers}, heads: {HEADS}}}", f"train.steps={a.warmup + a.steps}", f"train.global_batch={a.batch}",
        f"train.micro_batch={a.batch}", f"train.recompute={a.recompute}", "train.checkpoint_every=0", "eval.samples=0",
        "optimizer.warmup_steps=0", f"launch={{nproc_per_node: 1, threads_per_worker: {a.threads}, device: cpu}}",
    ]


def ours(a, folder):
    subprocess.run(["rm", "-rf", str(folder / "run")], check=True)
    command = [a.cox, "run", str(ROOT / "configs/separation.yaml"), *overrides(a, folder), "--log-format", "json"]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        sys.exit(done.stdout)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    steps = [line["total_ms"] for line in lines if "total_ms" in line]
    phases = json.loads((folder / "run/summary.json").read_text())["peak_memory"][0]["phases"]
    peak = max(phases[phase]["driver"] for phase in ("forward", "backward", "optimizer"))
    edges = json.loads((folder / "run/separator.json").read_text())["band_edges"]
    return dict(step_ms=steps[a.warmup:], mib=(peak - phases["connecting"]["driver"]) / 2**20, edges=edges)


def status_mib(field):
    with open("/proc/self/status") as f:
        return next(int(line.split()[1]) for line in f if line.startswith(field)) / 1024


def torch_side(a):
    os.environ["OMP_NUM_THREADS"] = str(a.threads)
    sys.path.insert(0, str(ROOT / "integration-tests/fixtures"))
    import torch
    from torch.utils.checkpoint import checkpoint
    from make_separation_fixtures import Separator
    torch.set_num_threads(a.threads)
    stems = ["plucks", "drums"]
    separator = Separator(dict(stems=stems, n_fft=N_FFT, hop=HOP, band_edges=json.loads(a.edges), hidden_dim=a.hidden, layers=a.layers, heads=HEADS)).draw()
    if a.recompute == "full":
        block = separator.block
        separator.block = lambda at, x: checkpoint(block, at, x, use_reentrant=False)
    params = list(separator.p.values())
    optimizer = torch.optim.AdamW(params, lr=1e-3, fused=True)
    samples = a.seconds * RATE
    wanted = 0.2 * torch.randn(a.batch, len(stems), 2, samples)
    loss_of = torch.compile(separator.loss) if a.compile else separator.loss
    before = status_mib("VmRSS")
    pathlib.Path("/proc/self/clear_refs").write_text("5")
    times = []
    for _ in range(a.warmup + a.steps):
        begin = time.perf_counter()
        loss, _ = loss_of(wanted.sum(1), wanted)
        (loss / a.batch).backward()
        torch.nn.utils.clip_grad_norm_(params, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        loss.item()
        times.append((time.perf_counter() - begin) * 1e3)
    print(json.dumps(dict(step_ms=times[a.warmup:], mib=status_mib("VmHWM") - before)))


def theirs(a, edges):
    options = [x for name in OPTIONS for x in (f"--{name}", str(getattr(a, name)))]
    command = [sys.executable, os.path.abspath(__file__), a.cox, *options, "--recompute", a.recompute, "--edges", json.dumps(edges)]
    out = subprocess.run(command + ["--compile"] * a.compile, check=True, stdout=subprocess.PIPE, text=True).stdout
    return json.loads([line for line in out.splitlines() if line.startswith("{")][-1])


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("cox")
    for name, value in OPTIONS.items():
        ap.add_argument(f"--{name}", type=int, default=value)
    ap.add_argument("--recompute", default="none", choices=["none", "full"])
    ap.add_argument("--compile", action="store_true")
    ap.add_argument("--edges", help=argparse.SUPPRESS)
    a = ap.parse_args()
    if a.edges:
        return torch_side(a)
    with tempfile.TemporaryDirectory() as folder:
        pairs = []
        for number in range(a.rounds):
            mine = ours(a, pathlib.Path(folder))
            pair = [mine, theirs(a, mine["edges"])]
            pairs.append(pair)
            for name, side in zip(("ours", "PyTorch"), pair):
                print(f"round {number}, {name:7s}: step {statistics.median(side['step_ms']):8.1f} ms, least {min(side['step_ms']):8.1f}, "
                      f"{side['mib']:8.1f} MiB", flush=True)
        ratio = lambda of: statistics.median(of(ours) / of(theirs) for ours, theirs in pairs)
        print(f"ours / PyTorch: time {ratio(lambda side: statistics.median(side['step_ms'])):.2f} "
              f"(fastest steps {ratio(lambda side: min(side['step_ms'])):.2f}), memory {ratio(lambda side: side['mib']):.2f}")


if __name__ == "__main__":
    main()
