#!/usr/bin/env python3
"""Does a policy that was trained with `cox run` act? Meta-World's tasks in a simulator, from pictures, on starts it has not seen.

    apt-get install libosmesa6
    pip install metaworld==3.1.0 packaging "pyarrow<22" openpi-client Pillow
    rollout.py all --cox target/release/cox [--out runs/rollout] [--tasks drawer-open-v3,door-open-v3]

or step by step, each from what the step before has left in OUT:

    record      scripted experts show the tasks; OUT/data, a LeRobot v2.1 data set with pictures in PNG
    train       makes a small checkpoint with random weights, OUT/base, and trains on it with rollout.yaml: OUT/run, OUT/untrained
    evaluate    `cox serve` and openpi's client: OUT/rollouts-SEED.json, one file for each --seed it was called with
    summary     OUT/summary.json, all seeds together, and OUT/sheet.png

The policy gets one picture, the arm's own four numbers (hand and gripper) and a prompt; no position of an object, and the simulator's
markers of goals are not drawn. It takes the first ACT actions of a chunk, then looks again. Beside it stand an untrained policy; a
blind one, which is the same policy with black pictures; if `train --black` has made it (OUT/trained-blind), one that never saw anything
but black; and the expert, who knows where things are. A start is one of Meta-World's random placements; those of the evaluation are
drawn from other seeds than those of the recording.

metaworld 3.1.0 was yanked from PyPI, so it has to be asked for by its number; it needs packaging without saying so. MuJoCo draws with
OSMesa, on the processor.
"""
import argparse
import contextlib
import io
import json
import os
import resource
import shutil
import subprocess
import time
import warnings
from pathlib import Path

os.environ.setdefault("MUJOCO_GL", "osmesa")
warnings.filterwarnings("ignore")  # the experts' gains, dozens of times a second

import metaworld  # noqa: E402
import mujoco  # noqa: E402
import numpy as np  # noqa: E402
import pyarrow as pa  # noqa: E402
import pyarrow.parquet as pq  # noqa: E402
from metaworld.policies import ENV_POLICY_MAP  # noqa: E402
from openpi_client.websocket_client_policy import WebsocketClientPolicy  # noqa: E402
from PIL import Image, ImageDraw  # noqa: E402

HERE = Path(__file__).resolve().parent
PROMPTS = {
    "button-press-v3": "press the button",
    "drawer-open-v3": "open the drawer",
    "door-open-v3": "open the door",
    "window-close-v3": "close the window",
}
CAMERA = "observation.images.side"
SIDE = 96  # pixels
# From the left and above, between the arm and what it is to move. None of the cameras that come along shows both as large.
VIEW = {"lookat": (0, 0.7, 0.12), "azimuth": 150, "elevation": -40, "distance": 1.0}
FRAMES_PER_SECOND = 20
AFTER_SUCCESS = 3  # frames that are still recorded
RECORD_SEED, HELD_OUT_SEED = 0, 1000
STRIP = 8  # pictures of an episode on the contact sheet
STARTS_OF_A_SEED = 50  # Meta-World's own number


class World:
    """One task: the simulator, its expert and a camera."""

    def __init__(self, task):
        self.task, self.starts = task, {}
        self.env = metaworld.MT1(task, seed=0).train_classes[task]()
        self.renderer = mujoco.Renderer(self.env.model, SIDE, SIDE)
        self.options, self.camera = mujoco.MjvOption(), mujoco.MjvCamera()
        self.options.sitegroup[:] = 0  # markers of goals
        self.camera.type = mujoco.mjtCamera.mjCAMERA_FREE
        for name, value in VIEW.items():
            setattr(self.camera, name, value)

    def begin(self, seed, number):
        """Start `number` of those that follow from a seed."""
        seed, number = seed + number // STARTS_OF_A_SEED, number % STARTS_OF_A_SEED
        if seed not in self.starts:
            self.starts[seed] = metaworld.MT1(self.task, seed=seed).train_tasks
        self.env.set_task(self.starts[seed][number])
        self.expert = ENV_POLICY_MAP[self.task]()
        self.seen, _ = self.env.reset()

    def picture(self):
        self.renderer.update_scene(self.env.data, camera=self.camera, scene_option=self.options)
        for flag in (mujoco.mjtRndFlag.mjRND_SHADOW, mujoco.mjtRndFlag.mjRND_REFLECTION):
            self.renderer.scene.flags[flag] = False  # ten times the time on a processor
        return self.renderer.render()

    def state(self):
        """The arm's own four numbers: where the hand is, and how far the gripper is open."""
        return self.seen[:4].astype(np.float32)

    def shown(self):
        """What the expert would do, who sees everything."""
        return np.clip(self.expert.get_action(self.seen.copy()), -1, 1).astype(np.float32)

    def step(self, action):
        self.seen, _, _, _, told = self.env.step(np.clip(action, -1, 1).astype(np.float32))
        return told["success"] > 0

    def close(self):
        self.renderer.close()  # OSMesa draws black where two contexts live side by side


