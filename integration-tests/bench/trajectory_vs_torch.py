#!/usr/bin/env python3
"""Streaming training on layer activations next to PyTorch on the same checkpoint and the same images, in turns.

    python trajectory_vs_torch.py COX FOLDER [--images 64] [--batch 16] [--hidden 256] [--latent 32] [--depth 2] [--threads 2]
        [--rounds 3] [--warmup 3] [--steps 12] [--prefetch 2] [--cached] [--compile 0]
    python trajectory_vs_torch.py COX FOLDER --accumulated 250 500 1000

FOLDER is made: a random checkpoint whose vision tower has 16 blocks of 128 values, a trajectory of all of them, and random images of 112 x
112 pixels. Both sides: the tower frozen and without gradients, 7 x 7 positions, an autoencoder, clipping to norm 1 and AdamW
(PyTorch's fused), float32 on the CPU. Ours is a whole `cox run` with one worker, which decodes images beside training; PyTorch, eager
(--compile 1: torch.compile, the tower block by block), has the pixels of all its images in memory before it begins (`cox data sample` writes them). Step times are medians after the first.
Memory is the peak resident set less what was held before the first batch: imports, runtime, weights, and PyTorch's pixels, are on
neither side; ours reads as many batches of pixels ahead as --prefetch says, and they count. With --cached the tower runs on neither
side: ours reads kept features, PyTorch has them in memory.

With --accumulated the trajectories of so many images are collected first, and then one epoch is trained; beside it
the same streamed, in PyTorch and here, and what `cox plan` says. Needs torch and transformers.
"""
import argparse
import json
import os
import pathlib
import random
import statistics
import struct
import subprocess
import sys
import time
import zlib

ROOT = pathlib.Path(__file__).resolve().parents[2]
OPTIONS = dict(images=64, batch=16, hidden=256, latent=32, depth=2, threads=2, rounds=3, warmup=3, steps=12, prefetch=2, compile=0)
LAYERS, DIM, SIDE, RESOLUTION = 16, 128, 112, 7


def png(side, draw):
    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    raw = b"".join(b"\0" + draw.randbytes(3 * side) for _ in range(side))
    head = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(raw, 1)) + chunk(b"IEND", b"")


