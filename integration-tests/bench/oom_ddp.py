#!/usr/bin/env python3
"""Out of memory on one rank of four: what PyTorch DDP does, next to `cox run`.

    python oom_ddp.py [--cox target/release/cox] [--patience 20]
    python oom_ddp.py --rounds 5 --cox BEFORE --cox AFTER [--set train.global_batch=64]        ours alone, binaries in turns, medians

PyTorch's side: four processes, gloo, a small MLP under DistributedDataParallel; rank 2 raises torch.OutOfMemoryError in step 3, in forward
or in backward (after the first gradient bucket has gone). Three ways of dealing with it are tried:
    uncaught   as a plain script: what torchrun would see
    skip       the usual `except torch.OutOfMemoryError: continue`
    halve      accelerate's find_executable_batch_size on the rank that failed: halve, try again
A run that says nothing for --patience seconds is called hung (with the default timeout of the process group that is 30 minutes).
Ours: `cox run configs/quickstart.yaml` with four ranks and COX_FAULT_MEMORY; steps, attempts and the time of the step are read from the timeline. A step's
time is from one rank's line to its next; "the others" are all but the first and the one with the fault, so most of them run in the smaller micro-batch.
"""
import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time

STEPS, WORLD, BAD_STEP, BAD_RANK = 8, 4, 3, 2


