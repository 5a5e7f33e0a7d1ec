#!/usr/bin/env python3
"""A net under changes that must not change a bit: what a fixed set of small runs leaves, one digest an artefact.

    net.py COX                       runs everything, prints `<run> <what> <digest>` lines
    net.py COX --record FILE         and writes them to FILE
    net.py COX --check FILE          and compares them with FILE; ends with 1 and the names of what differs
    net.py COX --compare OTHER_COX   runs both programs on this machine; says which step or tensor differs first
    net.py --list                    names the runs

    --only quickstart,kill   some of the runs           --checkout DIR       whose configs and assets are used (this one)
    --keep DIR               keep the run directories   --begun-by OLD_COX   `resumed` goes on from what that program has left

Digests are those of one kind of processor: kernels differ in their order of summation. FILE names the processor it was made on; across
machines, use `--compare` with a program built from the tree before. Both programs then get the same configs. `before.digests` was
recorded on the tree before models and tasks left the engine (commit 1d4b05a).

Work that changes bits on purpose renews the record and says so in its message. A run that fails is told, and the others go on.

What a run is disturbed by happens at fixed steps: a worker stands still where `COX_TEST_HOLD` tells it to (hold.rs of the worker's
session), and is killed, or joined by another one, while it stands there. Run directories are made anew for every run, so nothing is read
that an earlier one has left. Everything takes about five minutes on two cores. Python 3 and Linux, nothing else.

Names that a later tree may change, of files, fields and log lines, are looked up in one place each, below "What is read".
"""
import argparse
import contextlib
import hashlib
import json
import os
import pathlib
import random
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time

CHECKOUT = pathlib.Path(__file__).resolve().parents[2]
CONFIG = "configs/quickstart.yaml"
# Reached only when something hangs: machines may be shared.
PATIENCE_SECONDS = 900

STEPS = 12
CHECKPOINT_EVERY = 4
# Of every run. One thread a worker, whatever the machine has.
BASE = [
    f"train.steps={STEPS}", f"train.checkpoint_every={CHECKPOINT_EVERY}", "train.keep_checkpoints=9", "optimizer.warmup_steps=2",
    "eval.samples=8", "launch.threads_per_worker=1", "launch.device=cpu", "launch.collectives=ring",
]
# One episode is trained on, an epoch is eight steps: kept features are used again.
EPOCHS = ["data.holdout_episodes=[1,2,3]", "train.steps=22"]
PERIODIC = [*EPOCHS, "cache.mode=periodic", "cache.interval.epochs=", "cache.interval.steps=8", "cache.live.epochs=",
            "cache.live.steps=3", "cache.probe_samples=8"]
# What else a run file can say of how a policy learns, at once.
VARIANT = [
    "lora.targets=[q_proj, v_proj, down_proj]", "lora.rank_pattern={q_proj: 4}", "lora.alpha_pattern={v_proj: 4}",
    "expert.convention=noise_at_one", "expert.repeated_noise=1", "expert.sampling_steps=4", "sensor.tokens=2", "sensor.width=32",
    "data.normalization={state: quantiles, action: min_max, sensor: identity}", "data.horizon=8", "data.prompt='{task}, now'",
    "optimizer.schedule=constant", "optimizer.weight_decay=0.1", "optimizer.clip_norm=0", "optimizer.betas=[0.8, 0.99]",
    "optimizer.lr={lora: 1e-3, expert: 1e-3, sensor: 0}",
]


# ---- Runs ------------------------------------------------------------------------------------------------------------------------------

class Failed(Exception):
    """A run that did not go as it should, and what it printed."""