def prepare(a, images):
    """The checkpoint and the images, once."""
    folder = pathlib.Path(a.folder)
    tiny = ROOT / "configs/assets/tiny-vla"
    if not (folder / "model").exists():
        like = folder / "like"
        like.mkdir(parents=True, exist_ok=True)
        config = json.loads((tiny / "config.json").read_text())
        config["vision_config"] |= dict(depth=LAYERS, hidden_size=DIM, num_heads=4, intermediate_size=2 * DIM, fullatt_block_indexes=[7, 15])
        (like / "config.json").write_text(json.dumps(config))
        (like / "preprocessor_config.json").write_bytes((tiny / "preprocessor_config.json").read_bytes())
        command = [a.cox, "data", "make-checkpoint", "--like", like, "--tokenizer", tiny, "--out", folder / "model", "--dtype", "f32"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    draw = random.Random(1)
    (folder / "images").mkdir(exist_ok=True)
    for number in range(images):
        path = folder / f"images/{number:05}.png"
        content = png(SIDE, draw)
        if not path.exists():
            path.write_bytes(content)
    return folder


def run_file(a, folder, images, steps, **more):
    path = folder / "run.yaml"
    path.write_text(json.dumps({
        "run": {"name": "bench", "output_dir": str(folder / "run")}, "task": {"type": "trajectory"},
        "extractor": {"path": str(folder / "model"), "spatial_resolution": RESOLUTION},
        "network": {"hidden_dim": a.hidden, "latent_dim": a.latent, "num_layers": a.depth},
        "data": {"path": str(folder / "images"), "image_size": SIDE, "num_samples": images, "prefetch": a.prefetch},
        "train": {"steps": steps, "global_batch": a.batch, "micro_batch": a.batch, "checkpoint_every": 0},
        "eval": {"samples": 0}, "optimizer": {"lr": {"network": 1e-3}, "warmup_steps": 0},
        "launch": {"nproc_per_node": 1, "threads_per_worker": a.threads, "device": "cpu"}, **more,
    }))
    return path


def ours(a, folder, images, steps, **more):
    subprocess.run(["rm", "-rf", str(folder / "run")], check=True)
    command = [a.cox, "run", str(run_file(a, folder, images, steps, **more)), "--log-format", "json"]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        sys.exit(done.stdout)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    summary = json.loads((folder / "run/summary.json").read_text())
    phases = summary["peak_memory"][0]["phases"]
    peak = max(phase["driver"] for phase in phases.values())
    return dict(step_ms=[line["total_ms"] for line in lines if "total_ms" in line],
                mib=(peak - phases["connecting"]["driver"]) / 2**20, loss=summary["losses"][0])


def status_mib(field):
    with open("/proc/self/status") as f:
        return next(int(line.split()[1]) for line in f if line.startswith(field)) / 1024


def torch_side(a):
    os.environ.update(HF_HUB_OFFLINE="1", OMP_NUM_THREADS=str(a.threads))
    import torch
    from safetensors.torch import load_file
    from torch import nn
    from torch.nn import functional as F
    from transformers import Qwen2_5_VLForConditionalGeneration
    torch.set_num_threads(a.threads)
    torch.manual_seed(0)
    model = Qwen2_5_VLForConditionalGeneration.from_pretrained(pathlib.Path(a.folder) / "model", dtype=torch.float32, attn_implementation="sdpa")
    visual = model.model.visual.requires_grad_(False)
    del model
    seen = []
    for block in visual.blocks:
        block.register_forward_hook(lambda _module, _inputs, output: seen.append(output))

    def network(*widths):
        layers = [nn.Linear(x, y) for x, y in zip(widths, widths[1:])]
        return nn.Sequential(*[part for layer in layers for part in (nn.GELU("tanh"), layer)][1:])

    width, between = LAYERS * DIM, [a.hidden] * (a.depth - 1)
    net = nn.Sequential(network(width, *between, a.latent), network(a.latent, *between, width))
    if a.compile:
        net.compile()
        for block in visual.blocks:
            block.compile()
    params = list(net.parameters())
    optimizer = torch.optim.AdamW(params, lr=1e-3, fused=True)
    samples = [load_file(path) for path in sorted(pathlib.Path(a.samples).glob("*.safetensors"))]
    side = SIDE // 14

    def extract(batch):
        seen.clear()
        with torch.no_grad():
            visual(torch.cat([sample["pixel_values"] for sample in batch]), grid_thw=torch.cat([sample["image_grid_thw"] for sample in batch]))
            layers = []
            for hidden in seen:
                # Patches as they run: pooling by their places would take one more copy, which is left out in favour of this side.
                grid = hidden.reshape(len(batch), side, side, DIM).permute(0, 3, 1, 2)
                layers.append(F.adaptive_avg_pool2d(grid, RESOLUTION).flatten(2).transpose(1, 2))
            return torch.stack(layers, 2).flatten(0, 1).flatten(1)

    def batch(number):
        return [samples[(number * a.batch + at) % len(samples)] for at in range(a.batch)]

    def step(x):
        loss = F.mse_loss(net(x), x)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(params, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()

    kept = [extract(batch(number)) for number in range(a.images // a.batch)] if a.cached else None
    before = status_mib("VmRSS")
    pathlib.Path("/proc/self/clear_refs").write_text("5")
    times, first = [], None
    if a.collect:
        everything = torch.cat([extract(batch(number)) for number in range(a.images // a.batch)])
        for x in everything.split(a.batch * RESOLUTION**2):
            first = step(x) if first is None else step(x) and first
    else:
        for number in range(a.steps):
            begin = time.perf_counter()
            loss = step(kept[number % len(kept)] if a.cached else extract(batch(number)))
            first = loss if first is None else first
            times.append((time.perf_counter() - begin) * 1e3)
    print(json.dumps(dict(step_ms=times, mib=status_mib("VmHWM") - before, loss=first)))


def theirs(a, folder, images, steps, *flags):
    # More images than these are the same ones again: what their trajectories take does not depend on what they show.
    distinct = min(images, OPTIONS["images"])
    samples = folder / f"samples-{distinct}"
    samples.mkdir(exist_ok=True)
    for number in range(distinct):
        out = samples / f"{number:05}.safetensors"
        if not out.exists():
            file = run_file(a, folder, distinct, 1)
            subprocess.run([a.cox, "data", "sample", str(file), "--index", str(number), "--out", str(out)], check=True, stdout=subprocess.DEVNULL)
    options = [x for name in OPTIONS for x in (f"--{name}", str(dict(images=images, steps=steps).get(name, getattr(a, name))))]
    command = [sys.executable, os.path.abspath(__file__), a.cox, a.folder, *options, "--samples", str(samples), *flags]
    out = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    return json.loads([line for line in out.splitlines() if line.startswith("{")][-1])


def accumulated(a):
    for images in a.accumulated:
        folder = prepare(a, images)
        steps = images // a.batch
        plan = subprocess.run([a.cox, "plan", str(run_file(a, folder, images, steps)), "--json"], check=True, stdout=subprocess.PIPE, text=True)
        (folder / f"plan-{images}.json").write_text(plan.stdout)
        collected, streamed = theirs(a, folder, images, steps, "--collect"), theirs(a, folder, images, steps)
        here = ours(a, folder, images, steps)
        values = images * RESOLUTION**2 * LAYERS * DIM
        print(f"{images} images, {values / 1e6:.1f} M values, {values * 4 / 2**20:.0f} MiB: PyTorch collected {collected['mib']:.0f} MiB, "
              f"streamed {streamed['mib']:.0f}; ours {here['mib']:.0f}", flush=True)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("cox")
    ap.add_argument("folder")
    for name, value in OPTIONS.items():
        ap.add_argument(f"--{name}", type=int, default=value)
    ap.add_argument("--cached", action="store_true")
    ap.add_argument("--accumulated", type=int, nargs="+")
    ap.add_argument("--samples", help=argparse.SUPPRESS)
    ap.add_argument("--collect", action="store_true", help=argparse.SUPPRESS)
    a = ap.parse_args()
    if a.samples:
        return torch_side(a)
    if a.accumulated:
        return accumulated(a)
    folder = prepare(a, a.images)
    epoch = a.images // a.batch if a.cached else 0
    more = {"cache": {"mode": "exact"}} if a.cached else {}
    flags = ["--cached"] if a.cached else []
    pairs = []
    for number in range(a.rounds):
        # The first epoch of a run with kept features computes them.
        pair = [ours(a, folder, a.images, epoch + a.warmup + a.steps, **more), theirs(a, folder, a.images, a.warmup + a.steps, *flags)]
        pair[0]["step_ms"] = pair[0]["step_ms"][epoch + a.warmup:]
        pair[1]["step_ms"] = pair[1]["step_ms"][a.warmup:]
        pairs.append(pair)
        for name, side in zip(("ours", "PyTorch"), pair):
            print(f"round {number}, {name:7s}: step {statistics.median(side['step_ms']):8.1f} ms, least {min(side['step_ms']):8.1f}, "
                  f"{side['mib']:8.1f} MiB, first loss {side['loss']:.5f}", flush=True)
    ratio = lambda of: statistics.median(of(one) / of(two) for one, two in pairs)
    print(f"ours / PyTorch: time {ratio(lambda side: statistics.median(side['step_ms'])):.2f} "
          f"(fastest steps {ratio(lambda side: min(side['step_ms'])):.2f}), memory {ratio(lambda side: side['mib']):.2f}")


if __name__ == "__main__":
    main()
