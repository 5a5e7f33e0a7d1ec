#!/usr/bin/env python3
"""Random access beside PyAV held open: one thread, RGB out, the same frames, turns alternating; medians.

    cargo build --release -p coxswain-video --example random_access
    venv/bin/python tests/bench_peer.py target/release/examples/random_access [TURNS [FRAMES]]
"""
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

import av
import numpy as np
from av.video.reformatter import VideoReformatter

SIZE, FRAMES = (640, 480), 300
CLIPS = {
    "av1_g2": ("libsvtav1", {"g": "2", "crf": "30", "preset": "12"}),
    "av1_default_gop": ("libsvtav1", {"crf": "30", "preset": "12"}),
    "h264_g12_b": ("libx264", {"g": "12", "bf": "3", "crf": "23", "sc_threshold": "0"}),
}


def write(path, codec, options):
    """A picture that drifts, with sensor noise: harder than most robots' cameras, which stand still."""
    rng = np.random.default_rng(3)
    y, x = np.mgrid[0:SIZE[1], 0:SIZE[0]]
    still = np.stack([x * 0.3 + 30, y * 0.4 + 20, (x + y) * 0.2], -1) + 40 * np.sin(x / 9 + y / 17)[..., None]
    with av.open(str(path), "w") as out:
        stream = out.add_stream(codec, rate=30, options=options)
        stream.width, stream.height, stream.pix_fmt = *SIZE, "yuv420p"
        for n in range(FRAMES):
            picture = np.roll(still, (n, 2 * n), (0, 1)) + rng.normal(0, 4, still.shape)
            out.mux(stream.encode(av.VideoFrame.from_ndarray(np.clip(picture, 0, 255).astype(np.uint8), format="rgb24")))
        out.mux(stream.encode())


def peer(path, frames, seed):
    with av.open(str(path)) as source:
        stream = source.streams.video[0]
        stream.codec_context.thread_count, stream.codec_context.thread_type = 1, "NONE"
        reformatter = VideoReformatter()
        tick = int(1 / (stream.time_base * stream.average_rate))
        first = next(source.decode(stream))
        begun = time.perf_counter()
        for _ in range(frames):
            seed = (seed * 1103515245 + 12345) % (1 << 31)
            target = first.pts + (seed >> 8) % FRAMES * tick
            source.seek(target, stream=stream)
            for frame in source.decode(stream):
                if frame.pts >= target:
                    reformatter.reformat(frame, format="rgb24", threads=1).to_ndarray()
                    break
        return (time.perf_counter() - begun) * 1000 / frames


def main():
    program = sys.argv[1]
    rounds, frames = int((sys.argv + ["5"])[2]) if len(sys.argv) > 2 else 5, int(sys.argv[3]) if len(sys.argv) > 3 else 100
    folder = pathlib.Path(tempfile.gettempdir()) / "coxswain-video-bench"
    folder.mkdir(exist_ok=True)
    for name, (codec, options) in CLIPS.items():
        path = folder / f"{name}.mp4"
        if not path.exists():
            write(path, codec, options)
        ours, theirs = [], []
        for round in range(rounds):
            message = subprocess.run([program, path, str(frames), str(round)], capture_output=True, text=True, check=True).stdout
            ours.append(float(message.split()[0]))
            theirs.append(peer(path, frames, round))
        a, b = statistics.median(ours), statistics.median(theirs)
        print(f"{name}: ours {a:.2f} ms, PyAV {b:.2f} ms, ratio {a / b:.2f}   [{message.strip()}]", flush=True)


if __name__ == "__main__":
    main()