class Run:
    """One run in a directory of its own, launched and disturbed by a scenario."""

    def __init__(self, cox, checkout, directory, begun_by=None):
        self.cox, self.checkout, self.directory = cox, checkout, directory
        self.begun_by = begun_by or cox
        self.output, self.holds, self.launched = directory / "run", directory / "hold", []
        self.holds.mkdir(parents=True)

    def command(self, *arguments, cox=None):
        """Starts a program; what it prints goes to a file beside the run."""
        of_others = ("COX_", "PET_", "SLURM_", "RAYON_", "TORCHELASTIC_")
        alone = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
        environment = {k: v for k, v in os.environ.items() if not k.startswith(of_others) and k not in alone}
        # What runs here teach about memory stays here.
        environment |= {"XDG_CACHE_HOME": str(self.directory / "user-cache"), "COX_TEST_HOLD": str(self.holds)}
        printed = self.directory / f"printed-{len(self.launched)}"
        with open(printed, "wb") as out:
            process = subprocess.Popen([cox or self.cox, *arguments], cwd=self.checkout, env=environment, stdin=subprocess.DEVNULL,
                                       stdout=out, stderr=subprocess.STDOUT)
        self.launched.append((process, printed))
        return process

    def start(self, keys=(), flags=("--nproc-per-node=2",), cox=None):
        """`cox run`; later keys win over earlier ones."""
        keys = [f"run.output_dir={self.output}", *BASE, *keys]
        return self.command("run", CONFIG, *keys, *flags, "--log-format=json", cox=cox)

    def hold(self, rank, phase, step):
        """Makes a worker that is launched later stand still in `phase` from `step` on."""
        order = self.holds / f"{rank}-{phase}"
        order.write_text(str(step))
        return order.with_name(order.name + ".held")

    def expect_worlds(self, *worlds):
        """Whether what was to happen to the run has happened: how many workers each of its generations had."""
        seen, sound = trained_by(self)
        if seen != worlds or not sound:
            raise self.failure(f"trained by worlds of {seen}, not {worlds}, or the ledger does not add up")

    def finish(self, process, code=0):
        self.until("its end", lambda: process.poll() is not None)
        if process.returncode != code:
            raise self.failure(f"ended with {process.returncode}, not {code}")

    def until(self, what, seen, alive=()):
        """Waits until something can be seen; these processes must live as long."""
        give_up = time.monotonic() + PATIENCE_SECONDS
        while not seen():
            for process in alive:
                if process.poll() is not None and not seen():
                    raise self.failure(f"ended with {process.returncode} before {what}")
            if time.monotonic() > give_up:
                raise self.failure(f"{what} did not come")
            time.sleep(0.005)

    def failure(self, what):
        texts = [path.read_text(errors="replace")[-3000:] for _, path in self.launched]
        return Failed("\n----\n".join([what, *texts]))

    def end_everything(self):
        for process, _ in self.launched:
            if process.poll() is None:
                process.kill()
                process.wait()


def whole(*keys, workers=2):
    """A run that nothing disturbs."""
    def scenario(run):
        run.finish(run.start(keys, [f"--nproc-per-node={workers}"]))
    return scenario


def alone(run):
    """A single worker without a coordinator."""
    keys = [f"run.output_dir={run.output}", *BASE]
    run.finish(run.command("worker", "--config", CONFIG, *keys))


def killed(phase, step, ranks, *keys):
    """Workers are killed at once, while rank 1 stands in a phase of a step."""
    def scenario(run):
        held = run.hold(1, phase, step)
        launcher = run.start(keys)
        run.until(f"rank 1 in {phase} of step {step}", held.exists, alive=[launcher])
        for pid in [worker_of(launcher.pid, rank) for rank in ranks]:
            os.kill(pid, signal.SIGKILL)
        run.finish(launcher)
        run.expect_worlds(2, 2)
    return scenario


def resumed(run):
    """Three ranks go on where two were killed with their launcher, on the checkpoint of step 4."""
    held = run.hold(1, "forward", 6)
    launcher = run.start(cox=run.begun_by)
    run.until("rank 1 in step 6", held.exists, alive=[launcher])
    processes = children(launcher.pid)
    launcher.kill()
    launcher.wait()
    run.until("the end of its children", lambda: not any(is_alive(pid) for pid in processes))
    held.unlink()
    run.finish(run.start(flags=["--nproc-per-node=3"]))
    run.expect_worlds(2, 3)


