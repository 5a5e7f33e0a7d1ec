#!/usr/bin/env python3
"""Draws the losses of a run: docs/figures/loss.py runs/quickstart/summary.json > docs/figures/quickstart-loss.svg"""

import json
import sys

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 640, 240, 44, 12, 26, 34
MEAN_OF = 10


def main():
    summary = json.load(open(sys.argv[1], encoding="utf-8"))
    losses = summary["losses"]
    steps, top = len(losses), 0.5 * (int(max(losses) / 0.5) + 1)

    def x(step):
        return LEFT + (WIDTH - LEFT - RIGHT) * step / steps

    def y(loss):
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * loss / top

    def line(values, style):
        points = " ".join(f"{x(step + 1):.1f},{y(value):.1f}" for step, value in enumerate(values))
        return f'<polyline points="{points}" fill="none" {style}/>'

    def mean(step):
        last = losses[max(0, step - MEAN_OF + 1) : step + 1]
        return sum(last) / len(last)

    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}"',
        ' font-family="Helvetica, Arial, sans-serif" font-size="11" fill="#33404e">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
    ]
    for tick in range(int(top / 0.5) + 1):
        value = tick * 0.5
        out.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(value):.1f}" y2="{y(value):.1f}" stroke="#e2e6ea"/>')
        out.append(f'<text x="{LEFT - 8}" y="{y(value) + 4:.1f}" text-anchor="end">{value:.1f}</text>')
    for step in range(0, steps + 1, 25):
        out.append(f'<text x="{x(step):.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{step}</text>')
    out.append(line(losses, 'stroke="#b9c9da" stroke-width="1.2"'))
    out.append(line([mean(step) for step in range(steps)], 'stroke="#1f5f9e" stroke-width="2"'))
    out.append(f'<text x="{LEFT}" y="16">flow-matching loss of each step, and the mean of the last {MEAN_OF}</text>')
    out.append(f'<text x="{WIDTH - RIGHT}" y="{HEIGHT - 4}" text-anchor="end">step</text>')
    out.append("</svg>")
    print("\n".join(out))


main()
