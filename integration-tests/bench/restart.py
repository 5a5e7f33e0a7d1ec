"""Faults and what they cost: `cox run` on the quickstart's tiny model, two ranks, next to torchrun's elastic restart.

usage: restart.py --cox target/release/cox [--torchrun VENV/bin/torchrun] [--kills 10] [--faults 62] [--only kill,freeze,spare,coordinator,chaos,torchrun]

  kill         kill -9 of a worker: time from the kill until a generation of full size commits a step
  freeze       SIGSTOP of a worker: the same; detection is by missed heartbeats
  spare        kill -9 of a worker where a third one waits as a spare: the same
  coordinator  kill -9 of the coordinator: time until it answers again; no worker may end, no step may be repeated
  chaos        kills of workers at even distances in four runs one after another (62 in 30 minutes, scaled down to 2 minutes); throughput
               outside recovery against runs without faults before, between and after them, the share of time outside recovery, and
               the audit of the records; about 3 minutes in all: restart.py --cox target/release/cox --only chaos
  torchrun     kill -9 of a worker of a toy that saves a checkpoint every step, under `torchrun --max-restarts=3`, defaults, and with
               TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1: time until both ranks step again

Detection is read from the coordinator's events (`cox watch --json`), whose clock is this machine's.
"""

import argparse
import json
import os
import pathlib
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
PATIENCE = 60
# Runs over which `chaos` spreads its kills.
BOUTS = 4


def median(values):
    return statistics.median(values) if values else float("nan")


def show(name, values, unit="s"):
    if values:
        print(f"{name:<44}{median(values):7.2f} {unit}   ({min(values):.2f} to {max(values):.2f}, {len(values)} times)", flush=True)


def children(pid):
    found = []
    for task in pathlib.Path(f"/proc/{pid}/task").iterdir():
        try:
            found += [int(child) for child in (task / "children").read_text().split()]
        except OSError:
            pass
    return found


def worker(launcher, rank):
    for pid in children(launcher):
        try:
            environment = pathlib.Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if f"RANK={rank}".encode() in environment:
            return pid
    return None


def coordinator(launcher):
    for pid in children(launcher):
        try:
            if b"coordinator" in pathlib.Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0"):
                return pid
        except OSError:
            continue
    return None


