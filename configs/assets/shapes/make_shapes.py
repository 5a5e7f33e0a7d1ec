"""Makes the pictures and chats of configs/sft.yaml, the same bytes every time: python3 make_shapes.py

Pictures are coloured shapes on a grey ground, 56 x 56 pixels. Chats ask about one picture in one turn or in two,
compare two pictures, or have none. Needs nothing but Python.
"""

import json
import pathlib
import random
import struct
import zlib

HERE = pathlib.Path(__file__).parent
SIDE = 56
COLOURS = {"red": (214, 40, 40), "green": (60, 160, 70), "blue": (40, 80, 200), "yellow": (240, 200, 40)}
SHAPES = ["circle", "square", "triangle"]
CHATS = 240


def inside(shape, x, y, radius):
    if shape == "circle":
        return x * x + y * y <= radius * radius
    if shape == "square":
        return max(abs(x), abs(y)) <= 0.85 * radius
    return -radius <= y <= 0.8 * radius and abs(x) <= 0.55 * (y + radius)


def picture(shape, colour, draw):
    cx, cy, radius = draw.uniform(22, 34), draw.uniform(22, 34), draw.uniform(13, 19)
    rows = []
    for y in range(SIDE):
        row = bytearray([0])
        for x in range(SIDE):
            row += bytes(COLOURS[colour] if inside(shape, x - cx, y - cy, radius) else (200, 200, 200))
        rows.append(bytes(row))
    return b"".join(rows)


def png(raw):
    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", SIDE, SIDE, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(raw, 9)) + chunk(b"IEND", b"")


def image(path):
    return {"type": "image", "image": path}


def text(words):
    return {"type": "text", "text": words}


def turn(role, content):
    return {"role": role, "content": content}


def chat(number, pictures, draw):
    path, shape, colour = draw.choice(pictures)
    kind = number % 4
    if kind == 0:
        return [
            turn("user", [image(path), text("What is in the picture?")]),
            turn("assistant", f"A {colour} {shape}."),
        ]
    if kind == 1:
        return [
            turn("user", [image(path), text("Which colour is it?")]),
            turn("assistant", f"It is {colour}."),
            turn("user", "And which shape?"),
            turn("assistant", f"It is a {shape}."),
        ]
    if kind == 2:
        other, _, second = draw.choice(pictures)
        same = f"Yes, both are {colour}." if colour == second else f"No, one is {colour} and one is {second}."
        return [
            turn("user", [image(path), image(other), text("Are they of one colour?")]),
            turn("assistant", same),
        ]
    return [
        turn("system", "You know shapes."),
        turn("user", f"How many corners has a {shape}?"),
        turn("assistant", {"circle": "None.", "square": "Four.", "triangle": "Three."}[shape]),
    ]


def main():
    draw = random.Random(7)
    pictures = []
    (HERE / "images").mkdir(exist_ok=True)
    for shape in SHAPES:
        for colour in COLOURS:
            for copy in range(3):
                path = f"images/{colour}-{shape}-{copy}.png"
                (HERE / path).write_bytes(png(picture(shape, colour, draw)))
                pictures.append((path, shape, colour))
    with open(HERE / "chats.jsonl", "w") as out:
        for number in range(CHATS):
            out.write(json.dumps({"messages": chat(number, pictures, draw)}) + "\n")


if __name__ == "__main__":
    main()