def png(picture):
    file = io.BytesIO()
    Image.fromarray(picture).save(file, "PNG")
    return file.getvalue()


def demonstration(world, start, steps, noise, draws):
    """Frames of one episode, or none if the expert failed. The arm is pushed about, so that it is seen off its way; what is recorded is
    what the expert would have done."""
    world.begin(RECORD_SEED, start)
    frames, left, strength = [], AFTER_SUCCESS, draws.uniform(0, noise)
    for step in range(steps):
        if step % 4 == 0:
            push = draws.normal(0, strength, 4) * [1, 1, 1, 0]
        action = world.shown()
        frames.append((world.picture(), world.state(), action))
        left -= world.step(action + push) or left < AFTER_SUCCESS
        if not left:
            return frames
    return None


def record(a):
    began, episodes, failed = time.time(), {}, 0
    for task in a.tasks:
        world, draws, start = World(task), np.random.default_rng(RECORD_SEED), 0
        while len(episodes.setdefault(task, [])) < a.episodes:
            frames = demonstration(world, start, a.steps, a.noise, draws)
            start += 1
            if frames is None:
                failed += 1
                continue
            episodes[task].append([(png(picture), picture.mean((0, 1)) / 255, state, action) for picture, state, action in frames])
        world.close()
        print(f"{task}: {a.episodes} episodes of {start} starts, {sum(map(len, episodes[task]))} frames", flush=True)
    # Tasks alternate, so that the first few episodes, which are held out, have all of them.
    together = [(task, frames) for turn in zip(*episodes.values()) for task, frames in zip(episodes, turn)]
    write(a.out / "data", together, list(a.tasks))
    kept = {"seconds": round(time.time() - began), "episodes": len(together), "starts_failed": failed, "frames": sum(len(f) for _, f in together)}
    (a.out / "recorded.json").write_text(json.dumps(kept, indent=1))
    print(kept)


def statistics(values):
    values = np.asarray(values, np.float64)
    return {k: getattr(values, k)(0).tolist() for k in ("min", "max", "mean", "std")} | {"count": [len(values)]}


