#!/usr/bin/env python3
"""Records a command on a terminal as an animated SVG, or as one picture, from what tmux has on its screen:

    python3 docs/figures/console.py --every 10 --frames 64 'cox run configs/quickstart.yaml train.steps=4000' > docs/figures/console.svg
    python3 docs/figures/console.py --every 5 --frames 1 'cox top' > docs/figures/top.svg

A row that comes again is drawn once and used again. Needs tmux; the picture needs nothing, and runs no script.
"""

import argparse
import html
import re
import subprocess
import sys
import time

LETTER, LINE, MARGIN = 7.8, 17, 10
COLOURS = ["#6e7681", "#ff7b72", "#4ac26b", "#e3a53a", "#62aef0", "#bb8ae6", "#42c2c2", "#e3e8ef"]
PAGE, INK = "#0f141b", "#e3e8ef"
SESSION = f"cox-console-{time.time_ns()}"


def tmux(*command):
    return subprocess.run(["tmux", "-L", SESSION, *command], check=True, capture_output=True, text=True).stdout


def is_alive():
    state = tmux("display-message", "-p", "#{pane_dead}")
    return state.strip() == "0"


def record(command, every, most, columns, rows):
    """Screens, one each so many seconds, until the command has ended."""
    tmux("-f", "/dev/null", "new-session", "-d", "-x", str(columns), "-y", str(rows), "cat")
    tmux("set-option", "-g", "status", "off")
    tmux("set-option", "-g", "remain-on-exit", "on")
    tmux("set-option", "-g", "remain-on-exit-format", "")
    tmux("respawn-pane", "-k", f"TERM=xterm-256color {command}")
    frames, begun = [], time.monotonic()
    try:
        while len(frames) < most:
            time.sleep(max(0.0, begun + every * (len(frames) + 1) - time.monotonic()))
            ended = not is_alive()
            frames.append(tmux("capture-pane", "-e", "-p").split("\n")[:rows])
            if ended:
                break
    finally:
        tmux("kill-server")
    return frames, time.monotonic() - begun


PLAIN = (None, False, False, False)


def spans(row, state):
    """Pieces of a row with their styles and whether they are reversed; at last, what holds for the next row."""
    colour, bold, dim, back = state
    for escape, text in re.findall(r"\x1b\[([\d;]*)m|([^\x1b]+)", row):
        if text:
            fill = PAGE if back else COLOURS[colour] if colour is not None else None
            style = f' fill="{fill}"' if fill else ""
            style += ' font-weight="bold"' if bold else ""
            yield text, style + (' opacity="0.6"' if dim else ""), back, PLAIN
            continue
        # `38;5;6` is the sixth colour, as `36` is.
        for code in map(int, re.sub(r"38;5;([0-7])\b", r"3\1", escape or "0").split(";")):
            if code == 0:
                colour, bold, dim, back = PLAIN
            elif code in (1, 2):
                bold, dim = bold or code == 1, dim or code == 2
            elif code == 22:
                bold, dim = False, False
            elif code in (7, 27):
                back = code == 7
            elif 30 <= code <= 37 or 90 <= code <= 97:
                colour = code % 10
            elif code == 39:
                colour = None
    yield "", "", False, (colour, bold, dim, back)


def drawn(row, state):
    """A row as text, and the state after it. Each piece stands at its column, for fonts differ. What is reversed has a bar behind it."""
    out, bars, column = [], [], 0
    for text, style, back, after in spans(row, state):
        if back:
            bars.append(f'<rect x="{MARGIN + LETTER * column:.1f}" y="{MARGIN - 1}" width="{LETTER * len(text):.1f}" height="{LINE}" fill="{INK}"/>')
        bare = text.rstrip()
        if bare:
            x = MARGIN + LETTER * (column + len(text) - len(text.lstrip()))
            bare = html.escape(bare.lstrip())
            length = LETTER * len(text.strip())
            out.append(f'<tspan x="{x:.1f}" textLength="{length:.1f}" lengthAdjust="spacingAndGlyphs"{style}>{bare}</tspan>')
        column += len(text)
    return "".join(bars) + (f'<text y="{MARGIN + 12}">{"".join(out)}</text>' if out else ""), after


def main():
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    arguments.add_argument("--every", type=float, default=1.0, help="seconds between two screens")
    arguments.add_argument("--frames", type=int, default=60, help="most screens")
    arguments.add_argument("--show", type=float, default=0.5, help="seconds that a screen is shown")
    arguments.add_argument("--columns", type=int, default=80)
    arguments.add_argument("--rows", type=int, default=24)
    arguments.add_argument("command")
    given = arguments.parse_args()
    frames, took = record(given.command, given.every, given.frames, given.columns, given.rows)
    width, height = MARGIN * 2 + LETTER * given.columns, MARGIN * 2 + LINE * given.rows
    rows, lines = {}, []
    # The last screen stays for as long as five others.
    turns = len(frames) + 4
    whole = given.show * turns
    for at, frame in enumerate(frames):
        used, state = [], PLAIN
        for line, row in enumerate(frame):
            text, state = drawn(row, state)
            if text:
                name = rows.setdefault(text, f"r{len(rows)}")
                used.append(f'<use href="#{name}" y="{LINE * line}"/>')
        kind = "l" if at + 1 == len(frames) else "f"
        kind = kind if len(frames) > 1 else "s"
        lines.append(f'<g class="{kind}" style="animation-delay:{given.show * at - whole:g}s">{"".join(used)}</g>')
    print(
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height}" width="{width:g}" height="{height}">\n'
        f"<style>text {{ font: 13px ui-monospace, 'DejaVu Sans Mono', monospace; fill: {INK}; white-space: pre; }}\n"
        f".f, .l {{ animation: f {whole:g}s step-end infinite; }} .f {{ visibility: hidden; }}\n"
        f".l {{ animation-name: l; }}\n"
        f"@keyframes f {{ 0% {{ visibility: visible; }} {100 / turns:.4f}%, 100% {{ visibility: hidden; }} }}\n"
        f"@keyframes l {{ 0% {{ visibility: visible; }} {500 / turns:.4f}%, 100% {{ visibility: hidden; }} }}\n"
        "@media (prefers-reduced-motion: reduce) { .f { animation: none; } .l { animation: none; visibility: visible; } }\n"
        "</style>\n"
        f'<rect width="{width:g}" height="{height}" rx="6" fill="{PAGE}"/>\n<defs>'
    )
    for text, name in rows.items():
        print(f'<g id="{name}">{text}</g>')
    print("</defs>")
    print("\n".join(lines))
    print("</svg>")
    print(f"{len(frames)} screens of {took:.0f} s", file=sys.stderr)


main()
