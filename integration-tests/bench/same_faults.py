#!/usr/bin/env python3
"""One schedule of faults, played against `cox`, torchrun with DDP and checkpoints, and torchft, each of which trains the same model.

    pip install torch transformers peft tokenizers torchft-nightly
    python same_faults.py COX [--minutes 20] [--every 180] [--seed 1] [--only cox,ddp,torchft] [--batch 8] [--width 256] [--layers 4]

Two nodes of one worker and one thread each on this machine; an mT5 of random weights with LoRA on every linear (seq2seq_vs_torch.py),
fused AdamW on the PyTorch side, a checkpoint every 50 steps, 60 s of patience in Gloo instead of its 30 minutes. Every system gets the
same faults at the same seconds after its first step:

  worker   kill -9 of a worker
  node     kill -9 of the second node's launcher and its worker; ten seconds later a scheduler launches it again
  freeze   SIGSTOP of a worker, which nobody continues: after five minutes in which the system has not replaced it, a person kills it
  memory   an out-of-memory error in a backward pass of the second rank, first and once (`cox`: from then on half a micro-batch fits)
  disk     the file system of checkpoints is full for thirty seconds

Written for each: goodput (samples that the final state has learned from, times the undisturbed time of one, over the time it took; the time
that the disk is full is left out of both), steps done again, samples that a step of the final state lacks or has twice, the time from a
fault until two further steps, and what a person had to do. Undisturbed is the time before the first fault. Needs root for the small file
system, and an idle machine for as long as the systems take together. torchft gets no person for what it heals by itself: each of its
replicas is under a torchrun of its own.
"""
import argparse
import contextlib
import datetime
import json
import os
import pathlib
import random
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time

import beside_torch as bench
import seq2seq_vs_torch as workload

SIZES = dict(minutes=20, every=180, seed=1, batch=8, width=256, layers=4, vocab=8192, source=128, target=64, rank=16, disk=64)
FAULTS = ["worker", "node", "freeze", "disk"]
# Steps; seconds.
CHECKPOINT_EVERY = 50
DOWN, FULL, PERSON, PATIENCE = 10, 30, 300, 60
# What a rank of `cox` may take; with the ballast of its fault a whole micro-batch does not fit, and half of one does.
CAPACITY_MIB = 1536
MANY = 1_000_000


def schedule(a):
    """Seconds after the first step, and what happens then: every kind in turn before one comes again. Memory runs out first, and once: to
    `cox` that comes at a step, whose time is known before as long as nothing else has happened."""
    dice, kinds, at = random.Random(a.seed), ["memory"], a.every
    while at < 60 * a.minutes - 60:
        if not kinds:
            kinds = dice.sample(FAULTS, len(FAULTS))
        yield at + dice.uniform(-10, 10), kinds.pop(), dice.randrange(2)
        at += a.every


# ---------------------------------------------------------------------------------------------------------- the peers

def peer(a):
    """A worker of DDP or torchft; it says every step that counts in a line of its own file."""
    bench.torch_threads(argparse.Namespace(threads=1))
    import torch
    from torch import distributed
    from transformers import MT5ForConditionalGeneration
    place, me = pathlib.Path(a.place), int(os.environ.get("REPLICA", os.environ["RANK"]))
    model = MT5ForConditionalGeneration.from_pretrained(place / "model", dtype=torch.float32)
    model = bench.adapted(argparse.Namespace(rank=a.rank, recompute="none"), model, target_modules="all-linear", task_type="SEQ_2_SEQ_LM")
    params = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(params, lr=1e-4, fused=True)
    batch = bench.batch_of(argparse.Namespace(samples=place / "samples"))
    saved, done, manager = place / "disk/checkpoint.pt", 0, None
    whole = lambda: {"model": [p.detach().clone() for p in params], "optimizer": optimizer.state_dict()}

    def load(state):
        with torch.no_grad():
            for p, value in zip(params, state["model"]):
                p.copy_(value)
        optimizer.load_state_dict(state["optimizer"])

    if a.side == "ddp":
        distributed.init_process_group("gloo", timeout=datetime.timedelta(seconds=PATIENCE))
        run = torch.nn.parallel.DistributedDataParallel(model)
    else:
        import torchft
        limit = datetime.timedelta(seconds=PATIENCE)
        manager = torchft.Manager(pg=torchft.ProcessGroupGloo(timeout=limit), min_replica_size=1, load_state_dict=load, state_dict=whole,
                                  replica_id=f"replica_{me}", timeout=limit)
        run = torchft.DistributedDataParallel(manager, model)
    if saved.exists():
        state = torch.load(saved, weights_only=False)
        load(state)
        done = state["step"]
        if manager:
            manager.load_state_dict(state["manager"])
    log = open(place / f"steps-{me}", "a", buffering=1)
    log.write(json.dumps(dict(begins=done, at=time.time())) + "\n")
    stepper = torchft.Optimizer(manager, optimizer) if manager else optimizer
    while True:
        stepper.zero_grad()
        loss = run(**batch, use_cache=False).loss
        loss.backward()
        if me == 1 and (place / "memory").exists():
            (place / "memory").unlink()
            raise torch.OutOfMemoryError("an allocation failed on purpose")
        torch.nn.utils.clip_grad_norm_(params, 1.0)
        stepper.step()
        before, done = done, manager.current_step() if manager else done + 1
        if done > before:
            log.write(json.dumps(dict(step=done, at=time.time(), ranks=manager.num_participants() if manager else 2)) + "\n")
            if me == 0 and done % CHECKPOINT_EVERY == 0:
                state = whole() | {"step": done, "manager": manager.state_dict() if manager else None}
                torch.save(state, saved.with_suffix(".new"))
                saved.with_suffix(".new").rename(saved)


