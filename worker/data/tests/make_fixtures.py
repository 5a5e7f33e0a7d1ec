#!/usr/bin/env python3
"""Writes two small LeRobot data sets under tests/fixtures: v3.0 and v2.1, without their videos.

    python3 -m venv venv && venv/bin/pip install pyarrow==26.0.1 && venv/bin/python tests/make_fixtures.py

Their videos are clips of worker/video/tests/fixtures, which tests put where VIDEOS says. In the v3.0 set a camera's files
and an episode's place in them have nothing to do with the data's: `front` has a file that two episodes share, `wrist` has
its episodes in another order, with frames between them that belong to none.
"""
import base64
import json
import pathlib

import pyarrow as pa
import pyarrow.parquet as pq

HERE = pathlib.Path(__file__).resolve().parent / "fixtures"
FPS = 20
# The smallest PNG: one black pixel.
PIXEL = base64.b64decode("iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAIAAACQd1PeAAAADElEQVR4nGNgYGAAAAAEAAH2FzhVAAAAAElFTkSuQmCC")
FRONT, WRIST = "observation.images.front", "observation.images.wrist"
SIZES = {FRONT: (96, 128), WRIST: (120, 160)}

# Of each camera, by episode: chunk, file, first frame. Which clip a file is: `suite/sets.rs`.
V30 = {
    "lengths": [12, 17, 10],
    FRONT: [(0, 0, 0), (0, 0, 12), (0, 1, 4)],
    WRIST: [(1, 3, 10), (1, 3, 40), (1, 3, 0)],
}
V21 = {"lengths": [20, 29]}


def rows(lengths, episode):
    start, n = sum(lengths[:episode]), lengths[episode]
    state = [[float(episode), float(frame), 0.5] for frame in range(n)]
    action = [[10.0 * episode + frame, -float(frame)] for frame in range(n)]
    return pa.table({
        "observation.state": pa.array(state, pa.list_(pa.float32())),
        "action": pa.array(action, pa.list_(pa.float32())),
        "timestamp": pa.array([frame / FPS for frame in range(n)], pa.float32()),
        "frame_index": pa.array(range(n), pa.int64()),
        "episode_index": pa.array([episode] * n, pa.int64()),
        "index": pa.array(range(start, start + n), pa.int64()),
        "task_index": pa.array([episode % 2] * n, pa.int64()),
    })


def info(version, lengths, data_path, video_path):
    features = {name: {"dtype": "float32", "shape": [size], "names": None}
                for name, size in (("observation.state", 3), ("action", 2))}
    for name, (height, width) in SIZES.items():
        noted = {"video.height": height, "video.width": width, "video.fps": FPS, "video.is_depth_map": False}
        features[name] = {"dtype": "video", "shape": [height, width, 3], "names": ["height", "width", "channels"],
                          "info": {**noted, "video.codec": "av1" if name == FRONT else "h264"}}
    for name in ("timestamp", "frame_index", "episode_index", "index", "task_index"):
        features[name] = {"dtype": "float32" if name == "timestamp" else "int64", "shape": [1], "names": None}
    return {"codebase_version": version, "robot_type": "test", "total_episodes": len(lengths),
            "total_frames": sum(lengths), "total_tasks": 2, "chunks_size": 1000, "fps": FPS,
            "data_path": data_path, "video_path": video_path, "features": features}


def statistics(size, count):
    return {"min": [-30.0] * size, "max": [30.0] * size, "mean": [1.0] * size, "std": [2.0] * size, "count": [count]}


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def table(path, columns):
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(columns, path)


def v30(root):
    lengths = V30["lengths"]
    video = "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4"
    write(root / "meta/info.json",
          json.dumps(info("v3.0", lengths, "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet", video), indent=1))
    write(root / "meta/stats.json",
          json.dumps({"observation.state": statistics(3, sum(lengths)), "action": statistics(2, sum(lengths))}))
    table(root / "meta/tasks.parquet", pa.table({"task_index": [0, 1], "__index_level_0__": ["reach", "push"]}))
    episodes = {"episode_index": list(range(len(lengths))), "length": lengths,
                "data/chunk_index": [0] * len(lengths), "data/file_index": [0] * len(lengths)}
    for name in SIZES:
        chunks, files, first = zip(*V30[name])
        begin = [frame / FPS for frame in first]
        episodes |= {f"videos/{name}/chunk_index": chunks, f"videos/{name}/file_index": files,
                     f"videos/{name}/from_timestamp": begin,
                     f"videos/{name}/to_timestamp": [at + n / FPS for at, n in zip(begin, lengths)]}
    table(root / "meta/episodes/chunk-000/file-000.parquet", pa.table(episodes))
    table(root / "data/chunk-000/file-000.parquet",
          pa.concat_tables(rows(lengths, episode) for episode in range(len(lengths))))


def v21(root):
    lengths = V21["lengths"]
    video = "videos/chunk-{episode_chunk:03d}/{video_key}/episode_{episode_index:06d}.mp4"
    write(root / "meta/info.json",
          json.dumps(info("v2.1", lengths, "data/chunk-{episode_chunk:03d}/episode_{episode_index:06d}.parquet", video), indent=1))
    lines = lambda values: "".join(json.dumps(value) + "\n" for value in values)
    write(root / "meta/tasks.jsonl", lines({"task_index": n, "task": text} for n, text in enumerate(["reach", "push"])))
    write(root / "meta/episodes.jsonl", lines({"episode_index": n, "length": length} for n, length in enumerate(lengths)))
    write(root / "meta/episodes_stats.jsonl", lines(
        {"episode_index": n, "stats": {"observation.state": statistics(3, length), "action": statistics(2, length)}}
        for n, length in enumerate(lengths)))
    for episode in range(len(lengths)):
        table(root / f"data/chunk-000/episode_{episode:06d}.parquet", rows(lengths, episode))


def images(path):
    """The rows of the v3.0 set with one more column, as LeRobot stores images: their bytes, or none."""
    lengths = V30["lengths"]
    all_rows = pa.concat_tables(rows(lengths, episode) for episode in range(len(lengths)))
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    stored = [{"bytes": PIXEL + bytes([n]) if n % 7 else None, "path": f"frame-{n:06d}.png"} for n in range(sum(lengths))]
    table(path, all_rows.append_column("observation.images.top", pa.array(stored, kind)))


v30(HERE / "v3.0")
v21(HERE / "v2.1")
images(HERE / "images.parquet")
# A table of tasks in the codecs that are not read.
for codec in ["lz4", "brotli"]:
    path = HERE / f"codecs/{codec}.parquet"
    path.parent.mkdir(parents=True, exist_ok=True)
    tasks = pa.table({"task_index": pa.array([0], pa.int64()), "task": ["put the block away"]})
    pq.write_table(tasks, path, compression=codec, store_schema=False)
