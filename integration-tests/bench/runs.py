#!/usr/bin/env python3
"""What whole runs cost: two ranks against one, the coordinator's share, EMA, dropout, skipping, replayed steps. Real `cox run`s, in turns: A B A B.

    runs.py ranks COX [--rounds 3] [CONFIG] [KEY=VALUE ...]         2 ranks of 1 thread against 1 rank of 2 threads
    runs.py coordinator COX [--rounds 3] [CONFIG] [KEY=VALUE ...]   1 rank with a coordinator against `cox worker --config`, which has none
    runs.py options COX [--rounds 2] [--before OLD] [CONFIG] [KEY=VALUE ...]    a step of `small` with EMA, dropout, and both,
                                                                    over one without; and that over one of an older program (no skipping)
    runs.py sharded COX [--rounds 3] [--nproc 2] [CONFIG] [KEY=VALUE ...]    a step of `small` on ranks of one thread that share frozen
                                                                    weights out, and on ranks that stream them, over one that hold them
    runs.py replay COX [--rounds 5] [CONFIG] [KEY=VALUE ...]        2 ranks with `faults.replay_every` of 1 and of 50, over one with 0:
                                                                    the mean of a step, in processor time and in time
    runs.py witness COX [--rounds 9] [CONFIG] [KEY=VALUE ...]       2 ranks with COX_WITNESS=1 over 2 without: the median of a step, and the
                                                                    mean in processor time
    runs.py checks COX --before OLD [--rounds 9] [CONFIG] [KEY=VALUE ...]    what the checks of values and samples cost, over an older program:
                                                                    a step of `small`, and the opening of a set of 10,000 episodes

CONFIG is configs/quickstart.yaml if not given. Seconds are `train_seconds` of summary.json: from the first step to the last.
The coordinator is a child of the launcher. Processor time of the two, as last seen before they ended, is held against that of the
whole run, workers included.
"""
import argparse
import json
import os
import pathlib
import re
import shutil
import statistics
import subprocess
import tempfile
import threading
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
TICK = os.sysconf("SC_CLK_TCK")


def own_seconds(pid):
    """Processor time of a process, not of its children."""
    fields = open(f"/proc/{pid}/stat").read().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / TICK


def coordinators(launcher):
    """Children of the launcher that are coordinators."""
    for children in pathlib.Path(f"/proc/{launcher}/task").glob("*/children"):
        for pid in children.read_text().split():
            if b"\0coordinator\0" in pathlib.Path(f"/proc/{pid}/cmdline").read_bytes():
                yield int(pid)


def measure(command, threads):
    """Runs `command` to its end; returns summary.json and processor times."""
    with tempfile.TemporaryDirectory() as out:
        command = [*command, f"run.output_dir={out}/run"]
        # The launcher sets the second for its workers; without a launcher it has to be set here.
        environment = {"MIMALLOC_PURGE_DELAY": "-1", **os.environ, "RAYON_NUM_THREADS": str(threads)}
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        printed = []
        reader = threading.Thread(target=lambda: printed.extend(process.stdout))
        reader.start()
        own = {}
        # The exit status is left for wait4, so the launcher cannot vanish under the reading of its times.
        while not os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG):
            try:
                own.update({pid: own_seconds(pid) for pid in [process.pid, *coordinators(process.pid)]})
            except (FileNotFoundError, ProcessLookupError):
                pass  # a child ended in between
            time.sleep(0.05)
        _, code, usage = os.wait4(process.pid, 0)
        reader.join()
        assert code == 0, "".join(printed)
        summary = json.load(open(f"{out}/run/summary.json"))
        # Where the log is JSON: of each step, all of it and the optimizer's part. The first two do not count.
        of_step = lambda field: [float(ms) for ms in re.findall(rf'"{field}":([0-9.e+-]+)', "".join(printed))][2:]
        return dict(
            step_ms=of_step("total_ms"), optimizer_ms=of_step("optimizer_ms"), steps=summary["steps"], seconds=summary["train_seconds"], samples_per_second=summary["samples_per_second"],
            memory={side: summary["memory"][side] / 2**20 for side in ("predicted", "measured")} if summary["memory"] else {},
            peak_mib=[rank["driver"] / 2**20 for rank in summary["peak_memory"]], own=sum(own.values()), all=usage.ru_utime + usage.ru_stime)


def show(name, run):
    own = "" if name == "alone" else f"launcher and coordinator {run['own']:.2f} s, "
    print(f"{name:24s} {run['seconds']:7.2f} s of training, {run['seconds'] / run['steps'] * 1e3:8.1f} ms a step, "
          f"{run['samples_per_second']:7.2f} samples/s, processor {run['all']:7.1f} s, {own}"
          f"peak {'/'.join(f'{mib:.0f}' for mib in run['peak_mib'])} MiB", flush=True)
    return run