# ------------------------------------------------------------------------------------------------------- the systems

def children(pid):
    found = []
    with contextlib.suppress(OSError):
        for task in pathlib.Path(f"/proc/{pid}/task").iterdir():
            found += [int(child) for child in (task / "children").read_text().split()]
    return found


def lives(pid):
    with contextlib.suppress(OSError):
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    return False


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


class System:
    """Two nodes, each a launcher with one worker."""

    surroundings = {}

    def __init__(self, a, place):
        self.a, self.place, self.port, self.nodes, self.launched = a, place, free_port(), {}, 0
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={a.disk}m", "tmpfs", place / "disk"], check=True)
        self.begin()
        for node in (0, 1):
            self.launch(node)

    def begin(self):
        pass

    def spawn(self, command, **environment):
        with open(self.place / f"printed-{self.launched}", "wb") as printed:
            self.launched += 1
            return subprocess.Popen(list(map(str, command)), stdin=subprocess.DEVNULL, stdout=printed, stderr=subprocess.STDOUT,
                                    cwd=pathlib.Path(__file__).parent, env=os.environ | {"OMP_NUM_THREADS": "1"} | self.surroundings | environment)

    def launch(self, node):
        self.nodes[node] = self.spawn(*self.command(node))

    def worker(self, node):
        """The process of its worker, if it has one."""
        return next((pid for pid in children(self.nodes[node].pid) if self.is_worker(pid)), None)

    def is_worker(self, pid):
        with contextlib.suppress(OSError):
            return b"--side" in pathlib.Path(f"/proc/{pid}/cmdline").read_bytes()
        return False

    def close(self):
        for process in self.nodes.values():
            left = [process.pid, *children(process.pid)] if process.poll() is None else []
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            process.wait()
        for _ in range(50):
            if not subprocess.run(["umount", self.place / "disk"], capture_output=True).returncode:
                return
            time.sleep(0.2)
        subprocess.run(["umount", "--lazy", self.place / "disk"])


class Ddp(System):
    side = "ddp"
    # With the store of the rendezvous, workers of one attempt find addresses of another, and fail until they are left alone.
    surroundings = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}

    def command(self, node):
        return [self.torchrun("2", f"--rdzv-endpoint=127.0.0.1:{self.port}", "--rdzv-id=faults")]

    def torchrun(self, nodes, *more):
        own = [sys.executable, "-m", "torch.distributed.run", f"--nnodes={nodes}", "--nproc-per-node=1", f"--max-restarts={MANY}",
               "--rdzv-backend=c10d", *more, os.path.abspath(__file__), self.a.cox, "--side", self.side, "--place", self.place]
        return own + [f"--{name}={getattr(self.a, name)}" for name in SIZES]

    def lines(self):
        for rank in (0, 1):
            with contextlib.suppress(OSError):
                for line in (self.place / f"steps-{rank}").read_text().splitlines():
                    with contextlib.suppress(json.JSONDecodeError):
                        yield rank, json.loads(line)

    def steps(self):
        """When a step was made, and which, in the order of time."""
        return sorted((line["at"], line["step"]) for _, line in self.lines() if "step" in line)

    def out_of_memory(self):
        (self.place / "memory").touch()

    def tally(self):
        """Steps done again; samples that a step lacks, and has twice; ranks that each step of the final state had."""
        made = [[line["step"] for rank, line in self.lines() if rank == of and "step" in line] for of in (0, 1)]
        # After a rollback the newest step is lower than the highest.
        last = min(steps[-1] if steps else 0 for steps in made)
        again = sum(len(steps) - len(set(steps)) for steps in made) // 2
        lacking = sum(step not in made[of] for of in (0, 1) for step in range(1, last + 1))
        return dict(again=again, lost=self.a.batch * lacking, twice=0, shares=2 * last - lacking)


