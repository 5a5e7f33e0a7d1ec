#!/usr/bin/env python3
"""A training step with video beside the same step with images, in turns: the same run on sets that differ in how pictures are kept.

    python video_step.py COX MODEL FOLDER [--kinds image av1] [--micro 2] [--batch 2] [--rounds 2] [--warmup 3] [--steps 8] [--threads 2]

FOLDER has a LeRobot data set below each kind's name, as loader_vs_lerobot.py writes them: three cameras of 640 x 480, of which `front` is
trained on. A step's time is the worker's own, from the end of one step to the end of the next, so that what decoding takes of the
processor or makes a step wait for is in it. Medians after --warmup. Python 3 and nothing else.
"""
import argparse
import json
import pathlib
import statistics
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[2]


def steps(a, folder, kind):
    output = folder / f"run-{kind}"
    subprocess.run(["rm", "-rf", str(output)], check=True)
    file = folder / "run.yaml"
    file.write_text(json.dumps({
        "run": {"name": "video-step", "output_dir": str(output), "seed": 1}, "task": {"type": "vla_flow"},
        "model": {"path": a.model}, "lora": {}, "expert": {"width": 384, "layers": 4, "heads": 6},
        "data": {"path": str(a.folder / kind), "cameras": ["observation.images.front"], "state": "observation.state", "action": "action",
                 "horizon": 16, "max_pixels": a.pixels},
        "train": {"steps": a.warmup + a.steps, "global_batch": a.batch, "micro_batch": a.micro, "recompute": "none", "checkpoint_every": 0},
        "eval": {"samples": 0}, "optimizer": {"warmup_steps": 0},
        "launch": {"nproc_per_node": 1, "threads_per_worker": a.threads, "device": "cpu"},
    }))
    done = subprocess.run([a.cox, "run", str(file), "--log-format", "json"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        sys.exit(done.stdout)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return [line["total_ms"] for line in lines if "total_ms" in line][a.warmup:]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cox")
    parser.add_argument("model")
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--kinds", nargs="+", default=["image", "av1"])
    for name, default in dict(micro=2, batch=2, rounds=2, warmup=3, steps=8, threads=2, pixels=50176).items():
        parser.add_argument(f"--{name}", type=int, default=default)
    a = parser.parse_args()
    found = {kind: [] for kind in a.kinds}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(a.rounds):
            for kind in a.kinds:
                times = steps(a, pathlib.Path(folder), kind)
                found[kind].append(statistics.median(times))
                print(f"round {number + 1} {kind}: {found[kind][-1]:.0f} ms (fastest {min(times):.0f})", flush=True)
    first = a.kinds[0]
    for kind in a.kinds[1:]:
        ratios = [one / other for one, other in zip(found[kind], found[first])]
        print(f"{kind} over {first}: {statistics.median(ratios):.3f} ({', '.join(f'{ratio:.3f}' for ratio in ratios)})")


if __name__ == "__main__":
    main()
