"""Makes the pictures of configs/trajectory.yaml and trajectory-adapt.yaml, the same bytes every time: python3 make_pictures.py

Two domains of 48 pictures of 112 x 112 pixels: `shapes` are filled, coloured, on a ground that changes in brightness; `sketches` are
outlines in dark ink on paper with ruled lines. Needs nothing but Python.
"""

import math
import pathlib
import random
import struct
import zlib

HERE = pathlib.Path(__file__).parent
SIDE = 112
COUNT = 48
COLOURS = [(214, 40, 40), (60, 160, 70), (40, 80, 200), (240, 200, 40), (150, 60, 170), (240, 130, 40)]


def distance(kind, x, y, radius):
    """How far outside of the shape's outline a point is; negative inside."""
    if kind == "circle":
        return math.hypot(x, y) - radius
    if kind == "square":
        return max(abs(x), abs(y)) - 0.85 * radius
    return max(-0.87 * x - 0.5 * y, 0.87 * x - 0.5 * y, y) - 0.55 * radius


def figures(draw):
    for _ in range(draw.randint(1, 3)):
        turn = draw.uniform(0, math.tau)
        yield dict(
            kind=draw.choice(["circle", "square", "triangle"]),
            at=(draw.uniform(24, SIDE - 24), draw.uniform(24, SIDE - 24)),
            radius=draw.uniform(12, 30),
            turn=(math.cos(turn), math.sin(turn)),
            colour=draw.choice(COLOURS),
        )


def away(figure, x, y):
    (cx, cy), (c, s) = figure["at"], figure["turn"]
    x, y = x - cx, y - cy
    return distance(figure["kind"], c * x + s * y, c * y - s * x, figure["radius"])


def shapes(draw):
    all_of_them, ground, slope = list(figures(draw)), draw.randint(150, 220), draw.uniform(-0.4, 0.4)

    def pixel(x, y):
        inside = [figure["colour"] for figure in all_of_them if away(figure, x, y) <= 0]
        return inside[-1] if inside else (min(255, int(ground + slope * y)),) * 3

    return pixel


def sketches(draw):
    all_of_them, rule, ink = list(figures(draw)), draw.randint(9, 16), draw.randint(20, 70)

    def pixel(x, y):
        if any(abs(away(figure, x, y)) <= 1.2 for figure in all_of_them):
            return (ink, ink, ink + 10)
        return (190, 205, 225) if y % rule == 0 else (250, 248, 240)

    return pixel


def png(pixel):
    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    rows = b"".join(b"\0" + b"".join(bytes(pixel(x, y)) for x in range(SIDE)) for y in range(SIDE))
    head = struct.pack(">IIBBBBB", SIDE, SIDE, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(rows, 9)) + chunk(b"IEND", b"")


def main():
    for domain in (shapes, sketches):
        draw, folder = random.Random(domain.__name__), HERE / domain.__name__
        folder.mkdir(exist_ok=True)
        for number in range(COUNT):
            (folder / f"{number:02}.png").write_bytes(png(domain(draw)))


if __name__ == "__main__":
    main()
