#!/usr/bin/env python3
"""What a run pays for being watched: step times of one run while `cox top` follows it, and while nobody does, in turns.

    top.py COX [--ranks 8] [--windows 10] [--seconds 6] [CONFIG] [KEY=VALUE ...]

Each window is a pair: so many seconds without, so many with a `cox top` of its own on a terminal of 80 x 24, in changing order.
Step times are those of the run's JSON log, the first second of each half left out; also what `cox top` took of a core.
"""
import argparse
import fcntl
import json
import os
import pathlib
import pty
import signal
import statistics
import struct
import subprocess
import tempfile
import termios
import threading
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]


def followed(cox, run):
    """`cox top` on a terminal; a function that ends it and says its seconds of processor time and the bytes it sent."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.environ["TERM"] = "xterm-256color"
        os.execv(cox, [cox, "top", run])
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    sent = []

    def read():
        try:
            while data := os.read(terminal, 65536):
                sent.append(len(data))
        except OSError:
            pass  # the terminal closes with the process

    reader = threading.Thread(target=read)
    reader.start()

    def end():
        os.kill(pid, signal.SIGTERM)
        _, _, usage = os.wait4(pid, 0)
        reader.join()
        os.close(terminal)
        return usage.ru_utime + usage.ru_stime, sum(sent)

    return end


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("cox")
    parser.add_argument("config", nargs="?", default="configs/quickstart.yaml")
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--windows", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=6)
    a = parser.parse_intermixed_args()
    cox = os.path.abspath(a.cox)
    with tempfile.TemporaryDirectory() as folder:
        run = f"{folder}/run"
        command = [cox, "run", a.config, "--nproc-per-node", str(a.ranks), "--log-format", "json", f"run.output_dir={run}",
                   "train.epochs=", "train.steps=1000000", "train.checkpoint_every=0", "eval.samples=0", *a.overrides]
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        steps = []

        def follow():
            for line in process.stdout:
                if '"total_ms"' not in line:
                    continue
                said = json.loads(line)
                fields = said.get("fields", said)
                steps.append((time.monotonic(), fields["total_ms"]))

        threading.Thread(target=follow, daemon=True).start()
        while len(steps) < 20:
            assert process.poll() is None, "the run ended before its twentieth step"
            time.sleep(0.1)
        halves, cost, sent, seconds = {"alone": [], "watched": []}, 0.0, 0, 0.0
        for window in range(a.windows):
            for side in ["alone", "watched"][:: 1 if window % 2 else -1]:
                end = followed(cox, run) if side == "watched" else None
                time.sleep(1)
                begin = time.monotonic()
                time.sleep(a.seconds)
                times = [ms for at, ms in steps if at >= begin]
                if end:
                    used, data = end()
                    cost, sent, seconds = cost + used, sent + data, seconds + a.seconds + 1
                halves[side].append(statistics.mean(times))
        process.send_signal(signal.SIGTERM)
        process.wait()
    ratios = [watched / alone for watched, alone in zip(halves["watched"], halves["alone"])]
    mean, error = statistics.mean(ratios), statistics.stdev(ratios) / len(ratios) ** 0.5
    for side, times in halves.items():
        print(f"{side:8s} {statistics.mean(times):8.1f} ms a step (standard deviation of windows {statistics.stdev(times):.1f})")
    print(f"watched over alone: {mean:.3f}, standard error {error:.3f} ({', '.join(f'{ratio:.3f}' for ratio in ratios)})")
    print(f"cox top: {100 * cost / seconds:.1f} % of a core, {sent / seconds / 1e3:.1f} kB a second to the terminal")


main()