def machine(run, endpoint, rank, of, waits_for_all):
    """A launcher of one worker, as on a machine of its own."""
    conf = f"is_host={'false' if rank else 'true'},last_call_timeout={PATIENCE_SECONDS if waits_for_all else 0}"
    return run.start(flags=[
        f"--nnodes=1:{of}", "--nproc-per-node=1", f"--rdzv-endpoint={endpoint}", f"--node-rank={rank}", f"--rdzv-conf={conf}",
        f"--local-addr=127.0.0.{rank + 1}"])


def shrunk(run):
    """Three machines; the last is lost while it stands in step 5, and two train on."""
    endpoint, held = free_endpoint(), run.hold(2, "backward", 5)
    machines = [machine(run, endpoint, rank, of=3, waits_for_all=True) for rank in range(3)]
    run.until("rank 2 in step 5", held.exists, alive=machines)
    machines[2].kill()
    machines[2].wait()
    run.finish(machines[0])
    run.finish(machines[1])
    run.expect_worlds(3, 2)


def grown(run):
    """One machine; a second one comes while the worker of the first stands in step 5."""
    endpoint, held = free_endpoint(), run.hold(0, "forward", 5)
    first = machine(run, endpoint, 0, of=2, waits_for_all=False)
    run.until("rank 0 in step 5", held.exists, alive=[first])
    second = machine(run, endpoint, 1, of=2, waits_for_all=False)
    run.until("a second worker at the coordinator", lambda: knows_both(run), alive=[first, second])
    held.unlink()
    run.finish(first)
    run.finish(second)
    run.expect_worlds(1, 2)


RUNS = {
    "quickstart": whole("train.steps=24"),
    "one-rank": whole(workers=1),
    "three-ranks": whole(workers=3),
    "alone": alone,
    "recompute-none": whole("train.recompute=none"),
    "recompute-selective": whole("train.recompute=selective"),
    "recompute-every-2": whole("train.recompute={every: 2}"),
    "bf16-weights": whole("model.weights_dtype=bfloat16"),
    "bf16-activations": whole("model.activations_dtype=bfloat16"),
    "bf16-all": whole("model.weights_dtype=bfloat16", "model.activations_dtype=bfloat16", "optimizer.reduce_dtype=bfloat16",
                      "train.recompute=selective"),
    "streamed": whole("memory.offload=layers"),
    "micro-1": whole("train.micro_batch=1"),
    "micro-4": whole("train.micro_batch=4"),
    "no-replica": whole("faults.mirror=false"),
    "no-lora": whole("lora="),
    "no-sensor": whole("data.sensor="),
    "rslora": whole("lora.rslora=true"),
    "variant": whole(*VARIANT),
    "exact": whole(*EPOCHS, "cache.mode=exact"),
    "exact-no-lora": whole(*EPOCHS, "cache.mode=exact", "lora="),
    "periodic": whole(*PERIODIC),
    "periodic-int8": whole(*PERIODIC, "cache.dtype=int8", "cache.rebuild_above=1000.0"),
    "periodic-killed": killed("forward", 12, [1], *PERIODIC),
    "kill": killed("backward", 5, [1]),
    "kill-both": killed("optimizer", 6, [0, 1]),
    "resumed": resumed,
    "shrunk": shrunk,
    "grown": grown,
}


# ---- What is read ----------------------------------------------------------------------------------------------------------------------
#
# Each artefact is a list of (label, bytes). The digest is of all of them; labels say where a difference begins.

