#!/usr/bin/env python3
"""How long training pauses where another generation of kept features begins to serve. Real `cox run`s, two ranks, read from their logs.

    phase_pause.py COX [COX ...] [--rounds 1] [--changes 6] [--without-probes] [KEY=VALUE ...]

configs/quickstart-cached.yaml as it is (live for 24 steps of 120), for `--changes` phase changes. Of each phase change three times in milliseconds:

    gap     between the commits of the last live step and of the step that begins the generation, as the coordinator's log has them
    pause   what of it was not that step itself (its `total_ms`)
    most    the largest gap between commits in the 40 steps from there on: what drift takes is measured in them

beside the median gap between live steps of the same run. The first phase change measures no drift; it is listed by itself. With several programs (before, after) they
take turns, and so do the settings: the default 32 probes, 32 where drift decides, and with `--without-probes` none. Where drift decides, the old generation goes on at the phase change and the
new one begins some steps later: `gap` and `pause` are then the larger ones of the two.
"""
import argparse
import datetime
import json
import os
import pathlib
import statistics
import subprocess
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[2]
INTERVAL, LIVE = 120, 24
# Of the last cached phase, enough to see drift measured.
TAIL = 40
SETTINGS = {"32 probes": [], "32 probes, drift decides": ["cache.rebuild_above=1e-9"]}
WITHOUT = {"no probes": ["cache.probe_samples=0"]}


def settings(a):
    return {**SETTINGS, **WITHOUT} if a.without_probes else SETTINGS


def steps(a):
    return INTERVAL * (a.changes - 1) + LIVE + TAIL


def run(a, cox, setting):
    """Commits of one run: step -> (seconds, total_ms, generation)."""
    with tempfile.TemporaryDirectory() as out:
        keys = [f"run.output_dir={out}/run", f"train.steps={steps(a)}", "train.epochs=null", "train.checkpoint_every=0", "eval.samples=0"]
        command = [cox, "run", "configs/quickstart-cached.yaml", *keys, *settings(a)[setting], *a.override, "--log-format", "json"]
        done = subprocess.run(command, cwd=ROOT, env=os.environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        assert done.returncode == 0, done.stdout[-4000:]
    commits = {}
    for line in done.stdout.splitlines():
        at = line.find('{"timestamp"')
        line = json.loads(line[at:]) if at >= 0 else {}
        if "committed" in line and "total_ms" in line:
            seconds = datetime.datetime.fromisoformat(line["timestamp"].replace("Z", "+00:00")).timestamp()
            commits[line["step"]] = (seconds, line["total_ms"], line["cache_generation"])
    assert len(commits) == steps(a), f"{len(commits)} steps are in the log"
    return commits


def read(commits, changes):
    """Median live gap, and (gap, pause, most) of every phase change."""
    gap = lambda step: 1e3 * (commits[step][0] - commits[step - 1][0])
    pause = lambda step: gap(step) - commits[step][1]
    live = [gap(step) for step in commits if step % INTERVAL in range(1, LIVE) and step > LIVE]
    found = []
    for change in range(changes):
        first = change * INTERVAL + LIVE
        phase = range(first, first + TAIL)
        flips = [step for step in phase if step == first or commits[step][2] != commits[step - 1][2]]
        rest = [gap(step) for step in phase if step not in flips]
        found.append((max(map(gap, flips)), max(map(pause, flips)), max(rest)))
    return statistics.median(live), found


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="+", metavar="COX or KEY=VALUE")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--changes", type=int, default=6)
    parser.add_argument("--without-probes", action="store_true")
    a = parser.parse_args()
    programs = [os.path.abspath(word) for word in a.words if "=" not in word]
    a.override = [word for word in a.words if "=" in word]
    seen = {(cox, setting): [] for setting in settings(a) for cox in programs}
    for _ in range(a.rounds):
        for cox, setting in seen:
            seen[cox, setting].append(read(run(a, cox, setting), a.changes))
    for (cox, setting), rounds in seen.items():
        live = statistics.median(live for live, _ in rounds)
        first = [changes[0] for _, changes in rounds]
        later = [change for _, changes in rounds for change in changes[1:]]
        median = lambda changes, which: statistics.median(change[which] for change in changes)
        gaps = sorted(change[0] for change in later)
        print(f"{cox}: {setting}: live step {live:.0f} ms; first phase change {median(first, 0):.0f}; {len(later)} later phase changes: gap {median(later, 0):.0f} "
              f"({gaps[0]:.0f} to {gaps[-1]:.0f}), pause {median(later, 1):.0f}, most after it {median(later, 2):.0f}", flush=True)


main()