def rank_main(where, how):
    import torch
    import torch.distributed as dist
    import torch.nn as nn
    from datetime import timedelta
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo", timeout=timedelta(minutes=30))
    torch.manual_seed(0)
    armed = dict(step=-1, once=True)

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            if armed["step"] == BAD_STEP and where == "forward" and armed["once"]:
                armed["once"] = False
                raise torch.OutOfMemoryError("injected")
            return x.clone()

        @staticmethod
        def backward(ctx, g):
            if armed["step"] == BAD_STEP and where == "backward" and armed["once"]:
                armed["once"] = False
                raise torch.OutOfMemoryError("injected")
            return g

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(512, 2048), nn.Linear(2048, 512)

        def forward(self, x):
            h = torch.relu(self.a(x))
            return self.b(Fails.apply(h) if rank == BAD_RANK else h)

    model = nn.parallel.DistributedDataParallel(Net(), bucket_cap_mb=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batch = 16
    for step in range(STEPS):
        armed["step"] = step
        data = torch.randn(16, 512, generator=torch.Generator().manual_seed(step * WORLD + rank))

        def attempt(size):
            optimizer.zero_grad()
            for part in data.split(size):
                (model(part).square().mean() * len(part) / 16).backward()

        try:
            attempt(batch)
        except torch.OutOfMemoryError:
            if how == "uncaught":
                raise
            if how == "skip":
                continue
            batch //= 2
            attempt(batch)
        optimizer.step()
        if rank == 0:
            print(f"step {step}", flush=True)
    weights = sum(p.double().sum().item() for p in model.parameters())
    everyone = [None] * WORLD
    dist.all_gather_object(everyone, weights)
    if rank == 0:
        print("ranks agree" if len(set(everyone)) == 1 else f"ranks differ: {everyone}", flush=True)


def ddp(where, how, patience):
    port = str(29600 + os.getpid() % 300 + ["uncaught", "skip", "halve"].index(how) * 2 + (where == "backward"))
    ranks = [subprocess.Popen([sys.executable, os.path.abspath(__file__), "--rank-main", where, how], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                              env=dict(os.environ, RANK=str(r), WORLD_SIZE=str(WORLD), MASTER_ADDR="127.0.0.1", MASTER_PORT=port, GLOO_LOG_LEVEL="ERROR")) for r in range(WORLD)]
    message, last = [], [time.time()]

    def listen(stream):
        for line in stream:
            message.append(line)
            last[0] = time.time()

    ears = [threading.Thread(target=listen, args=(p.stdout,), daemon=True) for p in ranks]
    for ear in ears:
        ear.start()
    # Imports take their time on a loaded machine.
    while time.time() - last[0] < (patience if message else 300) and any(p.poll() is None for p in ranks):
        time.sleep(0.1)
    hung = [r for r, p in enumerate(ranks) if p.poll() is None]
    codes = [p.poll() for p in ranks]
    for p in ranks:
        p.kill()
        p.wait()
    for ear in ears:
        ear.join()
    steps = sum(line.startswith("step ") for line in message)
    verdict = f"ranks {hung} hang" if hung else f"exit codes {codes}"
    tail = next((line for line in reversed(message) if line.startswith("ranks ")), "").strip()
    print(f"DDP, {where}, {how}: {steps} of {STEPS} steps; {verdict}{'; ' + tail if tail else ''}", flush=True)


def ours(cox, where, overrides=(), quiet=False):
    with tempfile.TemporaryDirectory() as dir:
        command = [cox, "run", "configs/quickstart.yaml", "--nproc-per-node", "4", f"run.output_dir={dir}/run", "train.steps=12", "train.global_batch=16",
                   "train.micro_batch=4", "eval.samples=0", f"memory.capacity={600 << 20}", *overrides]
        done = subprocess.run(command, env=dict(os.environ, COX_FAULT_MEMORY=f"rank={BAD_RANK} step={BAD_STEP} phase={where} mib=200"), capture_output=True, text=True)
        lines = [json.loads(line) for line in open(f"{dir}/run/memory/rank-0002.jsonl")] if done.returncode == 0 else []
    ends = [line["unix_ms"] for line in lines]
    took = [b - a for a, b in zip(ends, ends[1:])]
    usual = statistics.median(took[:BAD_STEP - 1] + took[BAD_STEP:]) if took else float("nan")
    bad = took[BAD_STEP - 1] if took else float("nan")
    attempts = [line["attempts"] for line in lines]
    gave_up = next((line.split("; ")[-1].strip() for line in (done.stdout + done.stderr).splitlines() if " early" in line and "stopped " in line), "")
    if quiet:
        return bad, usual, gave_up
    print(f"cox, {where}: exit code {done.returncode}, {len(lines)} of 12 steps, attempts {attempts}; step {BAD_STEP} took {bad} ms, the others {usual:.0f}: "
          f"{bad / usual:.2f} step times", flush=True)
    return bad, usual, gave_up


def compare(binaries, rounds, overrides):
    """Ours, the binaries in turns. A ratio is that of one run."""
    for where in ["forward", "backward"]:
        seen = {cox: [] for cox in binaries}
        for _ in range(rounds):
            for cox in binaries:
                seen[cox].append(ours(cox, where, overrides, quiet=True))
        for cox, runs in seen.items():
            ratios = sorted(bad / usual for bad, usual, _ in runs)
            middle = [statistics.median(run[i] for run in runs) for i in (0, 1)]
            print(f"{cox}, {where}: {statistics.median(ratios):.2f} step times ({ratios[0]:.2f} to {ratios[-1]:.2f}, {rounds} runs); {middle[0]:.0f} ms, the others {middle[1]:.0f}; "
                  f"{sorted(set(run[2] for run in runs))}", flush=True)


def main():
    if sys.argv[1:2] == ["--rank-main"]:
        return rank_main(sys.argv[2], sys.argv[3])
    parser = argparse.ArgumentParser()
    parser.add_argument("--cox", action="append")
    parser.add_argument("--rounds", type=int, default=0)
    parser.add_argument("--set", action="append", default=[])
    parser.add_argument("--patience", type=float, default=20)
    a = parser.parse_args()
    binaries = a.cox or ["target/release/cox"]
    if a.rounds:
        return compare(binaries, a.rounds, a.set)
    for where in ["forward", "backward"]:
        ours(binaries[0], where)
        for how in ["uncaught", "skip", "halve"]:
            ddp(where, how, a.patience)


main()
