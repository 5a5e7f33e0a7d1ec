"""What TLS between machines costs a step: the quickstart on two machines of one worker each, with TLS and with `--plaintext`, in turns.

usage: tls_overhead.py --cox target/release/cox [--rounds 4] [--steps 150]

Machines are two network namespaces with a veth pair between them (root). Of each run the median of the steps' times, as the coordinator's log
has them; the ring's handshake is keyed in both, as it always is where there is a token, and is not part of a step.
"""

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[2]


def machines():
    """Two namespaces, held by processes that end with this one."""
    held = [subprocess.Popen(["unshare", "--net", "sh", "-c", "ip link set lo up && echo ok && exec cat"], stdin=subprocess.PIPE,
                             stdout=subprocess.PIPE) for _ in range(2)]
    for process in held:
        process.stdout.readline()
    inside = [["nsenter", f"--net=/proc/{process.pid}/ns/net"] for process in held]
    subprocess.run([*inside[0], "ip", "link", "add", "cox0", "type", "veth", "peer", "name", "cox1", "netns", str(held[1].pid)], check=True)
    for side, name in enumerate(["cox0", "cox1"]):
        subprocess.run([*inside[side], "ip", "address", "add", f"10.78.0.{side + 1}/24", "dev", name], check=True)
        subprocess.run([*inside[side], "ip", "link", "set", name, "up"], check=True)
    return held, inside


def run(cox, inside, steps, flags):
    """Milliseconds of a step, the median, and the processor time of both launches a step."""
    with tempfile.TemporaryDirectory() as place:
        environment = os.environ | {"COX_TOKEN": "00112233445566778899aabbccddeeff", "XDG_CACHE_HOME": place}
        common = ["run", "configs/quickstart.yaml", f"run.output_dir={place}/run", f"train.steps={steps}", "train.checkpoint_every=0",
                  "eval.samples=0", "launch.threads_per_worker=1", "--nnodes=2", "--nproc-per-node=1", "--rdzv-endpoint=10.78.0.1:29400",
                  "--rdzv-conf=last_call_timeout=0", "--log-format=json", *flags]
        before = os.times()
        launched = [subprocess.Popen([*inside[rank], cox, *common, f"--node-rank={rank}"], cwd=ROOT, env=environment, stdin=subprocess.DEVNULL,
                                     stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) for rank in range(2)]
        codes = [process.wait() for process in launched]
        assert codes == [0, 0], codes
        used = os.times()
        lines = (json.loads(line) for line in pathlib.Path(place, "run/logs/coordinator.log").read_text().splitlines())
        times = [line["total_ms"] for line in lines if "grad_norm" in line and line["step"] > steps // 10]
        spent = used.children_user + used.children_system - before.children_user - before.children_system
        return statistics.median(times), 1000 * spent / steps


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--cox", required=True)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--steps", type=int, default=150)
    args = parser.parse_args()
    cox = str(pathlib.Path(args.cox).resolve())
    held, inside = machines()
    ratios, spent = [], []
    for number in range(args.rounds):
        pair = {}
        for name in ["tls", "plaintext"] if number % 2 else ["plaintext", "tls"]:
            pair[name] = run(cox, inside, args.steps, ["--plaintext"] if name == "plaintext" else [])
            print(f"{name:<10} {pair[name][0]:7.2f} ms a step, {pair[name][1]:7.1f} ms of processors", flush=True)
        ratios.append(pair["tls"][0] / pair["plaintext"][0])
        spent.append(pair["tls"][1] / pair["plaintext"][1])
    for name, of in [("time", ratios), ("processor time", spent)]:
        print(f"TLS over plaintext, {name}: {statistics.median(of):.3f} ({min(of):.3f} to {max(of):.3f})")
    for process in held:
        process.kill()


main()
