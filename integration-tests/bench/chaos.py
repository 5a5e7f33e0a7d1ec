"""Chaos: runs of the quickstart's shape, one after another, each hit by faults of all kinds at drawn moments, held against one that was
left alone. Real processes of `cox`; Linux, Python 3.

    chaos.py --cox target/release/cox --minutes 60              # seed: today's date
    chaos.py --cox target/release/cox --seed 20261129 --only 17 # that run again: the same shape, the same faults at the same moments

  one launcher     two workers; also its launcher is killed and launched again, as a scheduler does
  two launchers    a fixed world of one worker each: where the coordinator's launcher is lost, the other one takes over
  elastic          the same with --nnodes=1:2: the world waits for a lost launcher
  shrinking        likewise, but it does not wait: it goes on with one worker, and grows again
  two machines     network namespaces; the network between them is cut in both directions or one, or loses packets

A run is lost if it does not end with code 0 in time. With two launchers, one may end with 6 (another has started a coordinator in place
of its own) and is launched again. Then `cox audit` must find nothing missing and nothing twice, and what was learned must have the same
bits, unless a shrinking run had steps with one worker: another world size sums in another order. Recovery is the time from a fault to the
second step that had not been committed before it, and so has in it what is done again after a checkpoint. Ends with 1 if anything was
lost or differs; the directories of such runs are kept.
"""

import argparse
import collections
import contextlib
import datetime
import hashlib
import json
import os
import pathlib
import random
import re
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
RESULTS = ["adapter/adapter_model.safetensors", "expert.safetensors", "sensor.safetensors"]
# Only when something hangs is it reached: machines may be shared.
PATIENCE_SECONDS = 180
STEPS = 100
# A launcher gives a coordinator up that dies more often within a minute.
COORDINATOR_KILLS = 4
# What a launcher ends with beside a coordinator that was started in place of its own.
SUCCEEDED = 6

SHAPES = ["one launcher", "two launchers", "elastic", "shrinking", "two machines"]
PROCESSES = ["worker killed", "worker killed", "all workers killed", "worker frozen", "coordinator killed", "coordinator frozen",
             "launcher killed", "launcher frozen"]
NETWORK = ["network cut", "network cut one way", "packets lost"]
CUTS = {"network cut": [["01", "10"]], "network cut one way": [["01"], ["10"]]}


class Lost(Exception):
    """A run that did not end as it should."""


def children(pid):
    found = []
    with contextlib.suppress(OSError):
        for task in pathlib.Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError):
                found += [int(child) for child in (task / "children").read_text().split()]
    return found


def has(pid, file, word):
    try:
        return word in pathlib.Path(f"/proc/{pid}/{file}").read_bytes().split(b"\0")
    except OSError:
        return False


def send(pid, number):
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def gone(pid):
    """An orphan that is dead counts as gone, though nobody may have taken its exit code yet."""
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] in "ZX"
    except OSError:
        return True


def wait(what, seen, seconds=PATIENCE_SECONDS):
    give_up = time.monotonic() + seconds
    while not seen():
        if time.monotonic() > give_up:
            raise Lost(f"{what} did not come within {seconds} s")
        time.sleep(0.02)


class Machines:
    """Two network namespaces and the router between them."""

    HOLD = "ip link set lo up && mount --make-rprivate / && echo ok && exec cat"

    def __init__(self):
        self.processes = []
        try:
            holders = [self.begin("unshare", "--net", "--mount", "sh", "-c", self.HOLD) for _ in range(2)]
            self.pids = [str(holder.pid) for holder in holders]
            router = ROOT / "integration-tests/processes/support/router.py"
            self.router = self.begin("unshare", "--net", sys.executable, str(router), *self.pids)
        except OSError:
            self.end()
            raise

    def begin(self, *command):
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        self.processes.append(process)
        if process.stdout.readline() != "ok\n":
            raise OSError("no network namespaces")
        return process

    def on(self, place, command):
        return ["nsenter", "--net", "--mount", "--target", self.pids[place], "--", "sh", "-c", 'cd "$0" && exec "$@"', str(ROOT), *command]

    def weather(self, **weather):
        self.router.stdin.write(json.dumps(weather) + "\n")
        self.router.stdin.flush()
        self.router.stdout.readline()

    def end(self):
        for process in self.processes:
            process.kill()
            process.wait()