def artefacts(run):
    yield "adapter", tensors(run.output / "adapter/adapter_model.safetensors")
    yield "adapter-config", document(run.output / "adapter/adapter_config.json")
    yield "expert", tensors(run.output / "expert.safetensors")
    yield "sensor", tensors(run.output / "sensor.safetensors")
    yield "statistics", document(run.output / "stats.json")
    steps = logged_steps(run)
    yield "losses", [(f"step {step}", number(of["loss"])) for step, of in steps.items()]
    yield "norms", [(f"step {step}", number(of["grad_norm"])) for step, of in steps.items()]
    summary = json.loads((run.output / "summary.json").read_text())
    first = summary["first_step"]
    yield "summary-losses", [(f"step {first + i}", number(loss)) for i, loss in enumerate(summary["losses"])]
    yield "error-before", values(measures(summary["error_before"]))
    yield "error-after", values(measures(summary["error_after"]))
    drift = (summary.get("cache") or {}).get("drift") or []
    fields = ["step", "generation", "relative_l2", "cosine", "probes"]
    yield "drift", [(f"{at} {field}", number(of[field])) for at, of in enumerate(drift) for field in fields]


def logged_steps(run):
    """Fields of each step's line in the coordinator's log, by step. A step that was repeated counts as it was the last time."""
    steps = {}
    for record in log(run):
        if "loss" in record and "grad_norm" in record:
            steps[record["step"]] = record
    return dict(sorted(steps.items()))


def log(run):
    path = run.output / "logs/coordinator.log"
    for line in path.read_text(errors="replace").splitlines() if path.exists() else []:
        with contextlib.suppress(ValueError):
            yield json.loads(line)


def trained_by(run):
    """How many workers each generation had, and whether every sample counted once."""
    command = [run.cox, "audit", "--json", run.output]
    audit = json.loads(subprocess.run(command, cwd=run.checkout, capture_output=True, text=True).stdout)
    worlds = tuple(generation["workers"] for generation in audit["generations"])
    return worlds, audit["missing"] == audit["duplicate"] == 0


def knows_both(run):
    """Whether the coordinator knows of the worker that came."""
    return any("2 of 2" in record["message"] for record in log(run))


def tensors(path):
    """Tensors of a safetensors file, sorted by name, whatever their order in the file."""
    if not path.exists():
        return []
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8:8 + length])
    header.pop("__metadata__", None)
    described = []
    for name, of in sorted(header.items()):
        begin, end = (8 + length + at for at in of["data_offsets"])
        described.append((name, f"{of['dtype']} {of['shape']} ".encode() + data[begin:end]))
    return described


def document(path):
    return values(json.loads(path.read_text())) if path.exists() else []


def measures(error):
    """The measures of a held-out error, without the parts of them that later trees tell, too."""
    return {name: value for name, value in error.items() if name != "parts"} if error else error


def values(value, label=""):
    """Leaves of a JSON value, objects sorted by key."""
    if isinstance(value, dict):
        return [leaf for key in sorted(value) for leaf in values(value[key], f"{label}.{key}")]
    if isinstance(value, list):
        return [leaf for at, item in enumerate(value) for leaf in values(item, f"{label}[{at}]")]
    return [] if value is None else [(label, number(value))]


def number(value):
    """The shortest text that gives the same bits: 1 and 1.0 are one number."""
    return repr(float(value)).encode() if isinstance(value, (int, float)) else str(value).encode()


def digest(artefact):
    if not artefact:
        return "-"
    whole = hashlib.sha256()
    for label, content in artefact:
        whole.update(f"{label}\0{len(content)}\0".encode() + content)
    return whole.hexdigest()[:16]


def first_difference(one, other):
    """Where two artefacts begin to differ, and what stands there if it is short."""
    one, other = dict(one), dict(other)
    for label in [*one, *(label for label in other if label not in one)]:
        if one.get(label) != other.get(label):
            shown = [of[label].decode(errors="replace") if label in of else "nothing" for of in (one, other)]
            return f"{label}: {shown[0]}, the other {shown[1]}" if max(map(len, shown)) < 40 else label
    return "the order"


# ---- Processes -------------------------------------------------------------------------------------------------------------------------

