#!/usr/bin/env python3
"""One call on a machine with a GPU that is lent for minutes: unpacks a pack, asks its questions in the order of their worth, and has
after each step everything that is known in OUT.

    python3 worker/cuda/gpu/call.py a target/gpu/pack-a.tar.xz OUT      300 s: does it train, are the numbers right, how fast, how large
    python3 worker/cuda/gpu/call.py b target/gpu/pack-b.tar.xz OUT      240 s: operations, fixtures, races, NCCL with two ranks and a kill
    python3 worker/cuda/gpu/call.py c target/gpu/pack-a.tar.xz OUT --only 3b-full --against train.recompute=none

--only names steps (of a or b, by the pack that is given) for what failed; --against KEY=VALUE (or VARIABLE=VALUE, in capitals) runs each
3B step of them once more with that changed, in turns. --limit S ends the call after so many seconds, --steps N trains
so many in each 3B step, --small has a model of kilobytes. Only where --only names them: the steps of targets.py, with pack A.

OUT/steps.txt has a line for each step, OUT/results.tar.gz what it printed and measured (results.py reads it): two files, the second of
at most 16 MiB. Nothing is built or downloaded, and nothing is needed but Python 3.12 and the driver; libraries of CUDA are taken from
the system or from Python's packages. Where one of the first questions is answered with no, the call ends, so that time is left.
"""
import argparse
import json
import os
import pathlib
import platform
import shutil
import signal
import statistics
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import time

import durations
import shape
import targets

ROOT = pathlib.Path(__file__).resolve().parents[3]
MOST_BYTES_BACK = 16 << 20
# Of a file that would fill the archive alone, the end.
MOST_BYTES_OF_A_FILE = 2 << 20
# Kept of the limit for the last archive.
RESERVE = 8
MODEL_BYTES = 9 << 30
MODEL_IN_MEMORY = pathlib.Path("/dev/shm/coxswain-model")
LIMITS = dict(a=300, b=240, c=150)


