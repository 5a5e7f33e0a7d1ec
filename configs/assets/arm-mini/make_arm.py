"""Makes the second data set of configs/mixture.yaml: python3 make_arm.py (needs pyarrow, numpy, Pillow)

A drawn arm, not a simulated one: a disk that moves to a square. Three episodes of 16 frames in LeRobot's v2.1 layout, 10 fps, two
cameras of other sizes than those of metaworld-mini, a state of 6 and an action of 3 values.
"""

import io
import json
import pathlib

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image, ImageDraw

HERE = pathlib.Path(__file__).parent
FRAMES, FPS, SIZES = 16, 10, {"observation.images.front": 64, "observation.images.wrist": 48}
TASKS = ["move to the square", "leave the square"]


def picture(size, disk, square):
    image = Image.new("RGB", (size, size), (40, 44, 52))
    draw = ImageDraw.Draw(image)
    for (x, y), r, colour, shape in [(square, 0.12, (220, 160, 40), draw.rectangle), (disk, 0.08, (80, 160, 220), draw.ellipse)]:
        shape([round(size * v) for v in (x - r, y - r, x + r, y + r)], fill=colour)
    encoded = io.BytesIO()
    image.save(encoded, "PNG")
    return {"bytes": encoded.getvalue(), "path": None}


def episode(number):
    draws = np.random.default_rng(number)
    start, square = draws.uniform(0.2, 0.8, 2), draws.uniform(0.2, 0.8, 2)
    if number % 2:
        start, square = square, start
    rows = []
    for frame in range(FRAMES):
        at = start + (square - start) * frame / (FRAMES - 1)
        left = square - at
        rows.append(
            {
                "observation.state": [*at, *left, frame / FRAMES, float(number)],
                "action": [*(square - start) / (FRAMES - 1), np.hypot(*left)],
                "observation.images.front": picture(64, at, square),
                "observation.images.wrist": picture(48, (0.5, 0.5), 0.5 + left),
                "timestamp": frame / FPS,
                "frame_index": frame,
                "episode_index": number,
                "index": number * FRAMES + frame,
                "task_index": number % 2,
            }
        )
    return rows


def stats(rows, name):
    values = np.array([row[name] for row in rows], np.float64)
    found = {key: getattr(np, key)(values, axis=0).tolist() for key in ["min", "max", "mean", "std"]}
    return found | {"count": [len(rows)]}


def main():
    number = {"dtype": "float32", "names": None}
    features = {"observation.state": number | {"shape": [6]}, "action": number | {"shape": [3]}}
    for name, size in SIZES.items():
        features[name] = {"dtype": "image", "shape": [size, size, 3], "names": ["height", "width", "channels"]}
    features["timestamp"] = number | {"shape": [1]}
    for name in ["frame_index", "episode_index", "index", "task_index"]:
        features[name] = {"dtype": "int64", "shape": [1], "names": None}
    image = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    types = {"timestamp": pa.float32()} | {name: image for name in SIZES}
    types |= {name: pa.list_(pa.float32()) for name in ["observation.state", "action"]}
    (HERE / "meta").mkdir(exist_ok=True)
    (HERE / "data/chunk-000").mkdir(parents=True, exist_ok=True)
    listing, statistics, count = [], [], 3
    for at in range(count):
        rows = episode(at)
        schema = pa.schema([(name, types.get(name, pa.int64())) for name in rows[0]])
        pq.write_table(pa.Table.from_pylist(rows, schema), HERE / f"data/chunk-000/episode_{at:06d}.parquet")
        listing.append({"episode_index": at, "tasks": [TASKS[at % 2]], "length": FRAMES})
        of = {name: stats(rows, name) for name in ["observation.state", "action"]}
        statistics.append({"episode_index": at, "stats": of})
    info = {
        "codebase_version": "v2.1",
        "robot_type": "drawn",
        "total_episodes": count,
        "total_frames": count * FRAMES,
        "total_tasks": len(TASKS),
        "total_videos": 0,
        "total_chunks": 1,
        "chunks_size": 1000,
        "fps": FPS,
        "splits": {"train": f"0:{count}"},
        "data_path": "data/chunk-{episode_chunk:03d}/episode_{episode_index:06d}.parquet",
        "video_path": None,
        "features": features,
    }
    (HERE / "meta/info.json").write_text(json.dumps(info, indent=4) + "\n")
    tasks = [{"task_index": index, "task": task} for index, task in enumerate(TASKS)]
    for name, lines in [("episodes", listing), ("episodes_stats", statistics), ("tasks", tasks)]:
        (HERE / f"meta/{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


main()