def write(root, episodes, tasks):
    """A LeRobot v2.1 data set: a parquet file for each episode."""
    shutil.rmtree(root, ignore_errors=True)
    (root / "meta").mkdir(parents=True)
    (root / "data/chunk-000").mkdir(parents=True)
    lists = {name: open(root / f"meta/{name}.jsonl", "w") for name in ("episodes", "episodes_stats", "tasks")}
    vector, first = pa.list_(pa.float32(), 4), 0
    for number, (task, frames) in enumerate(episodes):
        n, (pictures, colours, states, actions) = len(frames), zip(*frames)
        counting = {"frame_index": range(n), "episode_index": [number] * n, "index": range(first, first + n), "task_index": [tasks.index(task)] * n}
        columns = {
            "observation.state": pa.array(map(list, states), vector),
            "action": pa.array(map(list, actions), vector),
            CAMERA: pa.array([{"bytes": p, "path": None} for p in pictures], pa.struct({"bytes": pa.binary(), "path": pa.string()})),
            "timestamp": pa.array(np.arange(n) / FRAMES_PER_SECOND, pa.float32()),
        } | {name: pa.array(values, pa.int64()) for name, values in counting.items()}
        pq.write_table(pa.table(columns), root / f"data/chunk-000/episode_{number:06d}.parquet")
        stats = {"observation.state": statistics(states), "action": statistics(actions)}
        stats[CAMERA] = {k: np.reshape(v, (3, 1, 1)).tolist() if k != "count" else v for k, v in statistics(colours).items()}
        print(json.dumps({"episode_index": number, "tasks": [PROMPTS[task]], "length": n}), file=lists["episodes"])
        print(json.dumps({"episode_index": number, "stats": stats}), file=lists["episodes_stats"])
        first += n
    for number, task in enumerate(tasks):
        print(json.dumps({"task_index": number, "task": PROMPTS[task]}), file=lists["tasks"])
    for file in lists.values():
        file.close()
    vectors = {"observation.state": ["x", "y", "z", "gripper"], "action": ["dx", "dy", "dz", "gripper"]}
    features = {name: {"dtype": "float32", "shape": [4], "names": names} for name, names in vectors.items()}
    features[CAMERA] = {"dtype": "image", "shape": [SIDE, SIDE, 3], "names": ["height", "width", "channels"]}
    features["timestamp"] = {"dtype": "float32", "shape": [1], "names": None}
    features |= {name: {"dtype": "int64", "shape": [1], "names": None} for name in ("frame_index", "episode_index", "index", "task_index")}
    info = {
        "codebase_version": "v2.1", "robot_type": "sawyer", "total_episodes": len(episodes), "total_frames": first, "total_tasks": len(tasks),
        "total_videos": 0, "total_chunks": 1, "chunks_size": max(1000, len(episodes)), "fps": FRAMES_PER_SECOND,
        "splits": {"train": f"0:{len(episodes)}"}, "video_path": None,
        "data_path": "data/chunk-{episode_chunk:03d}/episode_{episode_index:06d}.parquet", "features": features,
    }
    (root / "meta/info.json").write_text(json.dumps(info, indent=1))


def base(a):
    """A checkpoint with random weights: smaller patches and more of them than the one that ships, fewer decoder layers."""
    if (a.out / "base").exists():
        return
    like, small = Path(a.configs) / "assets/tiny-vla", a.out / "base-like"
    shutil.rmtree(small, ignore_errors=True)
    shutil.copytree(like, small, ignore=shutil.ignore_patterns("*.safetensors"))
    config = json.loads((like / "config.json").read_text())
    processor = json.loads((like / "preprocessor_config.json").read_text()) | {"patch_size": PATCH}
    if a.family == "qwen3_vl":
        text = QWEN3["text_config"] | {"vocab_size": config["vocab_size"]}
        config = QWEN3 | {"text_config": text} | {name: config[name] for name in config if name.endswith("token_id")}
        processor = {name: processor[name] for name in ("patch_size", "temporal_patch_size", "merge_size", "image_mean", "image_std")}
        processor |= {"processor_class": "Qwen3VLProcessor", "size": {"shortest_edge": PATCH**2, "longest_edge": SIDE**2}}
    else:
        config |= BASE
        config["vision_config"] |= BASE_VISION | {"out_hidden_size": config["hidden_size"]}
    (small / "config.json").write_text(json.dumps(config, indent=1))
    (small / "preprocessor_config.json").write_text(json.dumps(processor, indent=1))
    subprocess.run([a.cox, "data", "make-checkpoint", f"--like={small}", f"--out={a.out / 'base'}", "--dtype=f32"], check=True)


