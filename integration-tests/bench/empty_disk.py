"""A run that goes on from its bucket on a machine with an empty disk: how long until it trains again.

usage: empty_disk.py --cox target/release/cox [--python VENV/bin/python with moto] [--rounds 5]

Each round trains the quickstart's tiny model on two ranks with a checkpoint every 4 steps, in a bucket of moto's S3 server on loopback;
kills every process at once when the first of them is there; removes the output directory; and launches the same command again.

  empty disk   from the start of that process to the line of the first new step
  same disk    the same after a kill with the output directory left where it is, without a bucket: what any launch takes here
  steps        median time between the lines of steps, with a checkpoint every 4: beside a bucket and without one
"""

import argparse
import os
import pathlib
import re
import shutil
import signal
import statistics
import subprocess
import tempfile
import time
import urllib.request

ROOT = pathlib.Path(__file__).resolve().parents[2]


def serve(python):
    server = subprocess.Popen([python, "-m", "moto.server", "-H", "127.0.0.1", "-p", "0"], stdout=subprocess.DEVNULL,
                              stderr=subprocess.PIPE, text=True)
    for line in server.stderr:
        if found := re.search(r"http://127\.0\.0\.1:(\d+)", line):
            return server, f"http://127.0.0.1:{found[1]}"
    raise SystemExit(f"{python} has no moto: pip install 'moto[s3,server]'")


class Run:
    def __init__(self, cox, output, bucket, server, steps):
        arguments = [cox, "run", "configs/quickstart.yaml", f"run.output_dir={output}", f"train.steps={steps}", "train.checkpoint_every=4",
                     "eval.samples=2", "optimizer.warmup_steps=2"]
        if bucket:
            arguments.append(f"run.bucket={bucket}")
        environment = os.environ | {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_REGION": "us-east-1",
                                    "AWS_ALLOW_HTTP": "true", "AWS_ENDPOINT_URL": server}
        self.begin = time.monotonic()
        self.process = subprocess.Popen(arguments, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                                        start_new_session=True)

    def wait_for(self, pattern):
        for line in self.process.stdout:
            if found := re.search(pattern, line):
                return time.monotonic(), found
        raise SystemExit(f"no line with {pattern}")

    def steps(self):
        times = []
        for line in self.process.stdout:
            if re.search(r"\b\d+/\d+\b.*loss", line):
                times.append(time.monotonic())
        self.process.wait()
        return [after - before for before, after in zip(times, times[1:])]

    def kill(self):
        children = subprocess.run(["ps", "-o", "pid=", "--ppid", str(self.process.pid)], capture_output=True, text=True).stdout.split()
        for pid in [self.process.pid, *map(int, children)]:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        self.process.wait()


def show(name, values, unit, scale=1.0):
    values = [value * scale for value in values]
    print(f"{name:<14}{statistics.median(values):8.2f} {unit}   ({min(values):.2f} to {max(values):.2f}, {len(values)} times)", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cox", required=True)
    parser.add_argument("--python", default="python3")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    server, url = serve(options.python)
    sign = "AWS4-HMAC-SHA256 Credential=test/20260101/us-east-1/s3/aws4_request, SignedHeaders=host, Signature=0"
    urllib.request.urlopen(urllib.request.Request(f"{url}/runs", method="PUT", headers={"Authorization": sign}))
    work = pathlib.Path(tempfile.mkdtemp())
    empty, same, brought, beside, without = [], [], [], [], []
    try:
        for number in range(options.rounds):
            output, bucket = work / f"run-{number}", f"s3://runs/{number}"
            run = Run(options.cox, output, bucket, url, 100_000)
            run.wait_for("checkpoint of step .* is in")
            run.kill()
            shutil.rmtree(output)
            run = Run(options.cox, output, bucket, url, 100_000)
            _, found = run.wait_for(r"downloaded the run from its bucket, as it was after step (\d+): .* in (.*)")
            brought.append(found[2])
            at, _ = run.wait_for(rf"\b{int(found[1]) + 1}/100000\b")
            empty.append(at - run.begin)
            run.kill()
            output = work / f"same-{number}"
            run = Run(options.cox, output, None, url, 100_000)
            run.wait_for(r"\b10/100000\b")
            run.kill()
            run = Run(options.cox, output, None, url, 100_000)
            at, _ = run.wait_for(r"\b\d+/100000\b.*loss")
            same.append(at - run.begin)
            run.kill()
            for times, bucket in [(without, None), (beside, f"s3://runs/steps-{number}")]:
                times += Run(options.cox, work / f"steps-{number}-{bool(bucket)}", bucket, url, 60).steps()
    finally:
        server.kill()
        shutil.rmtree(work, ignore_errors=True)
    show("empty disk", empty, "s")
    show("same disk", same, "s")
    print(f"brought in    {', '.join(brought)}")
    show("steps, bucket", beside, "ms", 1e3)
    show("steps, none", without, "ms", 1e3)


if __name__ == "__main__":
    main()
