#!/usr/bin/env python3
"""What whole runs cost: two ranks against one, and the coordinator's share. Real `cox run`s, in turns: A B A B.

    runs.py ranks COX [--rounds 3] [CONFIG] [KEY=VALUE ...]         2 ranks of 1 thread against 1 rank of 2 threads
    runs.py coordinator COX [--rounds 3] [CONFIG] [KEY=VALUE ...]   1 rank with a coordinator against `cox worker --config`, which has none

CONFIG is configs/quickstart.yaml if not given. Seconds are `train_seconds` of summary.json: from the first step to the last.
The coordinator is a child of the launcher. Processor time of the two, as last seen before they ended, is held against that of the
whole run, workers included.
"""
import argparse
import json
import os
import pathlib
import statistics
import subprocess
import tempfile
import threading
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
TICK = os.sysconf("SC_CLK_TCK")


def own_seconds(pid):
    """Processor time of a process, not of its children."""
    fields = open(f"/proc/{pid}/stat").read().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / TICK


def coordinators(launcher):
    """Children of the launcher that are coordinators."""
    for children in pathlib.Path(f"/proc/{launcher}/task").glob("*/children"):
        for pid in children.read_text().split():
            if b"\0coordinator\0" in pathlib.Path(f"/proc/{pid}/cmdline").read_bytes():
                yield int(pid)


def measure(command, threads):
    """Runs `command` to its end; returns summary.json and processor times."""
    with tempfile.TemporaryDirectory() as out:
        command = [*command, f"run.output_dir={out}/run"]
        # The launcher sets the second for its workers; without a launcher it has to be set here.
        environment = {"MIMALLOC_PURGE_DELAY": "-1", **os.environ, "RAYON_NUM_THREADS": str(threads)}
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        printed = []
        reader = threading.Thread(target=lambda: printed.extend(process.stdout))
        reader.start()
        own = {}
        # The exit status is left for wait4, so the launcher cannot vanish under the reading of its times.
        while not os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG):
            try:
                own.update({pid: own_seconds(pid) for pid in [process.pid, *coordinators(process.pid)]})
            except (FileNotFoundError, ProcessLookupError):
                pass  # a child ended in between
            time.sleep(0.05)
        _, code, usage = os.wait4(process.pid, 0)
        reader.join()
        assert code == 0, "".join(printed)
        summary = json.load(open(f"{out}/run/summary.json"))
        return dict(
            steps=summary["steps"], seconds=summary["train_seconds"], samples_per_second=summary["samples_per_second"],
            peak_mib=[rank["driver"] / 2**20 for rank in summary["peak_memory"]], own=sum(own.values()), all=usage.ru_utime + usage.ru_stime)


def show(name, run):
    own = "" if name == "alone" else f"launcher and coordinator {run['own']:.2f} s, "
    print(f"{name:24s} {run['seconds']:7.2f} s of training, {run['seconds'] / run['steps'] * 1e3:8.1f} ms a step, "
          f"{run['samples_per_second']:7.2f} samples/s, processor {run['all']:7.1f} s, {own}"
          f"peak {'/'.join(f'{mib:.0f}' for mib in run['peak_mib'])} MiB", flush=True)
    return run


def ranks(a, train):
    ratios = []
    for _ in range(a.rounds):
        two = show("2 ranks x 1 thread", measure([*train, "--nproc-per-node", "2"], 1))
        one = show("1 rank x 2 threads", measure([*train, "--nproc-per-node", "1"], 2))
        ratios.append(two["samples_per_second"] / one["samples_per_second"])
    print(f"throughput of 2 x 1 over 1 x 2: {statistics.median(ratios):.2f} ({', '.join(f'{r:.2f}' for r in ratios)})")


def coordinator(a, train):
    extra, share = [], []
    for _ in range(a.rounds):
        led = show("with a coordinator", measure([*train, "--nproc-per-node", "1"], a.threads))
        alone = show("alone", measure([a.cox, "worker", "--config", a.config, *a.overrides], a.threads))
        extra.append(led["seconds"] / alone["seconds"] - 1)
        share.append(led["own"] / led["all"])
        print(f"    launcher and coordinator: {led['own'] / led['steps'] * 1e3:.2f} ms of processor time a step, start and end included")
    print(f"processor time of launcher and coordinator: {100 * statistics.median(share):.2f} % of the run's ({', '.join(f'{100 * s:.2f}' for s in share)})")
    print(f"wall time of a step, with against without: {100 * statistics.median(extra):+.1f} % ({', '.join(f'{100 * e:+.1f}' for e in extra)})")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=["ranks", "coordinator"])
    parser.add_argument("cox")
    parser.add_argument("config", nargs="?", default="configs/quickstart.yaml")
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    a = parser.parse_intermixed_args()
    a.cox = os.path.abspath(a.cox)
    train = [a.cox, "run", a.config, *a.overrides]
    {"ranks": ranks, "coordinator": coordinator}[a.what](a, train)


main()