class Run:
    """A run and its events as they come."""

    def __init__(self, cox, steps, flags=()):
        self.dir = tempfile.mkdtemp()
        self.cox, self.events, self.changed = cox, [], threading.Condition()
        # The index of the event of the last fault: what a spare's return is looked for behind.
        self.whole = 0
        command = [cox, "run", "configs/quickstart.yaml", f"run.output_dir={self.dir}/run", f"train.steps={steps}"]
        command += ["train.checkpoint_every=0", "eval.samples=0", "--max-restarts=100000", *flags]
        self.process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        threading.Thread(target=self.follow, daemon=True).start()

    def follow(self):
        while self.process.poll() is None:
            watch = subprocess.Popen([self.cox, "watch", "--json", "--run", f"{self.dir}/run"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
            for line in watch.stdout:
                with self.changed:
                    self.events.append((time.time(), json.loads(line)))
                    self.changed.notify_all()
            watch.wait()
            time.sleep(0.01)

    def wait(self, what, since=0):
        """The first event from index `since` on that `what` is true of, with its time and index."""
        give_up = time.time() + PATIENCE
        with self.changed:
            at = since
            while True:
                while at < len(self.events):
                    when, event = self.events[at]
                    if what(event):
                        return when, at, event
                    at += 1
                if not self.changed.wait(timeout=max(0, give_up - time.time())) and time.time() >= give_up:
                    raise SystemExit(f"nothing of that kind came in {PATIENCE} s; logs in {self.dir}")

    def steps(self, count, since=None):
        """Waits for so many committed steps from now on."""
        at = len(self.events) if since is None else since
        for _ in range(count):
            when, at, event = self.wait(lambda event: "step" in event, at)
            at += 1
        return when, event["step"]["step"]

    def end(self):
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        self.process.wait(60)
        audit = subprocess.run([self.cox, "audit", "--json", f"{self.dir}/run"], capture_output=True, text=True)
        shutil.rmtree(self.dir)
        return json.loads(audit.stdout)


def training(run, rank):
    """The process of a rank by what status says: a spare has the place of the one that was killed."""
    status = json.loads(subprocess.run([run.cox, "status", "--json", "--run", f"{run.dir}/run"], capture_output=True, text=True).stdout)
    return [entry["pid"] for entry in status["ranks"] if not entry["spare"]][rank]


def hit(run, rank, number, spares=0):
    """One fault: (seconds until it is told, seconds until a step is committed again, committed steps lost)."""
    if spares:
        run.wait(lambda event: "membership" in event and event["membership"]["present"] == 2 + spares, run.whole)
    _, before = run.steps(3)
    victim = training(run, rank) if spares else worker(run.process.pid, rank)
    mark, began = len(run.events), time.time()
    run.whole = mark
    os.kill(victim, number)
    told, _, _ = run.wait(lambda event: "failure" in event, mark)
    # Back at full size: a step committed by the generation that was formed after the fault.
    formed, at, _ = run.wait(lambda event: "membership" in event and event["membership"]["present"] == event["membership"]["world_size"] == 2 and event["membership"]["generation"] > 0, mark)
    again, at, event = run.wait(lambda event: "step" in event and event is not None, at)
    return told - began, again - began, max(0, before - event["step"]["step"])


def faults(cox, name, number, repeats, spares=0):
    run = Run(cox, 1_000_000, ["--nproc-per-node", str(2 + spares), "--spares", str(spares)])
    told, again, lost = [], [], 0
    for turn in range(repeats):
        one = hit(run, turn % 2, number, spares)
        told.append(one[0])
        again.append(one[1])
        lost += one[2]
    audit = run.end()
    show(f"{name}: detected after", told)
    show(f"{name}: training again at full size after", again)
    print(f"{name}: committed steps repeated {lost}, samples missing {audit['missing']}, duplicate {audit['duplicate']}", flush=True)


def coordinator_faults(cox, repeats):
    run = Run(cox, 1_000_000)
    again = []
    for _ in range(min(repeats, 4)):
        run.steps(3)
        workers = [worker(run.process.pid, rank) for rank in (0, 1)]
        mark, began = len(run.events), time.time()
        os.kill(coordinator(run.process.pid), signal.SIGKILL)
        when, _, _ = run.wait(lambda event: "step" in event, mark)
        again.append(when - began)
        assert workers == [worker(run.process.pid, rank) for rank in (0, 1)], "a worker has ended"
    audit = run.end()
    show("coordinator killed: steps committed again after", again)
    print(f"coordinator killed: samples missing {audit['missing']}, duplicate {audit['duplicate']}, generations {len(audit['generations'])}", flush=True)


def chaos(cox, count, distance):
    """Throughput outside recovery: steps committed between two of which there was no fault, nor what followed one, by the time they took."""
    def rate(run, began, kills):
        stamps = [when for when, event in run.events if "step" in event and when >= began]
        gaps = [later - sooner for sooner, later in zip(stamps, stamps[1:])]
        # A step that was finished when the worker died may be committed between the kill and the recovery.
        pauses = kills + [when for when, event in run.events if "failure" in event or "membership" in event]
        dirty = [any(sooner <= pause <= later for pause in pauses) for sooner, later in zip(stamps, stamps[1:])]
        clean = [gap for gap, hurt in zip(gaps, dirty) if not hurt]
        return len(clean) / sum(clean), sum(gap for gap, hurt in zip(gaps, dirty) if hurt), stamps[-1] - stamps[0]

    def undisturbed(seconds):
        run = Run(cox, 1_000_000)
        run.steps(20)
        began = time.time()
        time.sleep(seconds)
        calm, _, _ = rate(run, began, [])
        run.end()
        return calm

    def stormy(kills):
        run = Run(cox, 1_000_000)
        run.steps(20)
        began, pauses = time.time(), []
        for turn in range(kills):
            time.sleep(max(0, began + turn * distance - time.time()))
            victim = worker(run.process.pid, turn % 2)
            if victim is None:
                continue
            pauses.append(time.time())
            os.kill(victim, signal.SIGKILL)
            run.steps(2)
        return rate(run, began, pauses), len(pauses), run.end()

    # A machine's speed drifts by more than what is looked for: calm runs before, between and after the bouts of kills.
    kills = [count // BOUTS + (bout < count % BOUTS) for bout in range(BOUTS)]
    kills = [share for share in kills if share]
    quiet = min(10, count * distance / 2)
    calm, bouts = [undisturbed(quiet)], []
    for share in kills:
        bouts.append(stormy(share))
        calm.append(undisturbed(quiet))
    recovering, whole = (sum(times[at] for times, _, _ in bouts) for at in (1, 2))
    struck, audits = sum(struck for _, struck, _ in bouts), [audit for _, _, audit in bouts]
    each = recovering / max(1, struck)
    kept = [100 * times[0] / statistics.mean(calm[bout:bout + 2]) for bout, (times, _, _) in enumerate(bouts)]
    print(f"chaos: {struck} kills in {whole:.0f} s, {recovering:.1f} s of it recovering: {each:.2f} s a kill, {100 * (1 - recovering / whole):.1f} % of the time outside recovery")
    print(f"chaos: as 62 kills in 30 minutes, {100 * (1 - 62 * each / 1800):.2f} % of the time outside recovery")
    print(f"chaos: steps/s without faults {', '.join(f'{speed:.2f}' for speed in calm)}; between them, outside recovery, {', '.join(f'{times[0]:.2f}' for times, _, _ in bouts)}")
    print(f"chaos: {statistics.mean(kept):.1f} % of the speed without faults ({', '.join(f'{share:.1f}' for share in kept)})")
    print(f"chaos: samples missing {sum(a['missing'] for a in audits)}, duplicate {sum(a['duplicate'] for a in audits)}, {sum(len(a['faults']) for a in audits)} faults booked", flush=True)


TOY = '''
import json, os, sys, time
import torch, torch.distributed as dist
LOG, CKPT = sys.argv[1:3]
rank, restart = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
def log(**what):
    with open(LOG, "a") as out:
        out.write(json.dumps(dict(t=time.time(), rank=rank, pid=os.getpid(), restart=restart, **what)) + "\\n")
torch.set_num_threads(1)
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(256, 256))
optimizer, start = torch.optim.AdamW(model.parameters()), 0
if os.path.exists(CKPT):
    saved = torch.load(CKPT, weights_only=True)
    model.load_state_dict(saved["model"]); optimizer.load_state_dict(saved["optimizer"]); start = saved["step"]
for step in range(start, 10**9):
    model(torch.randn(32, 256)).square().mean().backward(); optimizer.step(); optimizer.zero_grad(); time.sleep(0.02)
    log(step=step)
    if rank == 0:
        torch.save(dict(model=model.state_dict(), optimizer=optimizer.state_dict(), step=step + 1), CKPT + ".tmp"); os.replace(CKPT + ".tmp", CKPT)
'''


def torchrun_once(torchrun, environment):
    """Seconds from the kill of rank 1 until both ranks step again; None if they do not within the patience."""
    directory = tempfile.mkdtemp()
    log, toy = f"{directory}/log", f"{directory}/toy.py"
    pathlib.Path(toy).write_text(TOY)
    command = [torchrun, "--standalone", "--nproc_per_node=2", "--max-restarts=3", toy, log, f"{directory}/ckpt"]
    process = subprocess.Popen(command, env=dict(os.environ, OMP_NUM_THREADS="1", **environment), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)

    def stepping(restarted, ranks):
        lines = [json.loads(line) for line in open(log)] if os.path.exists(log) else []
        lines = [line for line in lines if (line["restart"] > 0) == restarted]
        newest = max([line["restart"] for line in lines], default=0)
        lines = [line for line in lines if line["restart"] == newest]
        return lines if {line["rank"] for line in lines} >= ranks else None

    def until(look, limit):
        give_up = time.time() + limit
        while time.time() < give_up and process.poll() is None:
            found = look()
            if found:
                return found
            time.sleep(0.02)
        return None

    try:
        lines = until(lambda: stepping(False, {0, 1}), 60)
        assert lines, "torchrun did not start"
        time.sleep(0.5)
        began = time.time()
        os.kill(next(line["pid"] for line in lines if line["rank"] == 1), signal.SIGKILL)
        lines = until(lambda: stepping(True, {0, 1}), PATIENCE)
        if not lines:
            return None
        return max(min(line["t"] for line in lines if line["rank"] == rank) for rank in (0, 1)) - began
    finally:
        if process.poll() is None:
            process.terminate()
        try:
            process.wait(40)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        shutil.rmtree(directory, ignore_errors=True)


def torchrun_faults(torchrun, repeats):
    for name, environment in [("torchrun", {}), ("torchrun, own store", {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"})]:
        times = [torchrun_once(torchrun, environment) for _ in range(repeats)]
        show(f"{name}: both ranks step again after", [t for t in times if t is not None])
        print(f"{name}: not again within {PATIENCE} s: {sum(t is None for t in times)} of {repeats}", flush=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--cox", required=True)
    parser.add_argument("--torchrun")
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--torchrun-kills", type=int, default=3)
    parser.add_argument("--faults", type=int, default=62)
    parser.add_argument("--distance", type=float, default=2.0, help="seconds between two kills of the chaos run")
    parser.add_argument("--only", default="kill,freeze,spare,coordinator,chaos,torchrun")
    arguments = parser.parse_args()
    cox, wanted = os.path.abspath(arguments.cox), arguments.only.split(",")
    if "kill" in wanted:
        faults(cox, "worker killed", signal.SIGKILL, arguments.kills)
    if "freeze" in wanted:
        faults(cox, "worker frozen", signal.SIGSTOP, max(2, arguments.kills // 3))
    if "spare" in wanted:
        faults(cox, "worker killed beside a spare", signal.SIGKILL, arguments.kills, spares=1)
    if "coordinator" in wanted:
        coordinator_faults(cox, arguments.kills)
    if "chaos" in wanted:
        chaos(cox, arguments.faults, arguments.distance)
    if "torchrun" in wanted and arguments.torchrun:
        torchrun_faults(arguments.torchrun, arguments.torchrun_kills)


if __name__ == "__main__":
    sys.exit(main())
