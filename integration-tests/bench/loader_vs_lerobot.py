#!/usr/bin/env python3
"""The whole loader next to LeRobot's own: samples a second from disk to what Qwen2.5-VL reads, in turns; medians.

    venv/bin/pip install lerobot==0.4.4 'transformers>=4.57,<5'
    cargo build --release -p coxswain-worker --bench loader
    venv/bin/python loader_vs_lerobot.py target/release/deps/loader-* FOLDER [--rounds 5] [--batches 40] [--batch 8] [--sets av1 ...]

FOLDER is made: for each of `av1`, `h264` and `image` a set of four episodes with three cameras of 640 x 480, written by LeRobot's own
package with its own settings (AV1 and H.264 with a keyframe every two frames, CRF 30; images as PNG in parquet), from
pictures that drift with sensor noise.

Both sides: samples in random order; three pictures resized and cut into patches as the checkpoint's `preprocessor_config.json` says, the
prompt's ids, a state, sixteen actions, padded and stacked; two workers. LeRobot's is `LeRobotDataset` with
`delta_timestamps` and its decoder (torchcodec where its wheel runs, else PyAV), a `DataLoader` with two worker processes
of one thread each, and Transformers' fast processor, which is given what LeRobot decodes; ours is
the pipeline of training with two data threads and nobody who trains.
"""
import argparse
import json
import pathlib
import statistics
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
MODEL = ROOT / "configs/assets/tiny-vla"
CAMERAS = [f"observation.images.{name}" for name in ("front", "left", "wrist")]
EPISODES, FRAMES, SIZE, FPS, HORIZON = 4, 80, (480, 640), 30, 16
WARM_UP = 4  # batches, on both sides


def write(root, kind):
    """A set as LeRobot's package writes it."""
    import numpy as np
    from lerobot.datasets.lerobot_dataset import LeRobotDataset

    numbers = {"dtype": "float32", "shape": (7,), "names": [f"joint{n}" for n in range(7)]}
    camera = {"dtype": "image" if kind == "image" else "video", "shape": (*SIZE, 3), "names": ["height", "width", "channels"]}
    features = {"observation.state": numbers, "action": numbers} | {name: camera for name in CAMERAS}
    codec = {} if kind == "image" else {"vcodec": {"av1": "libsvtav1", "h264": "h264"}[kind]}
    data = LeRobotDataset.create(f"bench/{kind}", fps=FPS, features=features, root=root, use_videos=kind != "image", **codec)
    rng = np.random.default_rng(3)
    y, x = np.mgrid[0 : SIZE[0], 0 : SIZE[1]]
    for episode in range(EPISODES):
        still = [np.stack([x * 0.3 + 30, y * 0.4 + 20, (x + y) * 0.2], -1) + 40 * np.sin(x / (9 + n) + y / 17 + episode)[..., None] for n in range(3)]
        for frame in range(FRAMES):
            sample = {"observation.state": rng.normal(size=7).astype("float32"), "action": rng.normal(size=7).astype("float32"), "task": "push the cube to the goal"}
            for name, picture in zip(CAMERAS, still):
                noisy = np.roll(picture, (frame, 2 * frame), (0, 1)) + rng.normal(0, 4, picture.shape)
                sample[name] = np.clip(noisy, 0, 255).astype("uint8")
            data.add_frame(sample)
        data.save_episode()
    data.finalize()


def run_file(folder, kind):
    path = folder / f"{kind}.yaml"
    path.write_text(json.dumps({
        "run": {"name": "loader", "output_dir": str(folder / "run"), "seed": 1}, "task": {"type": "vla_flow"},
        "model": {"path": str(MODEL)}, "lora": {},
        "data": {"path": str(folder / kind), "cameras": CAMERAS, "state": "observation.state", "action": "action", "horizon": HORIZON},
        "train": {"epochs": 100, "global_batch": 8, "micro_batch": 8},
    }))
    return path


