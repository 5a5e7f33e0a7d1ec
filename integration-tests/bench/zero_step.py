#!/usr/bin/env python3
"""The partitioned optimizer step next to what a PyTorch user has: DDP + AdamW, and DeepSpeed ZeRO-2.

    cargo bench --bench zero_step --no-run
    python zero_step.py BENCH_EXECUTABLE [--elements 100000000] [--world 2] [--rounds 3] [--steps 5]

Every side trains the same number of fp32 elements on CPU processes of one thread, clips to norm 1, and takes AdamW steps. A step
is everything between "gradients of this rank are computed" and "all ranks have the new weights". In PyTorch reductions start
inside backward, so backward + step is timed, and the time of the same backward without any of it (`plain`) is subtracted. The
sides are launched in turns; `replicated` also keeps what the loss of a neighbour would need, as training does by default; the first two steps of each launch are not counted. Memory is the peak resident set above that of
the process after its imports. Needs torch and deepspeed.
"""
import argparse
import json
import os
import statistics
import subprocess
import sys
import time

# One thread each; `ddp-fused` is torch's fastest AdamW on a CPU.
OURS = {"ours": [], "replicated": ["--replica", "1"]}
SIDES = ["ddp", "ddp-fused", "zero2", "plain"]


def rss_mb(field):
    with open("/proc/self/status") as f:
        return next(int(line.split()[1]) for line in f if line.startswith(field)) / 1024


def torch_rank(a):
    os.environ.update(OMP_NUM_THREADS="1", DS_ACCELERATOR="cpu", DS_BUILD_OPS="0", RANK=str(a.rank), LOCAL_RANK=str(a.rank), WORLD_SIZE=str(a.world),
                      MASTER_ADDR="127.0.0.1", MASTER_PORT=str(a.port),
                      PATH=os.path.dirname(sys.executable) + os.pathsep + os.environ["PATH"])  # DeepSpeed looks for ninja there
    import warnings
    warnings.filterwarnings("ignore")
    import torch
    import torch.distributed as dist
    torch.set_num_threads(1)
    if a.side == "zero2":
        import deepspeed
        deepspeed.init_distributed("gloo")
    else:
        dist.init_process_group("gloo")
    base = rss_mb("VmRSS")

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            left, self.ps = a.elements, torch.nn.ParameterList()
            while left > 0:
                n = min(left, 4 << 20)
                self.ps.append(torch.nn.Parameter(torch.full((n,), 0.1)))
                left -= n

        def forward(self):  # gradients of 0.01 everywhere, for next to nothing
            return sum(p.sum() for p in self.ps) * 0.01

    model = Model()
    opt = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=1e-8, **({"fused": True} if a.side == "ddp-fused" else {}))
    if a.side == "zero2":
        engine, *_ = deepspeed.initialize(model=model, optimizer=opt, config=dict(
            train_micro_batch_size_per_gpu=1, gradient_accumulation_steps=1, gradient_clipping=1.0, zero_optimization=dict(stage=2),
            zero_allow_untested_optimizer=True, communication_data_type="fp32", steps_per_print=10**9))
    elif a.side != "plain":
        engine = torch.nn.parallel.DistributedDataParallel(model)
    times = []
    for _ in range(a.steps):
        dist.barrier()
        if a.side == "zero2":
            loss = engine()
            begin = time.perf_counter()
            engine.backward(loss)
            engine.step()
        elif a.side == "plain":
            loss = model()
            begin = time.perf_counter()
            loss.backward()
        else:
            loss = engine()
            begin = time.perf_counter()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            opt.step()
        times.append((time.perf_counter() - begin) * 1e3)
        opt.zero_grad(set_to_none=True)
    out = [None] * a.world
    dist.all_gather_object(out, (times, rss_mb("VmHWM"), base))
    if a.rank == 0:
        print(json.dumps(dict(step_ms=[max(t) for t in zip(*(o[0] for o in out))], peak_rss_mb=max(o[1] for o in out), above_mb=max(o[1] - o[2] for o in out))))
    dist.barrier()


def launch(a, side, port):
    if side in OURS:
        cmd = [a.executable, "--world", a.world, "--elements", a.elements, "--steps", a.steps, *OURS[side]]
        out = subprocess.run(list(map(str, cmd)), check=True, stdout=subprocess.PIPE, text=True).stdout
    else:
        cmd = [sys.executable, os.path.abspath(__file__), "x", "--side", side, "--port", port, "--world", a.world, "--elements", a.elements, "--steps", a.steps]
        ranks = [subprocess.Popen(list(map(str, cmd + ["--rank", r])), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) for r in range(a.world)]
        outs = [p.communicate()[0] for p in ranks]
        out = outs[0]
    d = json.loads([line for line in out.splitlines() if line.startswith("{")][-1])
    return d


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("executable")
    ap.add_argument("--elements", type=int, default=100_000_000)
    ap.add_argument("--world", type=int, default=2)
    ap.add_argument("--rounds", type=int, default=3)
    ap.add_argument("--steps", type=int, default=6)
    ap.add_argument("--side")
    ap.add_argument("--rank", type=int)
    ap.add_argument("--port", type=int, default=0)
    a = ap.parse_args()
    if a.rank is not None:
        return torch_rank(a)
    runs = {side: [] for side in [*OURS, *SIDES]}
    for i in range(a.rounds):
        for j, side in enumerate(runs):
            d = launch(a, side, 27000 + os.getpid() % 1000 * 8 + i * 5 + j)
            d["median"] = statistics.median(d["step_ms"][2:])
            runs[side].append(d)
            print(f"round {i} {side:10s} step {d['median']:9.1f} ms   peak {d['peak_rss_mb']:8.1f} MB   above imports {d.get('above_mb', d['peak_rss_mb']):8.1f} MB   {d.get('communication_ms', '')}", flush=True)
    plain = statistics.median(d["median"] for d in runs["plain"])
    for own in OURS:
        ours = statistics.median(d["median"] for d in runs[own])
        for side in ["ddp", "ddp-fused", "zero2"]:
            theirs = statistics.median(d["median"] for d in runs[side]) - plain
            ratios = [(d["median"] - plain) / o["median"] for d, o in zip(runs[side], runs[own])]
            memory = statistics.median(d["above_mb"] for d in runs[side]) / statistics.median(d["peak_rss_mb"] for d in runs[own])
            print(f"{side:10s} step without backward {theirs:8.1f} ms, {own} {ours:8.1f} ms: {statistics.median(ratios):5.2f} x the time, {memory:5.2f} x the memory")


main()
