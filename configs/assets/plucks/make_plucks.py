"""Makes the tracks of configs/separation.yaml, the same bytes every time: python3 make_plucks.py

Twelve tracks of 2.5 s in stereo, 16 bits, 4 kHz, a folder each: `plucks.wav`, tones with four harmonics that die away, and
`drums.wav`, bursts of noise. Every note has a pitch, a place between left and right and a loudness of its own.
"""

import math
import pathlib
import random
import struct
import wave

HERE = pathlib.Path(__file__).parent
RATE, SECONDS, TRACKS = 4000, 2.5, 12
LENGTH = int(RATE * SECONDS)


def add(track, start, note, gain):
    """Adds a note at a place between left (0) and right (1)."""
    pan, loudness = gain
    for at, value in enumerate(note[: LENGTH - start]):
        track[0][start + at] += loudness * math.cos(pan * math.pi / 2) * value
        track[1][start + at] += loudness * math.sin(pan * math.pi / 2) * value


def pluck(draw):
    pitch = 110 * 2 ** (draw.randrange(24) / 12)
    decay = draw.uniform(2.0, 6.0)
    partials = [(n, draw.uniform(0.3, 1.0) / n, draw.uniform(0, 2 * math.pi)) for n in range(1, 5) if n * pitch < 0.45 * RATE]
    times = [at / RATE for at in range(int(0.9 * RATE))]
    tone = lambda t: sum(a * math.exp(-decay * n**0.5 * t) * math.sin(2 * math.pi * n * pitch * t + phase) for n, a, phase in partials)
    return [tone(t) * min(1.0, 200 * t) for t in times]


def drum(draw):
    decay, colour = draw.uniform(18, 45), draw.uniform(0.0, 0.7)
    note, last = [], 0.0
    for at in range(int(0.3 * RATE)):
        last = colour * last + (1 - colour) * draw.uniform(-1, 1)
        note.append(2.0 * last * math.exp(-decay * at / RATE))
    return note


def track(draw, note, beat):
    sides = [[0.0] * LENGTH, [0.0] * LENGTH]
    at = draw.uniform(0, beat)
    while at < SECONDS:
        add(sides, int(at * RATE), note(draw), (draw.uniform(0.1, 0.9), draw.uniform(0.5, 1.0)))
        at += beat * draw.choice([1, 1, 2])
    loudest = max(abs(value) for side in sides for value in side)
    return [[0.4 * value / loudest for value in side] for side in sides]


def write(path, sides):
    with wave.open(str(path), "wb") as file:
        file.setnchannels(2)
        file.setsampwidth(2)
        file.setframerate(RATE)
        file.writeframes(b"".join(struct.pack("<hh", *(round(32767 * value) for value in pair)) for pair in zip(*sides)))


def main():
    for number in range(TRACKS):
        folder = HERE / f"track-{number:02}"
        folder.mkdir(exist_ok=True)
        draw = random.Random(number)
        beat = draw.uniform(0.18, 0.3)
        write(folder / "plucks.wav", track(draw, pluck, beat))
        write(folder / "drums.wav", track(draw, drum, beat))


if __name__ == "__main__":
    main()
