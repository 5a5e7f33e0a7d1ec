#!/usr/bin/env python3
"""Do LeRobot's own functions find the policy plugin, and does it act as the loader it stands on?

    PYTHONPATH=launcher/python python check_lerobot.py RUN_DIR        # lerobot 0.6, transformers 5, peft

Goes the way of `lerobot-eval`: the plugin by its package, the policy by its directory, LeRobot's pipelines from their files. Fails (exit
1) if an action is not the very one of `coxswain_policy`, or if a policy that takes rows of the past is not refused.
"""
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import torch
from lerobot.configs import PreTrainedConfig, parser
from lerobot.policies.factory import get_policy_class, make_pre_post_processors

import coxswain_policy


def main():
    place = Path(tempfile.mkdtemp()) / "run"
    shutil.copytree(sys.argv[1], place, ignore=shutil.ignore_patterns("checkpoints", "logs", "export"))
    parser.load_plugin("coxswain_policy")
    coxswain_policy.lerobot.add_files(place)
    config = PreTrainedConfig.from_pretrained(place, cli_overrides=["--device=cpu", "--n_action_steps=2"])
    config.pretrained_path = place
    policy = get_policy_class(config.type).from_pretrained(place, config=config)
    before, after = make_pre_post_processors(
        config, str(place), preprocessor_overrides={"device_processor": {"device": "cpu"}, "rename_observations_processor": {"rename_map": {}}}
    )
    plain = coxswain_policy.Policy.load(place)
    # LeRobot has the names of features; the loader those on the wire.
    plain.names = coxswain_policy.names({**plain.about, "observation": None})
    about, draws = plain.about, np.random.default_rng(0)
    numbers = [feature for feature in (about["state"], about["sensor"]) if feature]

    def see():
        seen = {c["name"]: draws.integers(0, 256, (c["height"], c["width"], 3), np.uint8) for c in about["cameras"]}
        return seen | {f["name"]: draws.normal(size=f["shape"]).astype(np.float32) for f in numbers} | {"prompt": "open the drawer"}

    looked = [see(), see()]
    expected = np.concatenate([plain.infer(seen)["actions"][:2] for seen in looked])
    policy.reset()
    for at, wanted in enumerate(expected):
        seen = looked[at // 2]
        # As its environments give them: one of a batch, images as floats.
        frame = {c["name"]: torch.from_numpy(seen[c["name"]]).permute(2, 0, 1)[None].float() / 255 for c in about["cameras"]}
        frame |= {f["name"]: torch.from_numpy(seen[f["name"]])[None] for f in numbers}
        action = after(policy.select_action(before(frame | {"task": [seen["prompt"]]})))
        assert action.shape == (1, *about["action"]["shape"]), action.shape
        np.testing.assert_array_equal(action[0].numpy(), wanted)
    print(f"{len(expected)} actions of two looks, as the loader's")
    # LeRobot's programs give one row.
    told = json.loads((place / "policy.json").read_text())
    told["sensor"]["rows"] = told["sensor"]["shape"][0]
    (place / "policy.json").write_text(json.dumps(told))
    try:
        get_policy_class(config.type).from_pretrained(place, config=config)
    except ValueError as refusal:
        assert f"rows of `{told['sensor']['name']}`" in str(refusal), refusal
    else:
        raise AssertionError("a window of rows is not refused")


main()
