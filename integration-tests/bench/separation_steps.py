#!/usr/bin/env python3
"""What each step of docs/guide/coming-from-audio-separation.md does to memory, measured: one by one and one after the other.

    python separation_steps.py COX [--scale 16] [--steps 1]

The run is configs/separation-music.yaml, on drawn tracks of a few seconds, with segments so many times shorter than the page's 8 and 4
seconds: 43 GB of activations would not fit this machine, and all that grows with a segment is as much smaller. Measured is what the
worker's allocator had in use at its peak, predicted what `cox run` said before, both from summary.json; ratios are to the first row.
Python 3 and nothing else.
"""
import argparse
import json
import os
import pathlib
import random
import struct
import subprocess
import sys
import tempfile
import wave

ROOT = pathlib.Path(__file__).resolve().parents[2]
RATE, STEMS, TRACKS, SECONDS = 44100, ["vocals", "drums", "bass", "other"], 2, 10
CHANGES = [
    ("micro-batch 5 -> 2", "train.micro_batch=2"), ("segments halved", None), ("width 256 -> 192", "network.hidden_dim=192"),
    ("depth 6 -> 4", "network.layers=4"), ("bands 62 -> 48", "network.bands=48"), ("recompute full", "train.recompute=full"),
]


def tracks(folder):
    """Stereo noise: memory does not depend on what is heard."""
    draw = random.Random(3)
    for track in range(TRACKS):
        for stem in STEMS:
            path = folder / f"track-{track}" / f"{stem}.wav"
            path.parent.mkdir(parents=True, exist_ok=True)
            with wave.open(str(path), "wb") as out:
                out.setnchannels(2)
                out.setsampwidth(2)
                out.setframerate(RATE)
                second = b"".join(struct.pack("<h", draw.randrange(-3000, 3000)) for _ in range(2 * RATE))
                out.writeframes(second * SECONDS)


def run(a, folder, changes):
    """Bytes predicted and measured of a run with these changes."""
    seconds = (4 if None in changes else 8) / a.scale
    output = folder / "run"
    subprocess.run(["rm", "-rf", str(output)], check=True)
    command = [
        a.cox, "run", str(ROOT / "configs/separation-music.yaml"), f"run.output_dir={output}", f"data.path={folder}/tracks",
        f"data.segment_seconds={seconds}", "data.holdout_every=0", "train.global_batch=5", f"train.steps={a.steps}", "train.epochs=null",
        "train.checkpoint_every=0", "eval.samples=0", "optimizer.warmup_steps=0", "launch.device=cpu", *[c for c in changes if c],
    ]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"XDG_CACHE_HOME": str(folder / "cache")})
    if done.returncode:
        sys.exit(done.stdout + done.stderr)
    memory = json.loads((output / "summary.json").read_text())["memory"]
    subprocess.run(["rm", "-rf", str(folder / "cache")], check=True)
    return memory["predicted"], memory["measured"]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cox")
    parser.add_argument("--scale", type=float, default=16)
    parser.add_argument("--steps", type=int, default=1)
    a = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        tracks(folder / "tracks")
        first = run(a, folder, [])
        row = lambda name, found: print(  # noqa: E731
            f"{name:<22} predicted {found[0] / 2**20:8.1f} MiB {found[0] / first[0]:5.2f}   measured {found[1] / 2**20:8.1f} MiB {found[1] / first[1]:5.2f}"
            f"   off {100 * (found[0] / found[1] - 1):+5.1f} %", flush=True)
        row("as it is", first)
        for name, change in CHANGES:
            row(name, run(a, folder, [change]))
        so_far = [CHANGES[0][1]]
        for name, change in CHANGES[1:]:
            so_far.append(change)
            row(f"and {name}", run(a, folder, so_far))


if __name__ == "__main__":
    main()
