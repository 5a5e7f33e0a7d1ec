#!/usr/bin/env python3
"""Writes the clips under tests/fixtures and what FFmpeg makes of them (golden.txt, colours.bin).

    python3 -m venv venv && venv/bin/pip install av==18.1.0 numpy && venv/bin/python tests/make_fixtures.py

The encoders are FFmpeg's (libsvtav1, libx264, ...), the golden planes FFmpeg's decoders', the RGB swscale's at its
defaults, all as PyAV's wheel ships them. Encoders are not bit-exact between versions, so a new run rewrites clips and
goldens together; the tests hold our decoder against whatever stands here.
"""
import pathlib
import zlib

import av
import numpy as np

HERE = pathlib.Path(__file__).resolve().parent / "fixtures"
FPS = 20


def picture(width, height, n, seed):
    """A gradient that moves, a sharp square that moves the other way, and some noise: motion, edges and residuals."""
    y, x = np.mgrid[0:height, 0:width]
    noise = np.random.default_rng(1000 * seed + n).integers(0, 12, (height, width, 3))
    rgb = np.stack([(3 * x + 5 * n) % 256, (2 * y + 7 * n + 40 * seed) % 256, (x + y + 11 * n) % 256], -1) * 0.9 + noise
    left, top = (4 * n) % max(1, width - 16), (height - 16 - 3 * n) % max(1, height - 16)
    rgb[top:top + 12, left:left + 12] = (250, 30 * (n % 8), 20)
    return np.clip(rgb, 0, 255).astype(np.uint8)


def add_video(out, codec, size, options, pix_fmt="yuv420p", tags=None):
    stream = out.add_stream(codec, rate=FPS, options=options)
    stream.width, stream.height, stream.pix_fmt = *size, pix_fmt
    stream.codec_context.thread_count = 1
    for key, value in (tags or {}).items():
        setattr(stream.codec_context, key, value)
    return stream


def encode(name, codec, size, frames, options, seed=1, mux=None, **video):
    with av.open(str(HERE / name), "w", options=mux or {}) as out:
        stream = add_video(out, codec, size, options, **video)
        for n in range(frames):
            out.mux(stream.encode(av.VideoFrame.from_ndarray(picture(*size, n, seed), format="rgb24")))
        out.mux(stream.encode())


def several_tracks(name):
    """Sound, then two pictures: interleaved chunks, and a second video track that is not the one asked for."""
    with av.open(str(HERE / name), "w") as out:
        sound = out.add_stream("aac", rate=16000)
        sound.layout = "mono"
        first = add_video(out, "libx264", (80, 64), {"g": "6", "bf": "2"})
        second = add_video(out, "libsvtav1", (64, 64), {"g": "2", "crf": "30", "preset": "12"})
        for n in range(12):
            tone = av.AudioFrame.from_ndarray(np.full((1, 1024), 0.1, np.float32), format="fltp", layout="mono")
            tone.sample_rate, tone.pts = 16000, n * 1024
            out.mux(sound.encode(tone))
            for stream, size in ((first, (80, 64)), (second, (64, 64))):
                out.mux(stream.encode(av.VideoFrame.from_ndarray(picture(*size, n, 5), format="rgb24")))
        for stream in (sound, first, second):
            out.mux(stream.encode())


def copy(parts, name, skip=0, mux=None):
    """Joins files by stream copy, as LeRobot v3.0 does. `skip` starts that many frames in: the packets before it stay,
    since decoding needs them, and the muxer writes an edit list that hides them (`ffmpeg -ss ... -c copy`)."""
    with av.open(str(HERE / name), "w", options=mux or {}) as out:
        stream, end = None, 0
        for part in parts:
            with av.open(str(HERE / part)) as source:
                video = source.streams.video[0]
                stream = stream or out.add_stream_from_template(video, opaque=True)
                tick = int(1 / (video.time_base * FPS))
                last = 0
                for packet in source.demux(video):
                    if packet.dts is None:
                        continue
                    packet.pts += end - skip * tick
                    packet.dts += end - skip * tick
                    last = max(last, packet.pts + tick)
                    packet.stream = stream
                    out.mux(packet)
                end = last


