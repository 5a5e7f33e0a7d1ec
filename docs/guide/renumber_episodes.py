#!/usr/bin/env python3
"""Gives the episodes of a LeRobot data set numbers without gaps, where some were lost. Copy the data set first.

    python3 -m venv venv && venv/bin/pip install pyarrow && venv/bin/python renumber_episodes.py /data/my-robot
"""
import json
import pathlib
import sys

import pyarrow as pa
import pyarrow.parquet as pq


def renumber(file, to, columns):
    """Writes a table to a place with new values of integer columns, by name."""
    table = pq.read_table(file)
    for name, values in columns(table).items():
        at = table.column_names.index(name)
        table = table.set_column(at, table.field(at), pa.array(values, table.field(at).type))
    file.unlink()
    to.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, to)


def v3(root):
    """Many episodes in a file: only numbers in tables change. Returns episodes and frames."""
    episodes = sorted(root.glob("meta/episodes/*/*.parquet"))
    tables = [pq.read_table(file, columns=["episode_index", "length"]) for file in episodes]
    old = sorted(number for table in tables for number in table["episode_index"].to_pylist())
    new = {number: place for place, number in enumerate(old)}
    for file in episodes + sorted(root.glob("data/*/*.parquet")):
        renumber(file, file, lambda table: {"episode_index": [new[n] for n in table["episode_index"].to_pylist()]})
    return len(old), sum(sum(table["length"].to_pylist()) for table in tables)


def v2(root, chunk_size):
    """A file for each episode: files get other names, too. Returns episodes and frames."""
    def lines(name):
        path = root / "meta" / name
        return [json.loads(line) for line in path.read_text("utf-8-sig").splitlines() if line.strip()]

    episodes = sorted(lines("episodes.jsonl"), key=lambda episode: episode["episode_index"])
    new = {episode["episode_index"]: place for place, episode in enumerate(episodes)}
    frames = 0
    for episode in episodes:
        old = episode["episode_index"]
        chunk = f"chunk-{new[old] // chunk_size:03d}"
        for file in sorted(root.glob(f"data/*/episode_{old:06d}.*")) + sorted(root.glob(f"videos/*/*/episode_{old:06d}.*")):
            parts = [chunk if part.startswith("chunk-") else part for part in file.relative_to(root).parts[:-1]]
            to = root.joinpath(*parts, f"episode_{new[old]:06d}{file.suffix}")
            if file.suffix == ".parquet":
                renumber(file, to, lambda table: {
                    "episode_index": [new[old]] * len(table), "index": range(frames, frames + len(table))})
            else:
                to.parent.mkdir(parents=True, exist_ok=True)
                file.rename(to)
        frames += episode["length"]
    for name in ["episodes.jsonl", "episodes_stats.jsonl"]:
        if (root / "meta" / name).exists():
            kept = [line for line in lines(name) if line["episode_index"] in new]
            kept = [{**line, "episode_index": new[line["episode_index"]]} for line in kept]
            (root / "meta" / name).write_text("".join(json.dumps(line) + "\n" for line in kept))
    return len(episodes), frames


root = pathlib.Path(sys.argv[1])
info = json.loads((root / "meta/info.json").read_text("utf-8-sig"))
is_v3 = info["codebase_version"] == "v3.0"
info["total_episodes"], info["total_frames"] = v3(root) if is_v3 else v2(root, info.get("chunks_size", 1000))
(root / "meta/info.json").write_text(json.dumps(info, indent=4))
print(f"{info['total_episodes']} episodes, numbered from 0; `cox data stats {root} --anew --force` makes statistics of them")
