#!/usr/bin/env python3
"""Chats of uneven length, by two builds of cox in turns: the same chats in the same order.

    python uneven_chats.py OLD_COX COX MODEL_DIR [--rounds 5] [--micro 8] [--longest 384] [--threads 2]

Lengths are spread evenly over the logarithm, from 24 tokens to the longest, text only. A step is one micro-batch. Printed: the mean of
the steps' milliseconds, and the peak of resident memory in forward and backward beyond what was held before the first batch.
"""
import argparse
import json
import math
import pathlib
import random
import statistics
import subprocess
import tempfile

WORDS = ["reach", "push", "the", "goal", "block", "and", "move"]
STEPS = 6


def write(a, folder):
    draw = random.Random(1)
    with open(folder / "chats.jsonl", "w") as out:
        for _ in range(STEPS * a.micro):
            tokens = round(24 * math.exp(draw.random() * math.log(a.longest / 24)))
            answer = " ".join(draw.choice(WORDS) for _ in range(tokens))
            turns = [{"role": "user", "content": "Say it."}, {"role": "assistant", "content": answer}]
            out.write(json.dumps({"messages": turns}) + "\n")
    run = {
        "run": {"name": "bench", "output_dir": str(folder / "run")}, "task": {"type": "sft"}, "model": {"path": a.model},
        "lora": {"rank": 16, "alpha": 16}, "data": {"path": str(folder / "chats.jsonl"), "max_tokens": a.longest},
        "train": {"steps": STEPS, "global_batch": a.micro, "micro_batch": a.micro},
        "launch": {"nproc_per_node": 1, "threads_per_worker": a.threads, "device": "cpu"},
    }
    (folder / "run.yaml").write_text(json.dumps(run))


def run(cox, folder):
    subprocess.run(["rm", "-rf", str(folder / "run")], check=True)
    done = subprocess.run([cox, "run", str(folder / "run.yaml"), "--log-format", "json"], stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        raise SystemExit(done.stdout)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    steps = [line["total_ms"] for line in lines if "total_ms" in line][1:]
    summary = json.loads((folder / "run/summary.json").read_text())
    phases = summary["peak_memory"][0]["phases"]
    peak = max(phases[phase]["driver"] for phase in ("forward", "backward")) - phases["connecting"]["driver"]
    return statistics.mean(steps), peak / 2**20, summary["losses"]


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("old")
    ap.add_argument("cox")
    ap.add_argument("model")
    for name, value in dict(rounds=5, micro=8, longest=384, threads=2).items():
        ap.add_argument(f"--{name}", type=int, default=value)
    a = ap.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        write(a, folder)
        pairs = []
        for number in range(a.rounds):
            pairs.append([run(cox, folder) for cox in (a.old, a.cox)])
            (old, old_mib, old_loss), (new, new_mib, new_loss) = pairs[-1]
            print(f"pair {number}: step {old:.0f} -> {new:.0f} ms ({new / old:.2f}), memory {old_mib:.0f} -> {new_mib:.0f} MiB, "
                  f"last loss {old_loss[-1]:.5f}, {new_loss[-1]:.5f}", flush=True)
        for what, at in ("time", 0), ("memory", 1):
            print(what, f"{statistics.median(new[at] / old[at] for old, new in pairs):.2f}")


main()
