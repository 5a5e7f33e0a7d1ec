#!/usr/bin/env python3
"""Does the loader in PyTorch (`coxswain_policy`) sample what `cox serve` answers, from the same noise?

    cox serve RUN_DIR --listen 127.0.0.1:8000
    PYTHONPATH=launcher/python python check_policy.py RUN_DIR 127.0.0.1:8000      # torch, transformers 5, peft, openpi-client

Fails (exit 1) if an action differs by more than 1e-4 in units of the action's spread in this data set.
"""
import math
import os
import sys

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
from openpi_client.websocket_client_policy import WebsocketClientPolicy

import coxswain_policy

TOLERANCE = 1e-4


def shape(name, value):
    """Of a value that is a part of a feature: all of its numbers but one for each other part."""
    if "part_of" not in value:
        return value["shape"]
    names, of = value["part_of"]["names"], math.prod(value["part_of"]["shape"])
    return [of - len(names) + 1] if name == names[0] else [1]


def observation(metadata, seed):
    draws, out = np.random.default_rng(seed), {"seed": seed}
    for name, value in metadata["inputs"].items():
        if value["dtype"] == "uint8":
            out[name] = draws.integers(0, 256, value["shape"], np.uint8)
        elif value["dtype"] == "float32":
            out[name] = draws.normal(size=shape(name, value)).astype(np.float32)
        else:
            out[name] = ["open the drawer", "push the button"][seed % 2]
    return out


def main():
    directory, address = sys.argv[1:]
    host, port = address.rsplit(":", 1)
    client = WebsocketClientPolicy(host=host, port=int(port))
    policy = coxswain_policy.Policy.load(directory)
    normalizer = policy.normalizers[policy.about["action"]["name"]]
    observations = [observation(client.get_server_metadata(), seed) for seed in range(4)]
    chunk = client.get_server_metadata()["outputs"]["actions"]["shape"]
    observations.append({**observations[0], "noise": np.random.default_rng(9).normal(size=chunk).astype(np.float32)})
    served = np.stack([client.infer(o)["actions"] for o in observations])
    loaded = policy.sample(observations)
    one = policy.infer(observations[1])["actions"]
    worst = 0.0
    for ours, theirs in [(served, loaded), (served[1], one)]:
        ours, theirs = normalizer.apply(np.array(ours)), normalizer.apply(np.array(theirs))
        worst = max(worst, float(np.abs(ours - theirs).max()))
    print(f"largest difference of a normalised action: {worst:.2e}")
    sys.exit(worst > TOLERANCE)


main()