def ranks(a, train):
    ratios = []
    for _ in range(a.rounds):
        two = show("2 ranks x 1 thread", measure([*train, "--nproc-per-node", "2"], 1))
        one = show("1 rank x 2 threads", measure([*train, "--nproc-per-node", "1"], 2))
        ratios.append(two["samples_per_second"] / one["samples_per_second"])
    print(f"throughput of 2 x 1 over 1 x 2: {statistics.median(ratios):.2f} ({', '.join(f'{r:.2f}' for r in ratios)})")


def coordinator(a, train):
    extra, share = [], []
    for _ in range(a.rounds):
        led = show("with a coordinator", measure([*train, "--nproc-per-node", "1"], a.threads))
        alone = show("alone", measure([a.cox, "worker", "--config", a.config, *a.overrides], a.threads))
        extra.append(led["seconds"] / alone["seconds"] - 1)
        share.append(led["own"] / led["all"])
        print(f"    launcher and coordinator: {led['own'] / led['steps'] * 1e3:.2f} ms of processor time a step, start and end included")
    print(f"processor time of launcher and coordinator: {100 * statistics.median(share):.2f} % of the run's ({', '.join(f'{100 * s:.2f}' for s in share)})")
    print(f"wall time of a step, with against without: {100 * statistics.median(extra):+.1f} % ({', '.join(f'{100 * e:+.1f}' for e in extra)})")


# What makes `small` of the checkpoint that ships.
SMALL = {"vocab_size": 8192, "hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12, "max_window_layers": 12,
         "num_attention_heads": 12, "num_key_value_heads": 4, "rope_scaling": {"type": "mrope", "mrope_section": [8, 12, 12]}}
SMALL_VISION = {"depth": 6, "hidden_size": 384, "intermediate_size": 1024, "num_heads": 6, "out_hidden_size": 768}
STEP = ["lora.rank=16", "lora.alpha=16", "expert.width=768", "expert.layers=16", "expert.heads=12", "expert.repeated_noise=1",
        "data.holdout_episodes=[]", "eval.samples=0", "train.steps=12", "train.global_batch=2", "train.micro_batch=2",
        "train.recompute=none", "train.checkpoint_every=0", "optimizer.warmup_steps=0", "--nproc-per-node", "1", "--log-format", "json"]
EMA, DROPOUT = "optimizer.ema_decay=0.999", "lora.dropout=0.1"


def make_small(cox, directory, dtype="f32"):
    """A checkpoint of random weights with the sizes of `small`."""
    like = ROOT / "configs/assets/tiny-vla"
    shapes = directory / "shapes"
    shutil.copytree(like, shapes, ignore=shutil.ignore_patterns("*.safetensors"))
    config = json.loads((like / "config.json").read_text()) | SMALL
    config["vision_config"] |= SMALL_VISION
    (shapes / "config.json").write_text(json.dumps(config))
    subprocess.run([cox, "data", "make-checkpoint", f"--like={shapes}", f"--out={directory / 'small'}", f"--dtype={dtype}"], check=True)
    return str(directory / "small")


def options(a, _):
    with tempfile.TemporaryDirectory() as directory:
        fixed = ["run", a.config, f"model.path={make_small(a.cox, pathlib.Path(directory))}", *STEP, *a.overrides]
        sides = {"plain": [a.cox], "EMA": [a.cox, EMA], "dropout": [a.cox, DROPOUT], "EMA and dropout": [a.cox, EMA, DROPOUT]}
        if a.before:
            sides["older program"] = [os.path.abspath(a.before)]
        times = {name: [] for name in sides}
        for _ in range(a.rounds):
            for name, (cox, *keys) in sides.items():
                run = show(name, measure([cox, *fixed, *keys], a.threads))
                step, optimizer = (statistics.median(run[part]) for part in ("step_ms", "optimizer_ms"))
                print(f"    median after two steps that do not count: {step:.1f} ms, of which the optimizer {optimizer:.1f}", flush=True)
                times[name].append(step)
    for name in [side for side in sides if side != "plain"]:
        over, under = (times["plain"], times[name]) if name == "older program" else (times[name], times["plain"])
        ratios = [one / other for one, other in zip(over, under)]
        what = f"plain over {name}" if name == "older program" else f"{name} over plain"
        print(f"{what}: {statistics.median(ratios):.3f} ({', '.join(f'{ratio:.3f}' for ratio in ratios)})")


def sharded(a, _):
    with tempfile.TemporaryDirectory() as directory:
        # Stored in another type than the one computed in: else there is nothing to share out.
        model = make_small(a.cox, pathlib.Path(directory), "bf16")
        step = [str(a.nproc) if before == "--nproc-per-node" else word for before, word in zip(["", *STEP], STEP)]
        fixed = ["run", a.config, f"model.path={model}", *step, "lora.targets=all-linear", "train.recompute=full",
                 f"train.global_batch={2 * a.nproc}", *a.overrides]
        sides = {"held": [], "streamed": ["memory.offload=layers"], "sharded": ["memory.shard=frozen"]}
        times = {name: [] for name in sides}
        for _ in range(a.rounds):
            for name, keys in sides.items():
                run = show(name, measure([a.cox, *fixed, *keys], 1))
                times[name].append(statistics.median(run["step_ms"]))
                memory = ", ".join(f"{mib:.1f} MiB {side}" for side, mib in run["memory"].items())
                print(f"    median after two steps that do not count: {times[name][-1]:.1f} ms; rank 0: {memory}", flush=True)
    for name in ["streamed", "sharded"]:
        ratios = [one / other for one, other in zip(times[name], times["held"])]
        print(f"{name} over held: {statistics.median(ratios):.3f} ({', '.join(f'{ratio:.3f}' for ratio in ratios)})")