class TorchFt(Ddp):
    side = "torchft"
    surroundings = {}

    def begin(self):
        self.house = self.spawn(["torchft_lighthouse", "--min_replicas", "1", "--join_timeout_ms", "10000", "--bind", f"[::]:{self.port}"])

    def command(self, node):
        return [self.torchrun("1", "--rdzv-endpoint=localhost:0")]

    def launch(self, node):
        environment = {"REPLICA": str(node), "TORCHFT_LIGHTHOUSE": f"http://127.0.0.1:{self.port}"}
        self.nodes[node] = self.spawn(*self.command(node), **environment)

    def tally(self):
        ranks = {}
        for _, line in self.lines():
            if "step" in line:
                ranks[line["step"]] = max(ranks.get(line["step"], 0), line["ranks"])
        shares = sum(ranks.values())
        return dict(again=0, lost=self.a.batch * (2 * len(ranks) - shares), twice=0, shares=shares)

    def close(self):
        super().close()
        self.house.kill()


class Cox(System):
    side = "cox"

    def command(self, node):
        keys = [f"run.output_dir={self.place / 'disk/run'}", f"train.steps={MANY}", f"train.checkpoint_every={CHECKPOINT_EVERY}",
                f"train.global_batch={2 * self.a.batch}", "optimizer.schedule=constant", "eval.samples=0", "train.keep_checkpoints=1"]
        flags = ["--nproc-per-node=1", "--nnodes=2", f"--node-rank={node}", f"--rdzv-endpoint=127.0.0.1:{self.port}", f"--max-restarts={MANY}",
                 "--log-format=json"]
        return [[self.a.cox, "run", self.place / "run.yaml", *keys, *flags]]

    def is_worker(self, pid):
        with contextlib.suppress(OSError):
            return b"worker" in pathlib.Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        return False

    def begin(self):
        """An out-of-memory error comes at a step here: at the one that is due when it comes to the others."""
        due = next(at for at, *_ in schedule(self.a))
        keys = [f"run.output_dir={self.place / 'before'}", "train.steps=40", f"train.global_batch={2 * self.a.batch}", "eval.samples=0"]
        command = [self.a.cox, "run", self.place / "run.yaml", "--nproc-per-node=2", "--log-format=json", *keys]
        printed = subprocess.run(list(map(str, command)), check=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True).stdout
        took = statistics.median(line["total_ms"] for line in self.json(printed) if "total_ms" in line) / 1e3
        os.environ["COX_FAULT_MEMORY"] = f"rank=1 step={round(due / took)} phase=backward mib={CAPACITY_MIB // self.a.batch}"

    @staticmethod
    def json(printed):
        for line in printed.splitlines():
            with contextlib.suppress(json.JSONDecodeError):
                if line.startswith("{"):
                    yield json.loads(line)

    def steps(self):
        stamp = lambda line: datetime.datetime.fromisoformat(line["timestamp"]).timestamp()
        printed = (self.place / "printed-0").read_text(errors="replace")
        return [(stamp(line), line["committed"]) for line in self.json(printed) if "total_ms" in line]

    def out_of_memory(self):
        pass

    def tally(self):
        made = [step for _, step in self.steps()]
        audit = subprocess.run([self.a.cox, "audit", "--json", self.place / "disk/run"], capture_output=True, text=True)
        found = json.loads(audit.stdout or "{}")
        lost, twice = (found.get(key, "unknown") for key in ("missing", "duplicate"))
        return dict(again=len(made) - len(set(made)), lost=lost, twice=twice, shares=2 * made[-1] if made else 0)


# --------------------------------------------------------------------------------------------------------- the play

