#!/usr/bin/env python3
"""Tables from what came back of calls: `worker/cuda/gpu/results.py RESULTS..`, each a results.tar.gz or a folder of it.

A later one takes the place of an earlier one's steps of the same name. Each aim has a verdict: reached, missed, or not measured.
"""
import json
import pathlib
import sys
import tarfile
import tempfile

import shape


def gib(size):
    return "-" if not size else f"{size / 2**30:.2f} GiB"


def ratio(ours, theirs):
    return ours / theirs if ours and theirs else None


def read(places):
    """{name of a file: its text}."""
    found = {}
    for place in map(pathlib.Path, places):
        with tempfile.TemporaryDirectory() as scratch:
            if place.is_file():
                with tarfile.open(place) as tar:
                    tar.extractall(scratch, filter="data")
                place = pathlib.Path(scratch)
            found.update({file.name: file.read_text(errors="replace") for file in sorted(place.rglob("*")) if file.is_file()})
    return found


def table(head, rows):
    rows = list(rows)
    if not rows:
        return f"{head[0]}: nothing came back\n"
    return "\n".join("| " + " | ".join(map(str, row)) + " |" for row in [head, ["---"] * len(head), *rows]) + "\n"


def ours(found):
    names = [name.removesuffix("-summary.json") for name in found if name.endswith("-summary.json")]
    return {name: json.loads(found[f"{name}.json"]) for name in names if f"{name}.json" in found}


def peers(found):
    lines = [json.loads(line) for line in found.get("peers.jsonl", "").splitlines()]
    return {line["variant"]: line for line in lines if "step_ms" in line}


def aims(steps, peer):
    """Of each: what it asks, what was measured, and what that means."""
    full, none = steps.get("3b-full", {}), steps.get("3b-none", {})
    best = min((step.get("ms") for step in (full, none) if step.get("ms")), default=None)
    fastest = lambda how: min((line["step_ms"] for name, line in peer.items() if name.startswith(how)), default=None)
    eager = peer.get("eager-full", {})
    planned = ratio(full.get("planned_in_use"), full.get("in_use"))
    compiled = sum(step["compiled_here"] for step in steps.values()) if steps else None
    worst = max((step["worst"] for step in steps.values() if step["worst"] is not None), default=None)
    limits = [
        ("losses and norms beside the CPU's, relative", worst, shape.TOLERANCE),
        ("kernels compiled there", compiled, 0),
        ("step beside eager PyTorch's best", ratio(best, fastest("eager")), 0.6),
        ("step beside compiled PyTorch's best", ratio(best, fastest("compiled")), 1.0),
        ("memory in use beside PyTorch's allocated, recompute full",
         ratio(full.get("in_use", 0) / 2**20, eager.get("allocated_mib")), 0.9),
        ("memory in use, plan beside measured: off by", None if planned is None else abs(planned - 1), 0.05),
    ]
    for what, value, limit in limits:
        said = "not measured" if value is None else ("reached" if value <= limit else "MISSED")
        yield what, f"at most {limit:g}", "-" if value is None else f"{value:.3g}", said


def page(found):
    steps, peer = ours(found), peers(found)
    yield table(["aim", "", "measured", "verdict"], aims(steps, peer))
    yield table(["Coxswain", "ms a step", "samples/s", "in use", "planned", "reserved", "driver", "losses off", "compiled there"],
                [[name, f"{step['ms']:.1f}", f"{1e3 * step['batch'] / step['ms']:.1f}", gib(step["in_use"]), gib(step["planned"]),
                  gib(step["reserved"]), gib(step["nvml"]), "-" if step["worst"] is None else f"{step['worst']:.1e}", step["compiled_here"]]
                 for name, step in steps.items()])
    yield table(["PyTorch", "ms a step", "allocated", "reserved", "driver"],
                [[name, f"{line['step_ms']:.1f}", *(gib(line.get(of, 0) * 2**20) for of in ("allocated_mib", "reserved_mib", "driver_mib"))]
                 for name, line in peer.items()])
    kernels = json.loads(found.get("durations.json", "[]"))
    total = sum(row["us"] for row in kernels) or 1
    yield table(["kernel", "launches", "ms", "share"],
                [[f"`{row['kernel'][:60]}`", row["launches"], f"{row['us'] / 1e3:.2f}", f"{100 * row['us'] / total:.0f} %"] for row in kernels[:20]])
    yield "```text\n" + found.get("steps.txt", "no steps.txt came back") + "```\n"


def main():
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    print("\n".join(page(read(sys.argv[1:]))))


if __name__ == "__main__":
    main()