class Run:
    """One run: its launchers, and what is done to them."""

    def __init__(self, cox, shape):
        self.cox, self.shape, self.directory = cox, shape, pathlib.Path(tempfile.mkdtemp(prefix="cox-chaos-"))
        self.output, self.machines, self.launched = self.directory / "run", None, 0
        self.launchers, self.coordinator_kills = {}, 0
        self.places = [0] if shape == "one launcher" else [0, 1]
        host = "127.0.0.1"
        if shape == "two machines":
            self.machines, host = Machines(), "10.77.0.1"
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.endpoint = f"{host}:{free.getsockname()[1]}"
        for place in self.places:
            self.launch(place)

    def launch(self, place):
        keys = [f"run.output_dir={self.output}", f"train.steps={STEPS}", "train.checkpoint_every=10", "train.global_batch=4",
                "eval.samples=2", "optimizer.warmup_steps=2", "--max-restarts=1000"]
        flags = ["--nproc-per-node=2"]
        if len(self.places) == 2:
            flags = ["--nproc-per-node=1", "--nnodes=" + ("1:2" if self.shape in ("elastic", "shrinking") else "2"),
                     f"--node-rank={place}", f"--rdzv-endpoint={self.endpoint}",
                     f"--rdzv-conf=last_call_timeout={0 if self.shape == 'shrinking' else 30}"]
        command = [self.cox, "run", "configs/quickstart.yaml", *keys, *flags]
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("COX_", "PET_", "SLURM_"))}
        if self.machines:
            command = self.machines.on(place, command)
            environment["COX_TOKEN"] = hashlib.sha256(str(self.directory).encode()).hexdigest()[:32]
        with open(self.directory / f"printed-{self.launched}-by-{place}", "wb") as printed:
            self.launchers[place] = subprocess.Popen(command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=printed,
                                                     stderr=subprocess.STDOUT)
        self.launched += 1

    def tend(self):
        """Launches again who made way for another coordinator; what else ends with an error is a loss."""
        for place, launcher in list(self.launchers.items()):
            code = launcher.poll()
            if code == SUCCEEDED and len(self.places) == 2:
                self.launch(place)
            elif code not in (None, 0):
                raise Lost(f"launcher {place} ended with {code}")

    def ended(self):
        self.tend()
        return all(launcher.poll() == 0 for launcher in self.launchers.values())

    def step(self):
        """The highest step that was committed."""
        try:
            log = (self.output / "logs/coordinator.log").read_text(errors="replace")
        except OSError:
            return 0
        return max((int(step) for step in re.findall(rf" (\d+)/{STEPS} ", log)), default=0)

    def further(self, steps, seconds=PATIENCE_SECONDS):
        """Waits for so many steps that were not committed before; false where the run has ended."""
        goal = min(STEPS, self.step() + steps)
        wait(f"step {goal}", lambda: self.ended() or self.step() >= goal, seconds)
        return self.step() >= goal and not self.ended()

    def processes(self, is_wanted):
        alive = [launcher.pid for launcher in self.launchers.values() if launcher.poll() is None]
        return [pid for launcher in alive for pid in children(launcher) if is_wanted(pid)]

    def hit(self, fault, dice):
        """Does it; whether there was somebody to do it to."""
        # Shorter and longer than heartbeats may be away.
        pause, place = dice.choice([dice.uniform(0.2, 1), dice.uniform(3, 5)]), dice.choice(self.places)
        workers = self.processes(lambda pid: has(pid, "cmdline", b"worker"))
        coordinators = self.processes(lambda pid: has(pid, "cmdline", b"coordinator"))
        who, what = fault.split()[0], fault.split()[-1]
        if fault in NETWORK:
            lossy = {"loss": dice.uniform(0.02, 0.2), "delay_ms": 5, "jitter_ms": 10}
            self.machines.weather(**({"cut": dice.choice(CUTS[fault])} if fault in CUTS else lossy))
            time.sleep(pause)
            self.machines.weather()
        elif fault == "launcher killed":
            left = children(self.launchers[place].pid)
            self.launchers[place].kill()
            self.launchers[place].wait()
            wait("the end of a killed launcher's processes", lambda: all(gone(pid) for pid in left), 60)
            time.sleep(pause / 5)
            self.launch(place)
        else:
            if fault == "coordinator killed":
                self.coordinator_kills += 1
                coordinators = coordinators if self.coordinator_kills <= COORDINATOR_KILLS else []
            victims = {"worker": workers, "all": workers, "coordinator": coordinators, "launcher": [self.launchers[place].pid]}[who]
            for pid in (victims := victims if who == "all" or not victims else [dice.choice(victims)]):
                send(pid, signal.SIGKILL if what == "killed" else signal.SIGSTOP)
            if what == "frozen":
                time.sleep(pause)
                for pid in victims:
                    send(pid, signal.SIGCONT)
            return bool(victims)
        return True

    def audit(self):
        answer = subprocess.run([self.cox, "audit", "--json", str(self.output)], capture_output=True, text=True)
        return json.loads(answer.stdout or "{}")  # Without an answer, all is missing.

    def had_both_workers(self):
        """Whether every step that stayed committed was made by two workers."""
        log = (self.output / "logs/coordinator.log").read_text(errors="replace")
        joined = re.findall(r"\((\d) of 2 workers\)", log.split("starting: generation 1 ")[0])
        generations = re.findall(r"generation \d+: (\d) of 2 workers, from step (\d+)", log)
        stands = STEPS
        for size, first in reversed([(joined[-1], 0), *generations]):
            if size != "2" and int(first) < stands:
                return False
            stands = min(stands, int(first))
        return True

    def bits(self):
        return [hashlib.sha256((self.output / name).read_bytes()).hexdigest() for name in RESULTS]

    def close(self):
        """Ends what is left of it; its directory stays."""
        for launcher in self.launchers.values():
            left = children(launcher.pid)
            if launcher.poll() is None:
                launcher.kill()
                launcher.wait()
            wait("the end of a run's processes", lambda: all(gone(pid) for pid in left), 60)
        if self.machines:
            self.machines.end()