PATCH = 12
BASE = {"num_hidden_layers": 2, "max_window_layers": 2, "hidden_size": 128, "intermediate_size": 256, "initializer_range": 0.06}
BASE_VISION = {"depth": 4, "hidden_size": 128, "intermediate_size": 256, "patch_size": PATCH, "spatial_patch_size": PATCH, "window_size": 48}
QWEN3 = {
    "architectures": ["Qwen3VLForConditionalGeneration"], "model_type": "qwen3_vl", "tie_word_embeddings": False,
    "text_config": {
        "model_type": "qwen3_vl_text", "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 32, "initializer_range": 0.06, "rms_norm_eps": 1e-6, "rope_theta": 5e6, "hidden_act": "silu",
        "max_position_embeddings": 4096, "rope_scaling": {"rope_type": "default", "mrope_interleaved": True, "mrope_section": [6, 5, 5]},
    },
    "vision_config": {
        "model_type": "qwen3_vl", "depth": 4, "hidden_size": 128, "intermediate_size": 256, "num_heads": 4, "patch_size": PATCH,
        "num_position_embeddings": 64, "out_hidden_size": 128, "deepstack_visual_indexes": [0, 1, 2], "initializer_range": 0.06,
        "in_channels": 3, "spatial_merge_size": 2, "temporal_patch_size": 2, "hidden_act": "gelu_pytorch_tanh",
    },
}


def train(a):
    base(a)
    held_out = f"data.holdout_episodes={list(range(2 * len(a.tasks)))}"
    command = [a.cox, "run", str(HERE / "rollout.yaml"), f"model.path={a.out / 'base'}", held_out, *a.keys]
    data = f"data.path={a.out / 'data'}"
    if a.black:
        blacken(a.out / "data", a.out / "data-black")
        subprocess.run([*command, f"data.path={a.out / 'data-black'}", f"run.output_dir={a.out / 'trained-blind'}"], check=True)
        return
    # One step at next to no rate, for something to serve that has learned nothing.
    for file in a.out.glob("rollouts-*.json"):
        file.unlink()  # of another policy
    nothing = ["train.steps=1", "optimizer.lr={lora: 0, expert: 1e-12}", "eval.every=0", f"run.output_dir={a.out / 'untrained'}"]
    subprocess.run([*command, data, *nothing], check=True)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([*command, data, f"run.output_dir={a.out / 'run'}"], check=True)
    after, told = resource.getrusage(resource.RUSAGE_CHILDREN), json.loads((a.out / "run/summary.json").read_text())
    used = {"seconds": told["train_seconds"], "processor_seconds": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime}
    errors = [told[when]["mse_normalized"] for when in ("error_before", "error_after")]
    used |= {"steps": told["steps"], "mse_normalized": errors, "load": os.getloadavg()}
    (a.out / "trained.json").write_text(json.dumps(used, indent=1))


def blacken(data, black):
    """The same demonstrations with black pictures, for a policy that never had eyes."""
    shutil.rmtree(black, ignore_errors=True)
    shutil.copytree(data, black)
    nothing = {"bytes": png(np.zeros((SIDE, SIDE, 3), np.uint8)), "path": None}
    for file in black.glob("data/*/*.parquet"):
        table = pq.read_table(file)
        column = table.schema.get_field_index(CAMERA)
        pq.write_table(table.set_column(column, CAMERA, pa.array([nothing] * len(table), table.schema.field(column).type)), file)


class Served:
    """A run behind `cox serve`, and a client of it."""

    def __init__(self, a, run):
        command = [a.cox, "serve", str(run), "--listen=127.0.0.1:0", "--device=cpu"]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        line = next((line for line in self.process.stdout if "serving at" in line), None)
        if line is None:
            raise SystemExit(f"{run} could not be served")
        host, port = line.split("ws://")[1].split()[0].rsplit(":", 1)
        self.client = WebsocketClientPolicy(host=host, port=int(port))

    def __enter__(self):
        return self.client

    def __exit__(self, *_):
        self.client._ws.close()
        self.process.terminate()
        self.process.wait()