class Play:
    """A system while it is hit, and what a scheduler and a person do to it."""

    def __init__(self, a, system):
        self.a, self.system, self.away, self.frozen, self.filled, self.persons = a, system, {}, {}, None, 0
        self.wait(lambda: len(system.steps()) > 1, 300)
        self.began = system.steps()[0][0]

    def wait(self, seen, seconds):
        give_up = time.time() + seconds
        while not seen():
            if time.time() > give_up:
                sys.exit(f"{self.system.side}: no step or worker within {seconds} s; see {self.system.place}")
            time.sleep(0.5)
            self.tend()

    def tend(self):
        now = time.time()
        for node, process in self.system.nodes.items():
            if process.poll() is not None and now >= self.away.setdefault(node, now + DOWN):
                del self.away[node]
                self.system.launch(node)
        for pid, since in list(self.frozen.items()):
            if not lives(pid):
                del self.frozen[pid]
            elif now > since + PERSON:
                self.persons += 1
                os.kill(pid, signal.SIGKILL)
        if self.filled and now > self.filled + FULL:
            (self.system.place / "disk/filler").unlink()
            self.filled = None

    def hit(self, kind, who):
        system = self.system
        worker = system.worker(who)
        if kind in ("worker", "freeze"):
            os.kill(worker, signal.SIGKILL if kind == "worker" else signal.SIGSTOP)
            if kind == "freeze":
                self.frozen[worker] = time.time()
        elif kind == "node":
            launcher = system.nodes[1]
            for pid in [launcher.pid, *children(launcher.pid)] if launcher.poll() is None else []:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        elif kind == "memory":
            system.out_of_memory()
        elif kind == "disk":
            self.filled = time.time()
            with contextlib.suppress(OSError), open(system.place / "disk/filler", "wb", buffering=0) as filler:
                while True:
                    filler.write(bytes(1 << 16))

    def run(self):
        """Plays all faults; prints a line for each, and returns what the system came to."""
        hits = []
        for at, kind, who in schedule(self.a):
            while time.time() < self.began + at:
                time.sleep(0.5)
                self.tend()
            self.wait(lambda: self.system.worker(who), 600)
            hits.append((time.time(), kind))
            self.hit(kind, who)
        end = self.began + 60 * self.a.minutes
        while time.time() < end:
            time.sleep(0.5)
            self.tend()
        steps = [(at, step) for at, step in self.system.steps() if at <= end]
        took = []
        for at, kind in hits:
            before = max(step for when, step in steps if when <= at)
            further = [when for when, step in steps if when > at and step >= before + 2]
            took.append(min(further) - at if further else float("inf"))
            print(f"  {self.system.side}: {kind} after {at - self.began:.0f} s: two further steps after {took[-1]:.1f} s", flush=True)
        calm = [when for when, _ in steps if when < hits[0][0]]
        calm_steps = max(step for when, step in steps if when < hits[0][0]) - 1
        full = [at for at, kind in hits if kind == "disk"]
        inside = sum(len({step for when, step in steps if at <= when < at + FULL}) for at in full)
        tally = self.system.tally()
        share = (calm[-1] - calm[0]) / calm_steps / 2
        goodput = (tally["shares"] - 2 * inside) * share / (end - self.began - FULL * len(full))
        return dict(goodput=goodput, step=2 * share, took=took, persons=self.persons, **tally)


def prepare(a, place):
    """Model, data, run file and a batch of it; the file system that gets full."""
    (place / "disk").mkdir(parents=True)
    (place / "samples").mkdir()
    sizes = argparse.Namespace(**{name: getattr(a, name) for name in SIZES})
    workload.checkpoint(sizes, place)
    sizes.batch = 4096
    workload.pairs(sizes, place)
    (place / "run.yaml").write_text(json.dumps({
        "run": {"name": "faults", "output_dir": str(place / "disk/run")}, "task": {"type": "seq2seq"}, "model": {"path": str(place / "model")},
        "lora": {"rank": a.rank, "alpha": a.rank, "targets": "all-linear"}, "data": {"path": str(place / "pairs.jsonl")},
        "train": {"steps": MANY, "global_batch": 2 * a.batch, "micro_batch": a.batch, "recompute": "none"},
        "optimizer": {"lr": {"lora": 1e-4}}, "memory": {"capacity": CAPACITY_MIB << 20},
        "launch": {"nproc_per_node": 1, "threads_per_worker": 1, "device": "cpu"},
    }))
    for number in range(a.batch):
        out = place / f"samples/{number}.safetensors"
        command = [a.cox, "data", "sample", place / "run.yaml", "--index", number, "--out", out]
        subprocess.run(list(map(str, command)), check=True, stdout=subprocess.DEVNULL)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("cox")
    for name, value in SIZES.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--only", default="cox,ddp,torchft")
    for name in ("side", "place"):
        parser.add_argument(f"--{name}", help=argparse.SUPPRESS)
    a = parser.parse_args()
    a.cox = str(pathlib.Path(a.cox).resolve())
    if a.side:
        return peer(a)
    print("schedule:", ", ".join(f"{kind} at {at:.0f} s" for at, kind, _ in schedule(a)), flush=True)
    print("| | goodput | step undisturbed | steps again | samples lost, double | two further steps: median, longest | by a person |")
    for system in (Cox, Ddp, TorchFt):
        if system.side not in a.only.split(","):
            continue
        place = pathlib.Path(tempfile.mkdtemp(prefix=f"faults-{system.side}-"))
        prepare(a, place)
        running = system(a, place)
        try:
            of = Play(a, running).run()
        finally:
            running.close()
        print(f"| {system.side} | {of['goodput']:.3f} | {of['step']:.3f} s | {of['again']} | {of['lost']}, {of['twice']} | "
              f"{statistics.median(of['took']):.1f}, {max(of['took']):.1f} s | {of['persons']} |", flush=True)
        shutil.rmtree(place)


if __name__ == "__main__":
    main()