class Tally:
    """What all runs came to."""

    def __init__(self):
        self.runs, self.faults, self.recoveries = collections.Counter(), collections.Counter(), collections.defaultdict(list)
        self.lost, self.different, self.resized, self.missing, self.duplicate = [], [], 0, 0, 0

    def show(self):
        for shape, count in self.runs.items():
            print(f"| runs, {shape} | {count} |")
        for fault, count in sorted(self.faults.items()):
            took = sorted(self.recoveries[fault])
            share = f"{statistics.median(took):.2f} s median, {took[-(-95 * len(took) // 100) - 1]:.2f} s p95" if took else "none"
            print(f"| {fault} | {count}; until two more steps: {share} |")
        print(f"| all | {self.runs.total()} runs, {self.faults.total()} faults |")
        print(f"| lost | {len(self.lost)} |\n| other bits | {len(self.different)} |\n| not compared: steps with one worker | {self.resized} |")
        print(f"| samples missing, twice | {self.missing}, {self.duplicate} |", flush=True)
        return not (self.lost or self.different or self.missing or self.duplicate)


def disturb(run, name, kinds, tally, had):
    """Hits a run until it is near its end, and notes by what."""
    for turn in range(random.Random(name).randint(2, 6)):
        # Of its own, for how much a fault draws depends on who there is to be hit.
        dice = random.Random(f"{name}-{turn}")
        fault = dice.choice(kinds)
        if not run.further(1 + dice.randrange(4)) or run.step() > 0.8 * STEPS:
            break
        time.sleep(dice.uniform(0, 0.2))
        before, began = run.step(), time.monotonic()
        if not run.hit(fault, dice):
            continue
        had.append(fault)
        tally.faults[fault] += 1
        wait("steps after a fault", lambda: run.ended() or run.step() >= min(STEPS, before + 2))
        if run.step() >= before + 2:
            tally.recoveries[fault].append(time.monotonic() - began)


def one(a, number, wanted, tally):
    name = f"{a.seed}-{number}"
    shape = random.Random(name).choice([shape for shape in SHAPES if shape in a.shapes])
    began, run, had, sound = time.monotonic(), Run(a.cox, shape), [], False
    tally.runs[shape] += 1
    try:
        disturb(run, name, PROCESSES + (NETWORK if run.machines else []), tally, had)
        wait("the end of the run", run.ended)
        audit = run.audit()
        missing, duplicate = audit.get("missing", STEPS), audit.get("duplicate", STEPS)
        tally.missing, tally.duplicate = tally.missing + missing, tally.duplicate + duplicate
        resized = shape == "shrinking" and not run.had_both_workers()
        same = resized or run.bits() == wanted
        tally.resized += resized
        tally.different += [] if same else [number]
        sound = same and not missing and not duplicate
        bits = "had steps with one worker" if resized else "same bits" if same else "OTHER BITS"
        said = f"missing {missing}, twice {duplicate}, {bits}"
    except (Lost, OSError) as error:
        tally.lost.append(number)
        said = f"LOST: {error}"
    finally:
        run.close()
    print(f"run {number}: {shape}: {said}; {time.monotonic() - began:.1f} s; {', '.join(had) or 'no fault'}", flush=True)
    if sound:
        shutil.rmtree(run.directory)
    else:
        print(f"    in {run.directory}; again: chaos.py --cox {a.cox} --seed {a.seed} --only {number} --shapes '{','.join(a.shapes)}'", flush=True)


def undisturbed(cox):
    with contextlib.closing(Run(cox, "one launcher")) as run:
        wait("the end of the run that is left alone", run.ended)
        wanted = run.bits()
    shutil.rmtree(run.directory)
    return wanted


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--cox", required=True)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--seed", default=datetime.date.today().strftime("%Y%m%d"))
    parser.add_argument("--only", type=int, help="this run alone")
    parser.add_argument("--shapes", default=",".join(SHAPES), help="of these kinds alone, with commas")
    a = parser.parse_args()
    a.cox, a.shapes = os.path.abspath(a.cox), a.shapes.split(",")
    try:
        Machines().end()
    except OSError:
        print("no network namespaces here (they take root, ip, nsenter and /dev/net/tun): nothing is done to a network", flush=True)
        a.shapes = [shape for shape in a.shapes if shape != "two machines"]
    print(f"seed {a.seed}, {a.minutes:g} minutes", flush=True)
    until, tally, wanted, number = time.monotonic() + 60 * a.minutes, Tally(), undisturbed(a.cox), 0
    if a.only is not None:
        one(a, a.only, wanted, tally)
    while a.only is None and time.monotonic() < until:
        one(a, number, wanted, tally)
        number += 1
    sys.exit(not tally.show())


if __name__ == "__main__":
    main()
