#!/usr/bin/env python3
"""Collectives of the TCP ring next to Gloo's on the loopback interface, turn by turn in one run.

    cargo bench --bench collectives --no-run
    python collectives.py BENCH_EXECUTABLE [--rounds 15] [--worlds 2,4] [--json FILE]

Both sides keep their processes, one thread each, and answer the same commands: `operation bytes repeats` -> seconds of the
slowest rank. Each round asks both for the same case, in alternating order, so that whatever else the machine does hits both.
Reported are medians: wall time, processor time of all ranks together (which says more on a machine that is not idle), and
the medians of the rounds' ratios. Needs torch, and Linux for processor times.
"""
import argparse
import json
import os
import statistics
import subprocess
import sys
import time


def gloo_rank(rank, world, port):
    """One rank of the Gloo side."""
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    print("ready", flush=True)
    size, whole, part = None, None, None
    for line in sys.stdin:
        operation, nbytes, repeats = line.split()
        n = -(-int(nbytes) // 4 // world) * world
        if n != size:
            size, whole, part = n, torch.ones(n), torch.ones(n // world)
        run = {
            "all_reduce": lambda: dist.all_reduce(whole),
            "reduce_scatter": lambda: dist.reduce_scatter_tensor(part, whole),
            "all_gather": lambda: dist.all_gather_into_tensor(whole, part),
            "broadcast": lambda: dist.broadcast(whole, 0),
            "barrier": lambda: dist.barrier(),
        }[operation]
        dist.barrier()
        begin = time.perf_counter()
        for _ in range(int(repeats)):
            run()
        print((time.perf_counter() - begin) / int(repeats), flush=True)


class Side:
    def __init__(self, commands):
        pipe = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)
        self.ranks = [subprocess.Popen(c, **pipe) for c in commands]
        self.first = [r.stdout.readline().strip() for r in self.ranks]

    def say(self, line):
        for r in self.ranks:
            r.stdin.write(line + "\n")
            r.stdin.flush()

    def time(self, case):
        """Wall seconds of the slowest rank and processor seconds of all ranks, per repeat."""
        before = self.cpu()
        self.say("%s %d %d" % case)
        wall = max(float(r.stdout.readline()) for r in self.ranks)
        return wall, (self.cpu() - before) / case[2]

    def cpu(self):
        total = 0
        for r in self.ranks:
            for task in os.listdir(f"/proc/{r.pid}/task"):
                with open(f"/proc/{r.pid}/task/{task}/schedstat") as f:
                    total += int(f.read().split()[0])
        return total / 1e9

    def close(self):
        for r in self.ranks:
            r.stdin.close()
        for r in self.ranks:
            r.wait()


def sides(executable, world, port):
    ours = Side([[executable, "--rank", str(r), "--world", str(world)] for r in range(world)])
    ours.say(" ".join(ours.first))
    me = [sys.executable, os.path.abspath(__file__), "--gloo-world", str(world), "--gloo-port", str(port)]
    return ours, Side([me + ["--gloo-rank", str(r)] for r in range(world)])


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("executable", nargs="?")
    ap.add_argument("--rounds", type=int, default=15)
    ap.add_argument("--worlds", default="2,4")
    ap.add_argument("--only", default="", help="operations, separated by commas")
    ap.add_argument("--json")
    for flag in ("rank", "world", "port"):
        ap.add_argument("--gloo-" + flag, type=int)
    a = ap.parse_args()
    if a.gloo_rank is not None:
        return gloo_rank(a.gloo_rank, a.gloo_world, a.gloo_port)
    cases = [(op, mib << 20, 8 if mib == 1 else 1) for mib in (1, 16, 128) for op in ("all_reduce", "reduce_scatter", "all_gather", "broadcast")]
    cases += [("all_reduce", 64, 50), ("barrier", 64, 50)]
    print(f"{'operation':16s} {'ranks':>5s} {'bytes':>10s} {'ring ms':>9s} {'gloo ms':>9s} {'gloo/ring':>9s} {'ring cpu':>9s} {'gloo cpu':>9s} {'gloo/ring':>9s}")
    for world in map(int, a.worlds.split(",")):
        ours, gloo = sides(a.executable, world, 29000 + os.getpid() % 2000 + world)
        for case in cases:
            if a.only and case[0] not in a.only.split(","):
                continue
            ours.time(case), gloo.time(case)  # warm-up
            ring_s, gloo_s = [], []
            for i in range(a.rounds):
                for side, into in ((ours, ring_s), (gloo, gloo_s))[:: 1 if i % 2 else -1]:
                    into.append(side.time(case))
            med = lambda side, i: statistics.median(t[i] for t in side)
            wall, cpu = (statistics.median(g[i] / r[i] for g, r in zip(gloo_s, ring_s)) for i in (0, 1))
            print(f"{case[0]:16s} {world:5d} {case[1]:10d} {med(ring_s, 0)*1e3:9.3f} {med(gloo_s, 0)*1e3:9.3f} {wall:9.2f} {med(ring_s, 1)*1e3:9.3f} {med(gloo_s, 1)*1e3:9.3f} {cpu:9.2f}", flush=True)
            if a.json:
                with open(a.json, "a") as f:
                    f.write(json.dumps(dict(operation=case[0], world=world, bytes=case[1], ring=ring_s, gloo=gloo_s, wall_ratio=wall, cpu_ratio=cpu)) + "\n")
        ours.close(), gloo.close()


main()
