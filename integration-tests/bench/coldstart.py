"""Process start to first optimizer step: `cox run` on the quickstart against torchrun + PyTorch + PEFT on the same checkpoint.

usage: coldstart.py --cox target/release/cox --torchrun VENV/bin/torchrun [--repeats 5]

Runs A B A B in one go and prints medians and their ratio. Times are from the launcher's exec to the moment the last rank has finished
its first optimizer step. Our step does more: it decodes images, and trains the action expert as well.
"""

import argparse
import os
import pathlib
import re
import shutil
import statistics
import subprocess
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]


def cox(binary):
    out = tempfile.mkdtemp()
    command = [binary, "run", "configs/quickstart.yaml", "train.steps=1", "eval.samples=0", "optimizer.warmup_steps=0", f"run.output_dir={out}/run"]
    began = time.time()
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    first = None
    lines = []
    for line in process.stdout:
        lines.append(line)
        if first is None and re.search(r"step\s+1/1\b", line):
            first = time.time() - began
    assert process.wait() == 0 and first is not None, "".join(lines)
    shutil.rmtree(out)
    return first


def torch(torchrun):
    command = [torchrun, "--standalone", "--nproc_per_node=2", str(ROOT / "integration-tests/bench/torch_first_step.py")]
    environment = dict(os.environ, HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1")
    began = time.time()
    done = subprocess.run([*command, "configs/assets/tiny-vla"], cwd=ROOT, env=environment, capture_output=True, text=True)
    steps = [float(at) for at in re.findall(r"FIRST_STEP \d+ ([\d.]+)", done.stdout)]
    assert len(steps) == 2, done.stderr
    return max(steps) - began


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--cox", required=True)
    parser.add_argument("--torchrun", required=True)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    ours, theirs = [], []
    for _ in range(arguments.repeats):
        ours.append(cox(os.path.abspath(arguments.cox)))
        theirs.append(torch(os.path.abspath(arguments.torchrun)))
    a, b = statistics.median(ours), statistics.median(theirs)
    print(f"cox   {a:6.2f} s  ({min(ours):.2f} to {max(ours):.2f})")
    print(f"torch {b:6.2f} s  ({min(theirs):.2f} to {max(theirs):.2f})")
    print(f"torch / cox = {b / a:.1f}")


main()
