#!/usr/bin/env python3
"""Losses and gradients' norms that a GPU should have: the same steps, of the same seed, on this machine's CPU.

    worker/cuda/gpu/expected.py target/release/cox small 3
    worker/cuda/gpu/expected.py target/release/cox 3b 2

Written to expected.json beside this file, where call.py finds them. Recompute changes no bit, so one list serves `full` and `none`.
"""
import json
import pathlib
import subprocess
import sys
import tempfile

import shape

ROOT = pathlib.Path(__file__).resolve().parents[3]


def main():
    cox, key, steps = pathlib.Path(sys.argv[1]).resolve(), sys.argv[2], int(sys.argv[3])
    small = key == "small"
    like = "configs/assets/tiny-vla" if small else "configs/assets/qwen2.5-vl-3b"
    with tempfile.TemporaryDirectory() as scratch:
        model, out = f"{scratch}/model", pathlib.Path(scratch) / "run"
        subprocess.run([cox, "data", "make-checkpoint", "--like", like, "--tokenizer", "configs/assets/tiny-vla", "--out", model],
                       cwd=ROOT, check=True)
        worker = shape.worker(cox, model, out, 2 if small else 8, steps, shape.SMALL if small else [], device="cpu")
        said = subprocess.run(worker, cwd=ROOT, check=True, capture_output=True, text=True)
        losses = json.loads((out / "summary.json").read_text())["losses"]
        norms = [norm for norm, _ in shape.steps(said.stdout + said.stderr)]
    file = pathlib.Path(__file__).parent / "expected.json"
    known = json.loads(file.read_text()) if file.exists() else {}
    known[key] = dict(losses=losses, norms=norms)
    file.write_text(json.dumps(known, indent=1) + "\n")


if __name__ == "__main__":
    main()