class Call:
    """Steps that share a clock, and what is left of them."""

    def __init__(self, out, limit, only):
        self.began, self.limit, self.only = time.monotonic(), limit, only
        self.out = out
        self.scratch = pathlib.Path(tempfile.mkdtemp(prefix="coxswain-"))
        self.results = self.scratch / "results"
        self.texts = self.results / "kernels"  # that the pack lacked: kernels.py compiles them for the next
        self.texts.mkdir(parents=True)
        out.mkdir(parents=True, exist_ok=True)
        (out / "steps.txt").write_text("")
        self.running = []
        self.environment = dict(os.environ, COX_REPOSITORY=str(ROOT), PYTHONUNBUFFERED="1")

    def left(self):
        return self.limit - RESERVE - (time.monotonic() - self.began)

    def say(self, name, outcome):
        line = f"{time.monotonic() - self.began:6.1f} s  {name:14} {outcome}"
        print(line, flush=True)
        with open(self.out / "steps.txt", "a") as steps:
            print(line, file=steps)

    def start(self, name, command, **environment):
        """A command in a session of its own, which ends as one; what it prints goes to NAME.txt."""
        command = [str(word) for word in command]
        with open(self.results / f"{name}.txt", "a") as log:
            print("$", *command, file=log, flush=True)
            process = subprocess.Popen(command, cwd=ROOT, env=self.environment | environment, stdin=subprocess.DEVNULL, stdout=log,
                                       stderr=log, start_new_session=True)
        self.running.append(process)
        return process

    def wait(self, process, seconds):
        """Its exit code; None if the time was up."""
        try:
            return process.wait(max(1, min(seconds, self.left())))
        except subprocess.TimeoutExpired:
            self.end(process)
            return None

    def close(self):
        for process in self.running:
            self.end(process)
        for place in (self.scratch, MODEL_IN_MEMORY):
            shutil.rmtree(place, ignore_errors=True)

    def end(self, process):
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        process.wait()

    def run(self, name, seconds, command, **environment):
        """Its exit code, and the seconds it took."""
        began = time.monotonic()
        code = self.wait(self.start(name, command, **environment), seconds)
        return code, time.monotonic() - began

    def asked(self, command):
        """What a short command answers as JSON; None if it does not."""
        try:
            said = subprocess.run([str(word) for word in command], cwd=ROOT, env=self.environment, capture_output=True, timeout=20)
            return json.loads(said.stdout)
        except (subprocess.TimeoutExpired, ValueError):
            return None

    def tail(self, name, lines=4):
        return "".join(f"\n{'':10}| {line[:200]}" for line in (self.results / f"{name}.txt").read_text(errors="replace").splitlines()[-lines:])

    def step(self, name, action):
        """One step: `action` gives a line, and true unless the call should end here."""
        if self.only and not name.startswith(tuple(self.only)):
            return True
        if self.left() < 5:
            self.say(name, f"left out: of {self.limit} s nothing is left; --only {name} runs it")
            return True
        try:
            outcome, goes_on = action(name)
        except Exception as why:  # a step of ours that fails must not take the others along
            outcome, goes_on = f"FAILED here: {type(why).__name__}: {why}", True
        self.say(name, outcome)
        self.archive()
        return goes_on

    def archive(self):
        """All results as one file, whole or absent."""
        shutil.copy(self.out / "steps.txt", self.results)
        for file in self.results.glob("*.*"):
            if file.stat().st_size > MOST_BYTES_OF_A_FILE:
                file.write_bytes(file.read_bytes()[-MOST_BYTES_OF_A_FILE:])
        new = self.scratch / "results.tar.gz"
        with tarfile.open(new, "w:gz") as tar:
            tar.add(self.results, "results")
        if new.stat().st_size > MOST_BYTES_BACK:
            self.say("archive", f"{new.stat().st_size >> 20} MiB are more than may come back: steps.txt alone does")
            return
        shutil.copy(new, self.out / ".new")
        (self.out / ".new").rename(self.out / "results.tar.gz")


def find_libraries(environment, there):
    """Libraries of CUDA in Python's packages, where the system has none of its own; headers of the pack for the NVRTC of their version."""
    if "GPU_MODE" in environment:  # the software GPU brings its own
        return
    found = [*pathlib.Path(sysconfig.get_paths()["purelib"]).glob("nvidia/**/lib")]
    environment["LD_LIBRARY_PATH"] = ":".join([environment.get("LD_LIBRARY_PATH", ""), *map(str, found)]).strip(":")
    if (there / "cuda-13").is_dir():
        environment["CUDA_PATH"] = str(there / "cuda-13")


def unpack(call, pack):
    """Where programs may run: beside the repository's other builds."""
    there = ROOT / "target/gpu/there"
    shutil.rmtree(there, ignore_errors=True)
    with tarfile.open(pack) as tar:
        tar.extractall(there, filter="tar")
    find_libraries(call.environment, there)
    call.environment["COX_KERNELS"] = str(there / "kernels")
    return there


def facts(call, there):
    """What is here; in the background, for later, a model and PyTorch read once."""
    def act(name):
        (call.results / f"{name}.txt").touch()
        for command in (["nvidia-smi"], [there / "bin/cox", "gpu"], [there / "bin/cox", "--version"]):
            if shutil.which(command[0]):
                call.run(name, 10, command)
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") >> 30
        tools = [tool for tool in ("ncu", "compute-sanitizer", "nsys") if shutil.which(tool)]
        known = dict(kernel=platform.release(), cores=os.cpu_count(), memory_gib=memory, python=platform.python_version(), tools=tools,
                     libraries=call.environment.get("LD_LIBRARY_PATH"), kernels=(there / "kernels/compiled").read_text().split())
        (call.results / "facts.json").write_text(json.dumps(known))
        gpu = next((line.strip(" |") for line in (call.results / "facts.txt").read_text().splitlines() if "NVIDIA" in line), "")
        return f"{known['cores']} cores, {memory} GiB, tools {tools}, kernels of CUDA {' '.join(known['kernels'])}; {gpu[:90]}", True
    return act