def replay(a, train):
    sides = {"never": 0, "every 50": 50, "every step": 1}
    ratios = {name: [] for name in sides}
    for _ in range(a.rounds):
        ran = {}
        for name, every in sides.items():
            run = show(name, measure([*train, f"faults.replay_every={every}", "--nproc-per-node", "2", "--log-format", "json"], 1))
            ran[name] = (run["all"] / run["steps"], statistics.fmean(run["step_ms"]))
            ratios[name].append([this / never for this, never in zip(ran[name], ran["never"])])
    for name in list(sides)[1:]:
        for part, of in zip(["processor time, start and end included", "time"], zip(*ratios[name])):
            print(f"replayed {name} over never, {part}: {statistics.median(of):.3f} ({', '.join(f'{ratio:.3f}' for ratio in of)})")


def make_large(directory, episodes=10_000):
    """A v2.1 set of links to one episode; the overrides that read it."""
    like = ROOT / "configs/assets/arm-mini"
    shutil.copytree(like, directory, ignore=shutil.ignore_patterns("*.parquet", "make_*"))
    for name in ["episodes.jsonl", "episodes_stats.jsonl"]:
        first = json.loads((like / "meta" / name).read_text().splitlines()[0])
        lines = [json.dumps(first | {"episode_index": episode}) for episode in range(episodes)]
        (directory / "meta" / name).write_text("\n".join(lines) + "\n")
    info = json.loads((like / "meta/info.json").read_text())
    counts = {"total_episodes": episodes, "total_frames": 16 * episodes, "splits": {"train": f"0:{episodes}"}}
    (directory / "meta/info.json").write_text(json.dumps(info | counts))
    for episode in range(episodes):
        place = directory / f"data/chunk-{episode // info['chunks_size']:03d}/episode_{episode:06d}.parquet"
        place.parent.mkdir(parents=True, exist_ok=True)
        place.symlink_to(like / "data/chunk-000/episode_000000.parquet")
    return [f"data.path={directory}", "data.cameras=[observation.images.front]", "data.sensor=", "data.holdout_episodes=[]"]


def checks(a, _):
    sides = {"now": a.cox, "before": os.path.abspath(a.before)}
    times = {what: {name: [] for name in sides} for what in ["a step", "the opening"]}
    with tempfile.TemporaryDirectory() as directory:
        directory = pathlib.Path(directory)
        step = ["run", a.config, f"model.path={make_small(a.cox, directory)}", *STEP, *a.overrides]
        opening = ["data", "sample", a.config, *make_large(directory / "large"), "--index=0", f"--out={directory / 'sample'}"]
        for _ in range(a.rounds):
            for name, cox in sides.items():
                times["a step"][name].append(statistics.median(show(name, measure([cox, *step], a.threads))["step_ms"]))
                begin = time.perf_counter()
                subprocess.run([cox, *opening], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
                times["the opening"][name].append(1e3 * (time.perf_counter() - begin))
                print("    " + ", ".join(f"{what} {of[name][-1]:.1f} ms" for what, of in times.items()), flush=True)
    for what, of in times.items():
        ratios = [now / before for now, before in zip(of["now"], of["before"])]
        print(f"{what}, now over before: {statistics.median(ratios):.4f} ({', '.join(f'{ratio:.4f}' for ratio in ratios)})")


def witness(a, train):
    ratios = []
    for _ in range(a.rounds):
        ran = []
        for name, value in [("without witness", "0"), ("with witness", "1")]:
            os.environ["COX_WITNESS"] = value
            run = show(name, measure([*train, "--nproc-per-node", "2", "--log-format", "json"], 1))
            ran.append((statistics.median(run["step_ms"]), run["all"] / run["steps"]))
        ratios.append([there / not_there for not_there, there in zip(*ran)])
    for part, of in zip(["time", "processor time, start and end included"], zip(*ratios)):
        print(f"witness over none, {part}: {statistics.median(of):.4f} ({', '.join(f'{ratio:.4f}' for ratio in of)})")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=["ranks", "coordinator", "options", "sharded", "replay", "witness", "checks"])
    parser.add_argument("cox")
    parser.add_argument("config", nargs="?", default="configs/quickstart.yaml")
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--nproc", type=int, default=2)
    parser.add_argument("--before", help="an older program, for `options` and `checks`")
    a = parser.parse_intermixed_args()
    a.cox = os.path.abspath(a.cox)
    train = [a.cox, "run", a.config, *a.overrides]
    {"ranks": ranks, "coordinator": coordinator, "options": options, "sharded": sharded, "replay": replay, "witness": witness, "checks": checks}[a.what](a, train)


main()
