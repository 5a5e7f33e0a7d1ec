#!/usr/bin/env python3
"""What `cache.mode: periodic` makes of a whole run: time and held-out error next to `off`. Real `cox run`s, in turns: off, periodic, off, ...

    cache_run.py COX [CONFIG] [KEY=VALUE ...] [--rounds 3] [--epochs 10] [--interval 5] [--ranks 2]

CONFIG is configs/quickstart.yaml if not given, with images of 224 x 224 pixels, one draw of noise a sample, and an expert of 64 instead of
128 values (a twelfth of the model, where pi0's is a tenth). What can be gained is bounded by the expert's share: with V and E the time of the
rest and of the expert in an epoch, and F that of filling, off : periodic = 10 (V + E) : (2 V + 10 E + 2 F). The quickstart as it is has nine
image tokens and four draws; there the expert is 60 % of a step, and the limit is 1.4. Keys that are given come last and win. Every run has the same samples, draws and learning rates; `periodic` computes features
anew in every store, so its time has in it what filling costs. Seconds are `train_seconds` of summary.json: from the first step to the last,
live epochs, fills and measurements of drift included. The error is the mean squared one of normalised actions on held-out episodes; about 1 is what knowing nothing but the mean gives, and near it
the ratio says little. Each round has a seed of its own, the same for both runs: errors of one short run differ by a few percent from seed to seed.
A cached step waits for data if data threads are slower than the step: that share is shown of rank 0. Processor seconds are of all
processes of a run; their ratio means something on a machine that others use, too.
"""
import argparse
import json
import os
import pathlib
import resource
import statistics
import subprocess
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[2]


QUICKSTART = ["data.min_pixels=50176", "data.max_pixels=50176", "expert.repeated_noise=1", "expert.width=64"]


def processor_seconds():
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def run(a, mode, seed):
    """One run to its end, with a store of its own; returns summary.json."""
    with tempfile.TemporaryDirectory() as out:
        keys = [f"run.output_dir={out}/run", f"run.seed={seed}", f"train.epochs={a.epochs}", "train.steps=null", "train.checkpoint_every=0", f"cache.mode={mode}",
                f"cache.interval.epochs={a.interval}", "cache.live.epochs=1"]
        command = [a.cox, "run", a.config, *keys, *a.override, "--nproc-per-node", str(a.ranks)]
        before = processor_seconds()
        done = subprocess.run(command, cwd=ROOT, env=os.environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        assert done.returncode == 0, done.stdout
        return {**json.load(open(f"{out}/run/summary.json")), "processor": processor_seconds() - before}


def show(mode, summary):
    seconds, steps = summary["train_seconds"], summary["steps"] - summary["first_step"]
    error, cache = summary["error_after"]["mse_normalized"], summary["cache"]
    line = f"{mode:9s} {seconds:8.2f} s, processor {summary['processor']:.1f} s, {1e3 * seconds / steps:7.1f} ms a step, error {error:.5f}, loss {summary['loss_last']:.5f}"
    if cache:
        cached, waiting = cache["cached_seconds"], cache["cached_waiting_seconds"]
        line += (f"; {cache['cached_steps']} of {steps} steps cached at {1e3 * cached / max(cache['cached_steps'], 1):.1f} ms, "
                 f"{100 * waiting / max(cached, 1e-9):.1f} % of it waiting; {cache['hits']} hits, {cache['misses']} misses, "
                 f"filling {cache['fill_seconds']:.2f} s, {cache['bytes'] / 2**20:.1f} MiB; "
                 f"drift {', '.join(format(d['relative_l2'], '.3f') for d in cache['drift']) or 'not measured'}")
    print(line, flush=True)
    return seconds, summary["processor"], error


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cox", type=os.path.abspath)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--interval", type=int, default=5)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("config", nargs="?")
    parser.add_argument("override", nargs="*")
    a = parser.parse_args()
    if a.config and "=" in a.config:
        a.config, a.override = None, [a.config, *a.override]
    if not a.config:
        a.config, a.override = "configs/quickstart.yaml", [*QUICKSTART, *a.override]
    ratios, processor, errors = [], [], []
    for seed in range(7, 7 + a.rounds):
        (off, off_busy, off_error), (periodic, busy, error) = show("off", run(a, "off", seed)), show("periodic", run(a, "periodic", seed))
        ratios.append(off / periodic)
        processor.append(off_busy / busy)
        errors.append(error / off_error)
    print(f"off over periodic, {a.epochs} epochs, K = {a.interval}: {statistics.median(ratios):.2f} times the time "
          f"({', '.join(f'{r:.2f}' for r in ratios)}), {statistics.median(processor):.2f} times the processor; error {statistics.median(errors):.3f} of off's")


main()
