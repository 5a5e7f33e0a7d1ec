#!/usr/bin/env python3
"""Draws twenty losses of LeRobot's and ours, of a golden policy that learns, and those of the policy as it was:

cargo test --workspace --test lerobot -- --nocapture | docs/figures/steps.py smolvla > docs/figures/smolvla-steps.svg
"""

import json
import os
import re
import struct
import sys

CASE = sys.argv[1]
STEPS = os.path.join(os.path.dirname(__file__), f"../../integration-tests/fixtures/golden/{CASE}/steps.safetensors")
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 640, 240, 44, 12, 30, 34


def losses(name):
    data = open(STEPS, "rb").read()
    size = struct.unpack("<Q", data[:8])[0]
    begin, end = json.loads(data[8 : 8 + size])[f"losses.{name}"]["data_offsets"]
    return struct.unpack(f"<{(end - begin) // 4}f", data[8 + size + begin : 8 + size + end])


def main():
    ours = [float(loss) for loss in re.findall(rf"^{CASE} faster \d+: ([\d.]+)", sys.stdin.read(), re.M)]
    there, untrained = losses("faster"), losses("untrained")
    assert len(ours) == len(there), "the test's output is to be piped in"
    top = int(max(untrained)) + 1

    def x(step):
        return LEFT + 10 + (WIDTH - LEFT - RIGHT - 20) * step / (len(there) - 1)

    def y(loss):
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * loss / top

    def line(values, style):
        points = " ".join(f"{x(step):.1f},{y(value):.1f}" for step, value in enumerate(values))
        return f'<polyline points="{points}" fill="none" {style}/>'

    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}"',
        ' font-family="Helvetica, Arial, sans-serif" font-size="11" fill="#33404e">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
    ]
    for tick in range(top + 1):
        out.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(tick):.1f}" y2="{y(tick):.1f}" stroke="#e2e6ea"/>')
        out.append(f'<text x="{LEFT - 8}" y="{y(tick) + 4:.1f}" text-anchor="end">{tick}</text>')
    for step in range(0, len(there), 5):
        out.append(f'<text x="{x(step):.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{step}</text>')
    out.append(line(untrained, 'stroke="#b9c9da" stroke-width="1.2" stroke-dasharray="4 3"'))
    out.append(line(there, 'stroke="#1f5f9e" stroke-width="1.5"'))
    for step, loss in enumerate(ours):
        out.append(f'<circle cx="{x(step):.1f}" cy="{y(loss):.1f}" r="3" fill="none" stroke="#c0392b" stroke-width="1.2"/>')
    worst = max(abs(a / b - 1) for a, b in zip(ours, there))
    out.append(f'<text x="{LEFT}" y="16">loss of each step: LeRobot (line), Coxswain (circles, off by at most {worst:.0e}), '
               "the policy untrained (dashes)</text>")
    out.append(f'<text x="{WIDTH - RIGHT}" y="{HEIGHT - 4}" text-anchor="end">step</text>')
    out.append("</svg>")
    print("\n".join(out))


main()