def first(call, there):
    """A kernel, a product, a thousand products in order."""
    def act(name):
        code, took = call.run(name, 45, [there / "bin/cox", "selftest", "--device", "cuda", "--first"])
        if code == 0:
            return f"a kernel, a product and 1,000 products in order are right ({took:.0f} s){call.tail(name, 8)}", True
        return f"STOP: {'no answer in 45 s' if code is None else f'exit {code}'}; the rest is not asked{call.tail(name, 14)}", False
    return act


class Model:
    """The checkpoint of a shape, made in the background in memory, where there is room."""

    def __init__(self, call, there, small, like="configs/assets/qwen2.5-vl-3b", most_bytes=MODEL_BYTES):
        self.call, self.cox = call, there / "bin/cox"
        self.small = small
        memory = MODEL_IN_MEMORY.parent
        roomy = not small and memory.is_dir() and shutil.disk_usage(memory).free > most_bytes
        self.path = MODEL_IN_MEMORY if roomy else call.scratch / "model"
        like = "configs/assets/tiny-vla" if small else like
        shutil.rmtree(self.path, ignore_errors=True)
        self.making = call.start("model", [self.cox, "data", "make-checkpoint", "--like", like, "--tokenizer", "configs/assets/tiny-vla",
                                           "--out", self.path])

    def train(self, key, batch, steps, more=(), **environment):
        """A step of the shape: losses beside what the CPU had, times, memory, kernels that were compiled here."""
        def act(name):
            if self.call.wait(self.making, 120) != 0:
                return f"no model{self.call.tail('model')}", True
            out, kernels = self.call.scratch / name, ROOT / "target/kernels"
            before = set(kernels.rglob("*.cu"))
            watching = self.call.start(f"{name}-nvml", [self.cox, "gpu", "--watch", "--json"])
            settings = [*(shape.SMALL if self.small else []), *more]
            code, took = self.call.run(name, 120, shape.worker(self.cox, self.path, out, batch, steps, settings), **environment)
            self.call.end(watching)
            new = set(kernels.rglob("*.cu")) - before
            for text in new:
                shutil.copy(text, self.call.texts)
            summary = out / "summary.json"
            if code != 0 or not summary.exists():
                return f"FAILED: {'time is up' if code is None else f'exit {code}'} after {took:.0f} s{self.call.tail(name, 12)}", True
            shutil.copy(summary, self.call.results / f"{name}-summary.json")
            said = (self.call.results / f"{name}.txt").read_text(errors="replace")
            plan = self.call.asked(shape.plan(self.cox, self.path, batch, settings))
            found = verdict(json.loads(summary.read_text()), shape.steps(said)[-steps:], plan, key, batch, len(new))
            (self.call.results / f"{name}.json").write_text(json.dumps(found))
            shutil.rmtree(out, ignore_errors=True)
            return in_words(found), True
        return act

    def durations(self, batch, more):
        """One step by kernel, by NVIDIA's profiler: the third, after kernels are loaded and products chosen."""
        def act(name):
            if not shutil.which("ncu"):
                return "left out: no ncu here", True
            out = self.call.scratch / name
            worker = shape.worker(self.cox, self.path, out, batch, 4, [*(shape.SMALL if self.small else []), *more])
            table = self.call.scratch / f"{name}.csv"
            code, took = self.call.run(name, 90, [*durations.NCU, "--log-file", table, *worker])
            found = durations.of_kernels(table)
            (self.call.results / f"{name}.json").write_text(json.dumps(found))
            launches, total = sum(row["launches"] for row in found), sum(row["us"] for row in found) / 1e3
            return f"exit {code}, {took:.0f} s: {launches} launches, {total:.1f} ms on the GPU{'' if found else self.call.tail(name, 6)}", True
        return act