def roll_out(world, client, number, a, black=False):
    """One episode; returns the step of success, or none, pictures in between, and of each chunk how far its first action that is taken
    is from what the chunk before had for that step."""
    world.begin(a.seed, number)
    chunk, seen, jumps = [], [], []
    asked, taken = None, 0
    for step in range(a.steps):
        if number == 0 and step % 5 == 0:
            seen.append(world.picture())
        if client is None:
            chunk = [world.shown()]
        elif asked is None and (not len(chunk) or taken >= a.act):
            picture = np.zeros((SIDE, SIDE, 3), np.uint8) if black else world.picture()
            observation = {CAMERA: picture, "observation.state": world.state(), "prompt": PROMPTS[world.task]}
            if a.rtc and len(chunk):
                observation |= {"prev_actions": np.ascontiguousarray(chunk, np.float32), "inference_delay": min(a.delay, len(chunk))}
            answer = client.infer({**observation, "seed": 1000 * number + step})["actions"]
            asked = (step, answer)
        # The first chunk is waited for: the arm stands still.
        if asked is not None and (not len(chunk) or step - asked[0] >= a.delay):
            new, taken, asked = asked[1][step - asked[0] :], 0, None
            if len(chunk):
                jumps.append(float(np.linalg.norm(new[0] - chunk[0])))
            chunk = new
        action, chunk = chunk[0], chunk[1:]
        taken += 1
        if world.step(action):
            return step + 1, [*seen, world.picture()], jumps
    return None, [*seen, world.picture()], jumps


def evaluate(a):
    # Who acts: the run that is served, and whether its pictures are black.
    acting = {"expert": (None, False), "untrained": ("untrained", False), "policy": ("run", False), "blind": ("run", True)}
    if (a.out / "trained-blind/policy.json").exists():
        acting["trained-blind"] = ("trained-blind", True)
    acting = {who: how for who, how in acting.items() if who in (a.who or acting)}
    found, jumped, began = {}, {}, time.time()
    (a.out / "strips").mkdir(exist_ok=True)
    chunking = (f"-delay{a.delay}" if a.delay else "") + ("-rtc" if a.rtc else "")
    with contextlib.ExitStack() as stack:
        clients = {run: stack.enter_context(Served(a, a.out / run)) for run in {run for run, _ in acting.values()} - {None}} | {None: None}
        for task in a.tasks:
            world = World(task)
            for who, (run, black) in acting.items():
                rolled = [roll_out(world, clients[run], number, a, black) for number in range(a.starts)]
                who += chunking
                found.setdefault(who, {})[task] = [steps for steps, *_ in rolled]
                jumped.setdefault(who, {})[task] = float(np.mean([jump for *_, jumps in rolled for jump in jumps] or [0]))
                seen = rolled[0][1]
                strip = [seen[round(i * (len(seen) - 1) / (STRIP - 1))] for i in range(STRIP)]
                Image.fromarray(np.concatenate(strip, 1)).save(a.out / f"strips/{a.seed}-{task}-{who}.png")
                print(f"seed {a.seed} {task:16} {who:14} {won(found[who][task]):3} of {a.starts}, jump {jumped[who][task]:.3f}", flush=True)
            world.close()
    file = a.out / f"rollouts-{a.seed}.json"
    before = json.loads(file.read_text()) if file.exists() else {}
    found, jumped = before.get("found", {}) | found, before.get("jumped", {}) | jumped
    told = {"seed": a.seed, "act": a.act, "steps": a.steps, "seconds": round(time.time() - began), "found": found, "jumped": jumped}
    file.write_text(json.dumps(told))


def won(steps):
    return sum(step is not None for step in steps)


def interval(successes, starts):
    """Of a rate, with 95 % confidence (Wilson)."""
    z, rate = 1.96, successes / starts
    middle, wide = rate + z * z / (2 * starts), z * (rate * (1 - rate) / starts + (z / (2 * starts)) ** 2) ** 0.5
    return [round((middle + side * wide) / (1 + z * z / starts), 3) for side in (-1, 1)]