def golden(name, track=0):
    """A line for the clip, then one for each frame in the order shown: its time in ticks, and the CRC-32 of its three
    planes and of its RGB."""
    lines = []
    with av.open(str(HERE / name)) as source:
        stream = source.streams.video[track]
        stream.codec_context.thread_count = 1
        for frame in source.decode(stream):
            crcs = []
            for p, plane in enumerate(frame.planes):
                w = frame.width if p == 0 else (frame.width + 1) // 2
                h = frame.height if p == 0 else (frame.height + 1) // 2
                rows = np.frombuffer(plane, np.uint8).reshape(-1, plane.line_size)[:h, :w]
                crcs.append(zlib.crc32(rows.tobytes()))
            crcs.append(zlib.crc32(frame.to_ndarray(format="rgb24").tobytes()))
            lines.append(f"{frame.pts} " + " ".join(f"{crc:08x}" for crc in crcs))
            size, colour = (frame.width, frame.height), (int(frame.colorspace), int(frame.color_range))
        codec = {"libdav1d": "av1"}.get(stream.codec_context.name, stream.codec_context.name)
        head = f"clip {name} {track} {codec} {size[0]} {size[1]} {colour[0]} {colour[1]} {stream.time_base.denominator} {len(lines)}"
    return "\n".join([head, *lines])