def verdict(summary, steps, plan, key, batch, compiled_here):
    """Figures of a run, with those that were expected."""
    expected = json.loads((pathlib.Path(__file__).parent / "expected.json").read_text()).get(key, dict(losses=[], norms=[]))
    losses, peak = summary["losses"], summary["peak_memory"][0]
    pairs = [*zip(losses, expected["losses"]), *zip((norm for norm, _ in steps), expected["norms"])]
    off = [abs(found - right) / abs(right) if found is not None else 1.0 for found, right in pairs]
    memory = plan["memories"][0] if plan else dict(current={}, categories={})
    # The first steps load kernels and watch the memory.
    return dict(losses=losses, worst=max(off, default=None), ms=statistics.median([ms for _, ms in steps][len(steps) // 2:]),
                warm_up_s=summary["warm_up_seconds"], planned=memory["current"].get("peak"),
                planned_in_use=memory["current"].get("peak", 0) - memory["categories"].get("framework", 0), in_use=peak["in_use"],
                reserved=peak["reserved"], nvml=peak["driver"], compiled_here=compiled_here, batch=batch)


def in_words(found):
    gib = lambda size: f"{(size or 0) / 2**30:.2f}"
    right = "nothing expected" if found["worst"] is None else (
        f"losses and norms {found['worst']:.1e} off{'' if found['worst'] <= shape.TOLERANCE else ': WRONG'}")
    compiled = "0 kernels compiled here" if not found["compiled_here"] else f"{found['compiled_here']} KERNELS COMPILED HERE: the pack lacks them"
    return (f"{found['ms']:.1f} ms a step of {found['batch']}; {right}; GiB: {gib(found['in_use'])} in use, {gib(found['planned_in_use'])} planned; "
            f"{gib(found['reserved'])} reserved; {gib(found['nvml'])} by the driver, {gib(found['planned'])} planned; {compiled}; first step {found['warm_up_s']:.1f} s more")


def target(call, there, small, its):
    """A step of another trainer's shape, beside what it has published."""
    def act(name):
        model, data, out = Model(call, there, small, its.like, its.model_bytes), call.scratch / f"{name}.jsonl", call.scratch / name
        its.write_chats(data)
        if call.wait(model.making, 120) != 0:
            return f"no model{call.tail('model')}", True
        keys = [f"run.output_dir={out}", *its.keys(model.path, data)]
        code, took = call.run(name, 240, [model.cox, "worker", "--config", its.config, "--device", "cuda", *keys])
        if code != 0:
            return f"FAILED: {'time is up' if code is None else f'exit {code}'} after {took:.0f} s{call.tail(name, 12)}", True
        shutil.copy(out / "summary.json", call.results / f"{name}-target.json")
        times = [ms for _, ms in shape.steps((call.results / f"{name}.txt").read_text(errors="replace"))]
        peak = json.loads((out / "summary.json").read_text())["peak_memory"][0]["driver"]
        return its.in_words(statistics.median(times[len(times) // 2:]), peak), True
    return act


def peers(call, small):
    """PyTorch's step, four times in one process."""
    def act(name):
        out = call.results / "peers.jsonl"
        command = [sys.executable, "worker/cuda/gpu/peer.py", "--out", out, *(["--small"] if small else [])]
        code, took = call.run(name, 200, command)
        lines = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
        if not lines:
            return f"none (exit {code}, {took:.0f} s){call.tail(name, 3)}", True
        return ", ".join(f"{line['variant']} {line.get('step_ms', 'failed')} ms" for line in lines), True
    return act


def program(call, seconds, command, **environment):
    """A test program; a test that finds no GPU passes, and that has to show."""
    def act(name):
        code, took = call.run(name, seconds, command, **environment)
        said = (call.results / f"{name}.txt").read_text(errors="replace")
        skipped = next((line for line in said.splitlines() if "skipped: " in line), "")
        passed = [line for line in said.splitlines() if line.startswith("test result:") or "SUMMARY" in line]
        outcome = "ok" if code == 0 and not skipped else f"FAILED: {'time is up' if code is None else f'exit {code}'} {skipped[:120]}"
        return f"{outcome}, {took:.0f} s; {'; '.join(passed)[:200]}{'' if code == 0 else call.tail(name, 10)}", True
    return act


def steps_of_a(call, there, a):
    named = [its for its in targets.TARGETS if its.name in a.only]
    if named:
        yield "facts", facts(call, there)
        for its in named:
            yield its.name, target(call, there, a.small, its.small() if a.small else its)
        return
    cox = Model(call, there, a.small)
    key, batch, more = ("small", 2, 4) if a.small else ("3b", 8, 32)
    count = a.steps or (3 if a.small else shape.STEPS)
    # Read once, so that the peers find it in memory. What is missing shows when they begin.
    torch = call.start("torch", [sys.executable, "-c", "import torch, transformers, peft"])
    yield "facts", facts(call, there)
    yield "first", first(call, there)
    trained = {"3b-full": (key, batch, ["train.recompute=full"]), "3b-none": (key, batch, ["train.recompute=none"]),
               "3b-larger": (None, more, ["train.recompute=full"])}
    for name, (expected, size, settings) in trained.items():
        act = cox.train(expected, size, count, settings)
        yield name, act
        for number, change in enumerate(a.against):
            variable, value = change.split("=", 1)
            changed = cox.train(expected, size, count, settings, **{variable: value}) if variable.isupper() else cox.train(
                expected, size, count, [*settings, change])
            # In turns: the baseline comes again after each.
            yield f"{name}-{change}".replace("/", "_"), changed
            yield f"{name}-again-{number}", act
    call.wait(torch, 30)
    yield "peers", peers(call, a.small)
    yield "durations", cox.durations(batch, ["train.recompute=full"])


def steps_of_b(call, there, _):
    tests, gpu, operations = ["--nocapture", "--test-threads=1"], there / "bin/gpu", there / "bin/operations"
    yield "facts", facts(call, there)
    yield "first", program(call, 45, [gpu, "first::", *tests])
    yield "operations", program(call, 90, [operations, *tests])
    yield "golden", program(call, 60, [gpu, "golden::a_gpu", *tests])
    yield "library", program(call, 60, [gpu, "products::library", *tests])
    yield "nccl", program(call, 90, [gpu, "worlds::ranks_on_one_gpu", *tests])
    if shutil.which("compute-sanitizer"):
        for tool in ("racecheck", "memcheck"):
            checked = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "9", operations, "every_operation", "rounded", *tests]
            yield tool, program(call, 90, checked)
    yield "products", program(call, 120, [gpu, "products::products", *tests], COXSWAIN_PRODUCTS="simple_cyclic,tma")
    yield "curve", program(call, 90, [gpu, "curve::a_gpu", *tests])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("call", choices=sorted(LIMITS))
    parser.add_argument("pack", type=pathlib.Path)
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("--only", nargs="+", default=[])
    parser.add_argument("--against", nargs="+", default=[])
    parser.add_argument("--limit", type=int)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--steps", type=int)
    a = parser.parse_args()
    call = Call(a.out.resolve(), a.limit or LIMITS[a.call], a.only)
    try:
        there = unpack(call, a.pack)
        call.say("unpack", f"{a.pack.name}")
        steps = steps_of_a if (there / "bin/cox").exists() else steps_of_b
        for name, action in steps(call, there, a):
            if not call.step(name, action):
                break
        call.say("end", "")
        call.archive()
    finally:
        call.close()


if __name__ == "__main__":
    main()