def summary(a):
    """All seeds together, and a picture: every task's first start by the policy, and below it by the blind one."""
    told = [json.loads(file.read_text()) for file in sorted(a.out.glob("rollouts-*.json"))]
    found, jumped = {}, {}
    for seed in told:
        for who, tasks in seed["jumped"].items():
            for task, jump in tasks.items():
                jumped.setdefault(who, {}).setdefault(task, []).append(jump)
        for who, tasks in seed["found"].items():
            for task, steps in tasks.items():
                found.setdefault(who, {}).setdefault(task, {})[seed["seed"]] = [won(steps), len(steps)]
    sums = {who: {task: [sum(each) for each in zip(*s.values())] for task, s in tasks.items()} for who, tasks in found.items()}
    rates = {who: {task: w / n for task, (w, n) in tasks.items()} for who, tasks in sums.items()}
    intervals = {who: {task: interval(w, n) for task, (w, n) in tasks.items()} for who, tasks in sums.items()}
    jumps = {who: {task: float(np.mean(each)) for task, each in tasks.items()} for who, tasks in jumped.items()}
    means = {who: float(np.mean(list(tasks.values()))) for who, tasks in rates.items()}
    results = {name: json.loads((a.out / f"{name}.json").read_text()) for name in ("recorded", "trained") if (a.out / f"{name}.json").exists()}
    results |= {"mean": means, "rate": rates, "interval": intervals, "jump": jumps, "successes_and_starts_by_seed": found}
    (a.out / "summary.json").write_text(json.dumps(results, indent=1))
    for who, tasks in rates.items():
        each = (f"{task} {rate:.2f} ({intervals[who][task][0]:.2f} to {intervals[who][task][1]:.2f}), jump {jumps[who][task]:.3f}"
                for task, rate in tasks.items())
        print(f"{who:18} mean {means[who]:.2f}   " + "   ".join(each))
    first = told[0]
    rows = [(task, who) for task in first["found"]["policy"] for who in ("policy", "blind") if who in first["found"]]
    image = Image.new("RGB", (130 + STRIP * SIDE, len(rows) * SIDE), "white")
    pen = ImageDraw.Draw(image)
    for row, (task, who) in enumerate(rows):
        steps = first["found"][who][task]
        ended = f"done, {steps[0]} steps" if steps[0] else f"not in {first['steps']} steps"
        pen.multiline_text((6, row * SIDE + 18), "\n".join([task, who, ended, f"{won(steps)} of {len(steps)} starts"]), "black")
        image.paste(Image.open(a.out / f"strips/{first['seed']}-{task}-{who}.png"), (130, row * SIDE))
    image.quantize(192).save(a.out / "sheet.png", optimize=True)
    print(a.out / "sheet.png", (a.out / "sheet.png").stat().st_size, "bytes")


STAGES = {"record": record, "train": train, "evaluate": evaluate, "summary": summary}


def chosen(names):
    names = names.split(",")
    if unknown := set(names) - set(PROMPTS):
        raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: not of {', '.join(PROMPTS)}")
    return names


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["all", *STAGES])
    parser.add_argument("keys", nargs="*", metavar="KEY=VALUE", help="of the run file")
    parser.add_argument("--cox", default="cox")
    parser.add_argument("--configs", default=HERE.parents[1] / "configs", help="the folder of the repository")
    parser.add_argument("--family", choices=["qwen2_5_vl", "qwen3_vl"], default="qwen2_5_vl", help="of the checkpoint with random weights")
    parser.add_argument("--out", type=Path, default=Path("runs/rollout"))
    parser.add_argument("--tasks", type=chosen, default=list(PROMPTS), help="of " + ",".join(PROMPTS))
    parser.add_argument("--episodes", type=int, default=50, help="recorded for each task")
    parser.add_argument("--noise", type=float, default=0.4, help="strongest push while recording, of 1")
    parser.add_argument("--starts", type=int, default=20, help="held out, for each task")
    parser.add_argument("--seed", type=int, default=HELD_OUT_SEED, help="of the held-out starts")
    parser.add_argument("--steps", type=int, default=200, help="after which an episode has failed")
    parser.add_argument("--act", type=int, default=4, help="actions of a chunk that are taken before the policy looks again")
    parser.add_argument("--delay", type=int, default=0, help="actions that are taken before an answer is there; needs a horizon of ACT + 2 DELAY")
    parser.add_argument("--rtc", action="store_true", help="tell the server which actions those are (real-time chunking)")
    parser.add_argument("--who", type=lambda names: names.split(","), help="of expert,untrained,policy,blind,trained-blind; all if absent")
    parser.add_argument("--black", action="store_true", help="train on black pictures, for OUT/trained-blind")
    a = parser.parse_intermixed_args()
    a.out.mkdir(parents=True, exist_ok=True)
    for what in STAGES if a.what == "all" else [a.what]:
        STAGES[what](a)


if __name__ == "__main__":
    main()