def colours():
    """swscale alone: random pictures through every matrix and range, so that the arithmetic is held to without a codec.
    Planes, then RGB. 4:4:4 keeps to legal values: beyond them swscale's own arithmetic wraps around."""
    rng = np.random.default_rng(7)
    size, entries, data = (50, 6), [], b""
    for pix_fmt, (cw, ch) in {"yuv420p": (2, 2), "yuv422p": (2, 1), "yuv444p": (1, 1)}.items():
        for matrix in (1, 2, 4, 5, 6, 7, 9):
            for colour_range in (1, 2):
                frame = av.VideoFrame(*size, pix_fmt)
                frame.colorspace, frame.color_range = matrix, colour_range
                raw = b""
                for p, plane in enumerate(frame.planes):
                    w, h = (size[0], size[1]) if p == 0 else (size[0] // cw, size[1] // ch)
                    low, high = (0, 256) if pix_fmt != "yuv444p" else (90, 166)
                    values = rng.integers(low, high, (h, w), dtype=np.uint8)
                    padded = np.zeros((h, plane.line_size), np.uint8)
                    padded[:, :w] = values
                    plane.update(padded)
                    raw += values.tobytes()
                rgb = frame.to_ndarray(format="rgb24")
                entries.append(f"colour {pix_fmt} {matrix} {colour_range} {size[0]} {size[1]} {len(data)}")
                data += raw + rgb.tobytes()
    (HERE / "colours.bin").write_bytes(data)
    return entries


def main():
    HERE.mkdir(exist_ok=True)
    for old in HERE.iterdir():
        old.unlink()
    svt = {"crf": "30", "preset": "12"}
    encode("av1_g2.mp4", "libsvtav1", (128, 96), 20, svt | {"g": "2"})
    encode("av1_default_gop.mp4", "libsvtav1", (96, 80), 30, svt)
    encode("av1_g12_faststart.mp4", "libsvtav1", (96, 80), 26, svt | {"g": "12"}, seed=2, mux={"movflags": "faststart"})
    encode("av1_98x70.mp4", "libsvtav1", (98, 70), 6, svt | {"g": "2"})
    encode("av1_full_range_709.mp4", "libsvtav1", (64, 64), 4, svt | {"g": "2"},
           tags={"colorspace": 1, "color_range": 2, "color_primaries": 1, "color_trc": 1})
    x264 = {"g": "12", "bf": "3", "crf": "26", "threads": "1", "sc_threshold": "0"}
    encode("h264_g12_b.mp4", "libx264", (160, 120), 30, x264)
    encode("h264_faststart.mp4", "libx264", (92, 76), 14, x264, seed=2, mux={"movflags": "faststart"})
    encode("h264_slower.mp4", "libx264", (112, 80), 26, x264 | {"preset": "slower", "refs": "5"}, seed=3)
    encode("h264_baseline.mp4", "libx264", (64, 48), 12, {"profile": "baseline", "g": "6", "threads": "1", "sc_threshold": "0"})
    encode("h264_main_cavlc.mp4", "libx264", (64, 48), 12, x264 | {"profile": "main", "x264-params": "cabac=0"})
    encode("h264_slices.mp4", "libx264", (96, 96), 12, x264 | {"x264-params": "slices=3"})
    encode("h264_open_gop.mp4", "libx264", (64, 64), 30, x264 | {"g": "8", "x264-params": "open-gop=1:scenecut=0"})
    encode("h264_no_b.mp4", "libx264", (64, 64), 16, x264 | {"bf": "0", "g": "5"})
    encode("h264_open_gop_pyramid.mp4", "libx264", (64, 64), 30, x264 | {"g": "9", "preset": "slower", "refs": "4",
           "x264-params": "open-gop=1:scenecut=0:b-pyramid=normal"}, seed=4)
    encode("h264_full_range_709.mp4", "libx264", (64, 48), 4, x264,
           tags={"colorspace": 1, "color_range": 2, "color_primaries": 1, "color_trc": 1})
    encode("h264_near_lossless.mp4", "libx264", (64, 48), 3, {"qp": "1", "g": "2", "bf": "0", "x264-params": "qpmin=0"})
    several_tracks("tracks.mp4")
    copy(["h264_g12_b.mp4"], "h264_edit_list.mp4", skip=5)
    copy(["av1_g12_faststart.mp4"], "av1_edit_list.mp4", skip=5)
    encode("part.mp4", "libx264", (160, 120), 17, x264, seed=9)
    copy(["h264_g12_b.mp4", "part.mp4", "h264_g12_b.mp4"], "h264_joined.mp4")
    encode("part.mp4", "libsvtav1", (128, 96), 9, svt | {"g": "2"}, seed=9)
    copy(["av1_g2.mp4", "part.mp4"], "av1_joined.mp4")
    (HERE / "part.mp4").unlink()

    goldens = [golden(path.name) for path in sorted(HERE.glob("*.mp4"))]
    goldens += [golden("tracks.mp4", track=1), *colours()]

    # What is refused by name.
    small = {"g": "4"}
    encode("no_hevc.mp4", "libx265", (64, 64), 2, small | {"x265-params": "log-level=none"})
    encode("no_depth.mp4", "libx265", (64, 64), 2, small | {"x265-params": "log-level=none:lossless=1"}, pix_fmt="gray12le")
    encode("no_vp9.mp4", "libvpx-vp9", (64, 64), 2, small)
    encode("no_mpeg4.mp4", "mpeg4", (64, 64), 2, small)
    encode("no_h264_422.mp4", "libx264", (64, 64), 2, small, pix_fmt="yuv422p")
    encode("no_h264_10bit.mp4", "libx264", (64, 64), 2, small, pix_fmt="yuv420p10le")
    encode("no_h264_left_crop.mp4", "libx264", (80, 64), 2, small | {"x264-params": "crop-rect=4,2,6,8"})
    encode("no_h264_interlaced.mp4", "libx264", (64, 64), 2, small | {"x264-params": "interlaced=1"})
    encode("no_av1_10bit.mp4", "libsvtav1", (64, 64), 2, svt, pix_fmt="yuv420p10le")
    encode("no_fragments.mp4", "libx264", (64, 64), 6, small, mux={"movflags": "frag_keyframe+empty_moov"})
    (HERE / "golden.txt").write_text("\n".join(goldens) + "\n")
    print(sum(p.stat().st_size for p in HERE.iterdir()), "bytes")


if __name__ == "__main__":
    main()