def children(parent):
    lists = []
    for path in pathlib.Path(f"/proc/{parent}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            lists += path.read_text().split()
    return [int(pid) for pid in lists]


def worker_of(launcher, rank):
    for pid in children(launcher):
        if f"RANK={rank}".encode() in pathlib.Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
            return pid
    raise Failed(f"launcher {launcher} has no worker of rank {rank}")


def is_alive(pid):
    """A process that is dead and not reaped yet counts as gone."""
    with contextlib.suppress(OSError):
        return ") Z " not in pathlib.Path(f"/proc/{pid}/stat").read_text()
    return False


def free_endpoint():
    """A free port that the kernel gives to no outgoing connection."""
    while True:
        port = random.randrange(10_000, 30_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return f"127.0.0.1:{port}"


# ---- The command -----------------------------------------------------------------------------------------------------------------------

def execute(name, cox, directory, args):
    """One run to its end; what it left."""
    shutil.rmtree(directory, ignore_errors=True)
    run = Run(cox, args.checkout.absolute(), directory, args.begun_by)
    try:
        RUNS[name](run)
        return dict(artefacts(run))
    except Failed as failed:
        print(f"{name} FAILED with {cox}: {failed}", flush=True)
        return None
    finally:
        run.end_everything()
        if not args.keep:
            shutil.rmtree(directory, ignore_errors=True)


def processor():
    lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown")


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cox", type=os.path.abspath, nargs="?")
    parser.add_argument("--checkout", type=pathlib.Path, default=CHECKOUT)
    parser.add_argument("--only", default=",".join(RUNS))
    parser.add_argument("--keep", type=pathlib.Path)
    parser.add_argument("--begun-by", type=os.path.abspath, metavar="OLD_COX")
    parser.add_argument("--list", action="store_true")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--record", type=pathlib.Path)
    what.add_argument("--check", type=pathlib.Path)
    what.add_argument("--compare", type=os.path.abspath, metavar="OTHER_COX")
    args = parser.parse_args()
    args.names = args.only.split(",")
    if args.list:
        print("\n".join(RUNS))
        sys.exit()
    if not args.cox or not set(args.names) <= set(RUNS):
        parser.error(f"a program and runs of {', '.join(RUNS)} are needed")
    return args


def main():
    args, started = arguments(), time.monotonic()
    recorded = args.check.read_text().splitlines() if args.check else []
    expected = {tuple(line.split()[:2]): line.split()[2] for line in recorded if not line.startswith("#")}
    lines, wrong = [f"# processor: {processor()}"], []
    base = (args.keep or pathlib.Path(tempfile.mkdtemp(prefix="cox-net-"))).absolute()
    try:
        for name in args.names:
            left = execute(name, args.cox, base / name, args)
            other = execute(name, args.compare, base / f"{name}-other", args) if args.compare else left
            if left is None or other is None:
                wrong.append(f"{name}: failed")
                continue
            for what, artefact in left.items():
                line, note = f"{name} {what} {digest(artefact)}", None
                if other[what] != artefact:
                    note = f"the other's is {digest(other[what])}, first at {first_difference(artefact, other[what])}"
                elif args.check and expected.get((name, what)) != digest(artefact):
                    note = f"the record has {expected.get((name, what), 'nothing')}"
                if note:
                    wrong.append(f"{line}: {note}")
                lines.append(line)
                print(wrong[-1] if note else line, flush=True)
    finally:
        if not args.keep:
            shutil.rmtree(base, ignore_errors=True)

    print(f"{len(lines) - 1} digests of {len(args.names)} runs in {time.monotonic() - started:.0f} s", file=sys.stderr)
    if args.check and lines[0] not in recorded:
        print(f"the record was made on another processor, this is {processor()}: use --compare", file=sys.stderr)
    if wrong:
        sys.exit("\n".join(["these differ:", *wrong]))
    if args.record:
        args.record.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
