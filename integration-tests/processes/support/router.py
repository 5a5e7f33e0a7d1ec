"""The network between two machines of a test: carries IP packets between two interfaces, and loses, delays, reorders or keeps some.

    router.py PID PID        whose network namespaces the two interfaces go to

Each line on standard input changes the weather from then on, and is answered by `ok`:

    {"cut": ["01"], "loss": 0.02, "delay_ms": 20, "jitter_ms": 15}

`cut` names directions in which nothing passes. Each packet is delayed by `delay_ms` and up to `jitter_ms` more, so that packets overtake each
other. What is not named is back to normal. Ends with its standard input. Draws are the same each time.
"""
import fcntl
import heapq
import json
import os
import random
import select
import struct
import subprocess
import sys
import time

TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
MTU = 9000


def interface(side, pid):
    """One end, in the namespace of a process: 10.77.0.1 or 10.77.0.2, fd77::1 or fd77::2."""
    name = f"cox{side}"
    tun = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(tun, TUNSETIFF, struct.pack("16sH22x", name.encode(), IFF_TUN | IFF_NO_PI))
    there = ["nsenter", f"--net=/proc/{pid}/ns/net", "ip"]
    commands = [
        ["ip", "link", "set", name, "netns", str(pid)],
        [*there, "address", "add", f"10.77.0.{side + 1}/24", "dev", name],
        [*there, "-6", "address", "add", f"fd77::{side + 1}/64", "dev", name, "nodad"],
        [*there, "link", "set", name, "mtu", str(MTU), "up"],
    ]
    for command in commands:
        subprocess.run(command, check=True)
    return tun


def main():
    sides = [interface(side, pid) for side, pid in enumerate(sys.argv[1:3])]
    draw, weather, late, number = random.Random(1), {}, [], 0
    print("ok", flush=True)
    while True:
        wait = max(0.0, late[0][0] - time.monotonic()) if late else None
        ready, _, _ = select.select([0, *sides], [], [], wait)
        if 0 in ready:
            line = sys.stdin.readline()
            if not line:
                return
            weather = json.loads(line)
            print("ok", flush=True)
        for side in (0, 1):
            if sides[side] not in ready:
                continue
            for _ in range(64):
                try:
                    packet = os.read(sides[side], 65536)
                except BlockingIOError:
                    break
                if f"{side}{1 - side}" in weather.get("cut", ()) or draw.random() < weather.get("loss", 0):
                    continue
                number += 1
                delay = weather.get("delay_ms", 0) + draw.random() * weather.get("jitter_ms", 0)
                heapq.heappush(late, (time.monotonic() + delay / 1000, number, 1 - side, packet))
        while late and late[0][0] <= time.monotonic():
            _, _, side, packet = heapq.heappop(late)
            try:
                os.write(sides[side], packet)
            except OSError:
                pass  # A full queue, or an interface that is gone: lost, as packets are.


main()
