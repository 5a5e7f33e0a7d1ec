#!/usr/bin/env python3
"""Latency and throughput of `cox serve` beside the same policy in PyTorch behind the same protocol, in turns.

    cox run configs/quickstart.yaml
    cargo build --release -p coxswain && cargo bench --no-run -p coxswain-serve
    python serve.py --cox target/release/cox --load target/release/deps/load-HASH --run runs/quickstart [--clients 1 8] [--seconds 8] [--rounds 3]

Both servers stay up and are asked in turns; clients are one program in Rust (`worker/serve/benches/load.rs`) that sends one recorded
observation again and again. `torch` makes a pass for each observation, as openpi's server does; `torch-batched` lets those that wait
share one. Needs torch, transformers 5, peft, openpi-client and websockets.
"""
import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from openpi_client import msgpack_numpy

ROOT = Path(__file__).resolve().parents[2]
arguments = argparse.ArgumentParser()
arguments.add_argument("--cox", required=True)
arguments.add_argument("--load", required=True)
arguments.add_argument("--run", required=True)
arguments.add_argument("--clients", type=int, nargs="+", default=[1, 8])
arguments.add_argument("--seconds", type=float, default=8)
arguments.add_argument("--rounds", type=int, default=3)
arguments.add_argument("--threads", type=int, default=os.cpu_count(), help="of PyTorch")
arguments = arguments.parse_args()


def observation():
    about, draws = json.loads((Path(arguments.run) / "policy.json").read_text()), np.random.default_rng(1)
    out = {c["name"]: draws.integers(0, 256, (c["height"], c["width"], 3), np.uint8) for c in about["cameras"]}
    out |= {f["name"]: draws.normal(size=f["shape"]).astype(np.float32) for f in (about["state"], about["sensor"]) if f}
    return msgpack_numpy.packb({**out, "prompt": "open the drawer", "seed": 1})


def start(command, wanted):
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "launcher/python")}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment, cwd=ROOT)
    line = next(line for line in process.stdout if wanted in line)
    return process, line


def processor_ms(process):
    """Processor time that a server has taken so far; unlike latency it hardly depends on what else the machine does."""
    fields = Path(f"/proc/{process.pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) * 1000 / os.sysconf("SC_CLK_TCK")


def main():
    servers, processes = {}, []
    cox, line = start([arguments.cox, "serve", arguments.run, "--listen=127.0.0.1:0", "--device=cpu"], "serving at")
    processes.append(cox)
    servers["cox"] = (line.split("ws://")[1].split()[0], cox)
    for name, port, batch in [("torch", 18431, 1), ("torch-batched", 18432, 16)]:
        script = [sys.executable, str(ROOT / "integration-tests/bench/serve_torch.py"), arguments.run, str(port)]
        processes.append(start([*script, f"--max-batch={batch}", f"--threads={arguments.threads}"], "serving")[0])
        servers[name] = (f"127.0.0.1:{port}", processes[-1])
    found = {}
    with tempfile.NamedTemporaryFile() as file:
        file.write(observation())
        file.flush()
        for _ in range(arguments.rounds):
            for clients in arguments.clients:
                for name, (address, process) in servers.items():
                    command = [arguments.load, address, str(clients), str(arguments.seconds), file.name]
                    before = processor_ms(process)
                    told = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
                    # Those of the warm-up are not among the answers.
                    told["processor_ms"] = round((processor_ms(process) - before) / (told["answers"] + 10 * clients), 2)
                    found.setdefault((clients, name), []).append(told)
                    print(clients, name, told, flush=True)
    for process in processes:
        process.terminate()
    print("\nmedians of", arguments.rounds)
    for clients in arguments.clients:
        for name in servers:
            mid = {key: statistics.median(told[key] for told in found[clients, name]) for key in ("p50_ms", "p99_ms", "per_second", "processor_ms")}
            base = {key: statistics.median(told[key] for told in found[clients, "cox"]) for key in mid}
            ratios = {key: round(base[key] / mid[key], 3) for key in mid}
            print(f"{clients} clients, {name}: {mid}; cox against it {ratios}")


main()