def ours(a, folder, kind):
    command = [a.program, "--config", run_file(folder, kind), "--threads", "2", "--micro", str(a.batch), "--batches", str(a.batches)]
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


class Encoded:
    """LeRobot's samples as Qwen2.5-VL reads them, in the worker process."""

    def __init__(self, data):
        from transformers import AutoTokenizer, Qwen2VLImageProcessorFast

        self.data, self.images = data, Qwen2VLImageProcessorFast.from_pretrained(str(MODEL))
        self.tokenizer = AutoTokenizer.from_pretrained(str(MODEL))

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        sample = self.data[index]
        images = self.images([sample[name] for name in CAMERAS], return_tensors="pt", do_rescale=False)
        grid = images["image_grid_thw"]
        pads = "".join(f"<|vision_start|>{'<|image_pad|>' * (int(g.prod()) // 4)}<|vision_end|>" for g in grid)
        text = f"<|im_start|>user\n{pads}{sample['task']}<|im_end|>\n<|im_start|>assistant\n"
        ids = self.tokenizer(text, return_tensors="pt")["input_ids"][0]
        return images["pixel_values"], grid, ids, sample["observation.state"], sample["action"]


def stacked(samples):
    import torch

    pixels, grids, ids, states, actions = zip(*samples)
    padded = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True)
    return torch.cat(pixels), torch.cat(grids), padded, torch.stack(states), torch.stack(actions)


def decoder():
    """torchcodec, where FFmpeg's libraries are on this machine; else what LeRobot has beside it."""
    try:
        import torchcodec.decoders  # noqa: F401
    except (ImportError, OSError, RuntimeError):
        return "pyav"
    return "torchcodec"


def theirs(a, folder, kind):
    import torch
    from lerobot.datasets.lerobot_dataset import LeRobotDataset

    deltas = {"action": [n / FPS for n in range(HORIZON)]}
    data = LeRobotDataset(f"bench/{kind}", root=folder / kind, delta_timestamps=deltas, video_backend=decoder())
    chosen = torch.utils.data.RandomSampler(data, replacement=True, num_samples=(a.batches + WARM_UP) * a.batch)
    loader = torch.utils.data.DataLoader(
        Encoded(data), batch_size=a.batch, sampler=chosen, num_workers=2, collate_fn=stacked, prefetch_factor=2,
        worker_init_fn=lambda _: torch.set_num_threads(1),
    )
    for number, batch in enumerate(loader):
        if number == WARM_UP - 1:
            begun = time.perf_counter()
    each = a.batches * a.batch / (time.perf_counter() - begun)
    pixels, grids, ids, *_ = batch
    return {"samples_per_s": each, "batch": {"samples": a.batch, "tokens": ids.shape[1], "grids": len(grids), "first_grid": grids[0].tolist()}, "decoder": data.video_backend}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program")
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batches", type=int, default=40)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--sets", nargs="+", default=["av1", "h264", "image"])
    parser.add_argument("--write", action="store_true", help="write the sets, measure nothing")
    a = parser.parse_args()
    a.folder.mkdir(parents=True, exist_ok=True)
    for kind in a.sets:
        if not (a.folder / kind).exists():
            write(a.folder / kind, kind)
        if a.write:
            continue
        rounds = [(ours(a, a.folder, kind), theirs(a, a.folder, kind)) for _ in range(a.rounds)]
        speed = [[side["samples_per_s"] for side in round] for round in rounds]
        mine, peer = (statistics.median(side) for side in zip(*speed))
        ratios = ", ".join(f"{one / other:.2f}" for one, other in speed)
        print(f"{kind}: ours {mine:.1f} samples/s, LeRobot {peer:.1f}, {mine / peer:.2f} times ({ratios})", flush=True)
        print(f"  {json.dumps(rounds[-1])}", flush=True)


if __name__ == "__main__":
    main()
